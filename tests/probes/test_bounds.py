"""Clopper-Pearson bounds against published values, against sums of binomial probabilities, and against each other."""

import math

import pytest

from dsv4.probes.bounds import beta_quantile, incomplete_beta, lower_bound, upper_bound


@pytest.mark.parametrize(
    "hits, trials, low, high",
    [
        (0, 10, 0.0, 0.3085),
        (10, 10, 0.6915, 1.0),
        (1, 10, 0.0025, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (95, 100, 0.8872, 0.9836),
        (0, 1, 0.0, 0.975),
        (100, 100, 0.9638, 1.0),
        (0, 400, 0.0, 0.0092),
    ],
)
def test_published_values(hits, trials, low, high):
    assert lower_bound(hits, trials) == pytest.approx(low, abs=5e-5)
    assert upper_bound(hits, trials) == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize("hits, trials", [(1, 3), (7, 20), (19, 20), (50, 100), (399, 400), (3, 1000)])
def test_the_bounds_are_the_rates_at_which_the_tails_have_their_probability(hits, trials):
    probability = lambda k, p: math.exp(
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(p)
        + (trials - k) * math.log1p(-p)
    )
    assert math.fsum(probability(k, lower_bound(hits, trials)) for k in range(hits, trials + 1)) == pytest.approx(
        0.025, rel=1e-9
    )
    assert math.fsum(probability(k, upper_bound(hits, trials)) for k in range(hits + 1)) == pytest.approx(
        0.025, rel=1e-9
    )
    assert upper_bound(hits, trials) == pytest.approx(1 - lower_bound(trials - hits, trials), abs=1e-12)


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.3, 0.5, 0.9, 1.0])
def test_the_incomplete_beta_function_in_closed_form(x):
    for n in (1, 2.5, 40):
        assert incomplete_beta(x, 1, n) == pytest.approx(-math.expm1(n * math.log1p(-x)) if x < 1 else 1, rel=1e-12)
        assert incomplete_beta(x, n, 1) == pytest.approx(x**n, rel=1e-12)
    assert incomplete_beta(x, 2, 2) == pytest.approx(3 * x**2 - 2 * x**3, rel=1e-12)
    assert incomplete_beta(x, 0.5, 0.5) == pytest.approx(2 / math.pi * math.asin(math.sqrt(x)), rel=1e-12)


def test_the_quantile_undoes_it():
    for q in (0.025, 0.5, 0.975):
        for a, b in ((1, 1), (3, 17), (400, 1)):
            assert incomplete_beta(beta_quantile(q, a, b), a, b) == pytest.approx(q, rel=1e-9)


@pytest.mark.parametrize("hits, trials", [(-1, 10), (11, 10), (0, 0)])
def test_counts_that_contradict_each_other(hits, trials):
    for bound in (lower_bound, upper_bound):
        with pytest.raises(ValueError, match="expected 0 ≤ hits ≤ trials"):
            bound(hits, trials)
