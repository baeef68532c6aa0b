"""One-sided Clopper-Pearson bounds of a rate, by quantiles of the beta distribution.

The regularised incomplete beta function is evaluated by its continued fraction (DLMF 8.17.22), its quantile by
bisection.
"""

import math

TINY = 1e-300
ALPHA = 0.025  # one-sided: 97.5 %


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) = ∫₀ˣ u^(a−1) (1−u)^(b−1) du / B(a, b) for 0 ≤ x ≤ 1 and a, b > 0: P(Beta(a, b) ≤ x). ValueError
    beyond."""
    if not (0 <= x <= 1 and a > 0 and b > 0):
        raise ValueError(f"incomplete_beta({x}, {a}, {b}): expected 0 ≤ x ≤ 1 and positive a and b")
    if x in (0.0, 1.0):
        return float(x)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, by I_x(a, b) = 1 − I_1−x(b, a)
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    return front / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)) of DLMF 8.17.22, by Lentz's method."""
    value = c = 1.0
    d = 0.0
    for n in range(1, 10_000):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / _nonzero(1 + term * d), _nonzero(1 + term / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            return value
    raise ArithmeticError(f"the continued fraction of I_{x}({a}, {b}) did not converge")


def _nonzero(x: float) -> float:
    return x if abs(x) > TINY else TINY


def beta_quantile(q: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = q, by bisection to the last bit but a few."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if incomplete_beta(middle, a, b) < q else (low, middle)
    return high


def lower_bound(hits: int, trials: int, alpha: float = ALPHA) -> float:
    """The rate at which `hits` or more of `trials` have probability `alpha`: the alpha quantile of Beta(hits, trials −
    hits + 1).

    Clopper and Pearson 1934. 0 for no hits; ValueError for counts that contradict each other.
    """
    _check(hits, trials)
    return 0.0 if hits == 0 else beta_quantile(alpha, hits, trials - hits + 1)


def upper_bound(hits: int, trials: int, alpha: float = ALPHA) -> float:
    """The rate at which `hits` or fewer of `trials` have probability `alpha`: the 1 − alpha quantile of Beta(hits + 1,
    trials − hits)."""
    _check(hits, trials)
    return 1.0 if hits == trials else beta_quantile(1 - alpha, hits + 1, trials - hits)


def _check(hits: int, trials: int) -> None:
    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"{hits} hits of {trials} trials; expected 0 ≤ hits ≤ trials and at least one trial")
