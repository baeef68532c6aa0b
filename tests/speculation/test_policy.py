"""Block sizes: what the issue asks of the adaptive policy, and of every policy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import InputError
from dsv4.speculation import Adaptive, AdaptiveParameters, CostAware, CostAwareParameters, Static, room, under_pressure
from scripts.bench.speculation_costs import flat, moe

MOE, FLAT = moe(), flat()
POLICIES = {
    "adaptive": Adaptive(),
    "static 8": Static(8),
    "cost-aware, MoE": CostAware(MOE, 1),
    "cost-aware, flat": CostAware(FLAT, 1),
}
ALL = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def after(policy, outcomes, pressure=False):
    """Sizes chosen, before the first pass and after each; an outcome is the share of drafts that is accepted."""
    state = policy.initial()
    sizes = policy.choose([state], pressure)
    for share in outcomes:
        proposed = sizes[-1]
        [state], [size] = policy.step([state], [int(share * proposed)], [proposed], pressure)
        sizes.append(size)
    return state, sizes


def test_mean_and_sizes_are_those_of_the_issue():
    policy, state = Adaptive(), Adaptive().initial()
    assert state == np.float32(0.8) and policy.choose([state]) == [8]
    expected = 0.8
    for accepted, proposed in ((8, 8), (3, 8), (0, 4), (2, 4), (0, 1), (1, 1)):
        expected = 0.2 * accepted / proposed + 0.8 * expected
        [state], [size] = policy.step([state], [accepted], [proposed])
        assert type(state) is np.float32 and abs(state - expected) < 1e-6
        assert size == (8 if expected >= 0.8 else 4 if expected >= 0.5 else 1)


@pytest.mark.parametrize("mean,size", [(0.8, 8), (0.5, 4), (1.0, 8), (0.0, 1)])
def test_a_threshold_belongs_to_the_larger_size(mean, size):
    assert Adaptive().choose([np.float32(mean)]) == [size]
    below = np.nextafter(np.float32(mean), np.float32(-1))
    assert Adaptive().choose([below]) == [{0.8: 4, 0.5: 1}.get(mean, size)]


def test_mean_rises_under_sustained_acceptance_to_the_largest_size():
    policy, state = Adaptive(), np.float32(0.0)
    means = [state]
    for _ in range(40):  # from size 1, which still measures
        [size] = policy.choose([means[-1]])
        means.append(policy.observe(means[-1], size, size))
    assert all(b > a or b > 0.9999 for a, b in zip(means, means[1:])) and policy.choose([means[-1]]) == [8]


def test_rejection_brings_the_size_to_1_in_three_passes():
    assert after(Adaptive(), [0, 0, 0])[1] == [8, 4, 4, 1]
    assert after(Adaptive(), [0] * 50)[1][3:] == [1] * 48


def largest(policy) -> int:
    """What is drafted when all drafts are right: by the costs, or 8."""
    if not isinstance(policy, CostAware):
        return 8
    t = policy.tables
    return policy.sizes[int((t.cost - t.value[int(np.argmax(policy.parameters.chained))]).argmin())]


@ALL
def test_one_rejection_after_ten_acceptances_does_not_collapse_the_size(policy):
    sizes = after(policy, [1.0] * 10 + [0.0])[1]
    assert sizes[-2] == largest(policy) >= 7 and sizes[-1] >= 4


@ALL
def test_rises_again_after_any_rejection(policy):
    sizes = after(policy, [0.0] * 200 + [1.0] * 100)[1]
    assert sizes[-1] == largest(policy) >= 7


@ALL
@settings(max_examples=40, deadline=None)
@given(outcomes=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=30))
def test_pressure_cap_is_never_exceeded(policy, outcomes):
    state, size = policy.initial(), policy.choose([policy.initial()], True)[0]
    assert size <= 2
    for share, pressure in outcomes:
        [state], [size] = policy.step([state], [int(share * size)], [size], pressure)
        assert size in policy.sizes and (not pressure or size <= 2)


@ALL
def test_nothing_drafted_says_nothing_about_acceptance(policy):
    state = policy.initial()
    seen = policy.observe(state, 0, 0)
    assert np.all(np.equal(seen, state)) or np.allclose(seen, state, atol=1e-6)  # at the prior drift leads nowhere


def test_by_the_published_rule_passes_without_drafts_count_as_rejected():
    """0.8 · (1 − 0.2)ⁿ after n of them: three take the size from 8 to 1, and drafts bring it back."""
    policy = Adaptive(AdaptiveParameters(undrafted="decay"))
    state, sizes = policy.initial(), []
    for n in range(4):
        assert state == pytest.approx(0.8 * 0.8**n, rel=1e-6)
        sizes += policy.choose([state])
        state = policy.observe(state, 0, 0)
    assert sizes == [8, 4, 4, 1] and policy.observe(state, 1, 1) > state


@ALL
@pytest.mark.parametrize("accepted,proposed", [(2, 1), (-1, 4), (0, 9), (9, 9)])
def test_impossible_counts_raise(policy, accepted, proposed):
    with pytest.raises(InputError, match="expected 0 <= accepted <= drafted <= 8"):
        policy.observe(policy.initial(), accepted, proposed)


@pytest.mark.parametrize(
    "live,pages,expected", [(85, 100, False), (86, 100, True), (17, 20, False), (0, 7, False), (6, 7, True)]
)
def test_pressure_begins_over_85_percent(live, pages, expected):
    assert under_pressure(live, pages) is expected


@pytest.mark.parametrize("remaining,free,size", [(1, 100, 0), (9, 100, 8), (100, 3, 2), (0, 0, 0)])
def test_room_leaves_a_slot_for_the_token_that_is_always_committed(remaining, free, size):
    assert room(remaining, free) == size


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0.0},
        {"start": 1.5},
        {"thresholds": (0.8, 0.5)},
        {"sizes": (1, 4)},
        {"sizes": (0, 4, 8)},
        {"sizes": (1, 4, 9)},
        {"sizes": (1, True, 8)},
        {"pressure_cap": 0},
        {"undrafted": "fade"},
        {"thresholds": (0.0, 0.5)},
    ],
    ids=str,
)
def test_adaptive_parameters_are_validated(change):
    with pytest.raises(InputError, match="expected"):
        AdaptiveParameters(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"rates": (0.5,) * 7},
        {"rates": (1.0,) * 8},
        {"prior": (0.5,) * 8},
        {"drift": 0.0},
        {"chained": (0.0,) * 8},
        {"chained": (0.5,) * 9},
        {"horizon": -1.0},
        {"sizes": ()},
        {"sizes": (4, 1)},
        {"sizes": (4, 8)},
        {"sizes": (0, 9)},
    ],
    ids=str,
)
def test_cost_aware_parameters_are_validated(change):
    with pytest.raises(InputError):
        CostAwareParameters(**change)


def test_static_sizes_and_their_cap():
    assert Static(0).choose([()] * 3) == [0, 0, 0] and Static(8).choose([()], True) == [2]
    assert Static(8, pressure_cap=None).choose([()], True) == [8] and Static(1).choose([()], True) == [1]
    with pytest.raises(InputError, match="static size is 9"):
        Static(9)


def test_parameters_are_used():
    policy = Adaptive(AdaptiveParameters(weight=0.5, start=0.4, thresholds=(0.6,), sizes=(2, 6), pressure_cap=3))
    assert after(policy, [1.0, 0.0])[1] == [2, 6, 2]  # 0.4, 0.7, 0.35
    assert policy.choose([np.float32(1)], True) == [3] and policy.sizes == (2, 3, 6)


@pytest.mark.parametrize("g,batch", [(g, b) for g in range(8) for b in (1, 8, 32)])
@pytest.mark.parametrize("costs", [MOE, FLAT], ids=["moe", "flat"])
def test_a_sure_belief_takes_the_size_with_the_best_ratio(costs, g, batch):
    """Also where chains fail sooner than first drafts."""
    p = CostAwareParameters(horizon=0.0)
    rate, chained, sure = p.rates[g], p.chained[g], np.eye(8, dtype=np.float32)[g]
    ratio = [(1 + sum(rate * chained**i for i in range(k))) / costs.uniform(batch, k) for k in range(9)]
    assert CostAware(costs, batch, p).choose([sure] * batch) == [int(np.argmax(ratio))] * batch


def test_belief_is_bayes_rule():
    p = CostAwareParameters()
    got = CostAware(MOE, 1).observe(CostAware(MOE, 1).initial(), 2, 4)
    weighed = np.array([q * r * c * (1 - c) for q, r, c in zip(p.prior, p.rates, p.chained)])
    kept = (1 - p.drift) ** 3
    assert (
        np.abs(got - (weighed / weighed.sum() * kept + (1 - kept) * np.array(p.prior))).max() < 1e-6
        and abs(got.sum() - 1) < 1e-6
    )


def test_a_row_without_hope_does_not_widen_the_pass_when_live_tokens_cost():
    rates = (0.1, 0.3, 0.5, 0.65, 0.78, 0.87, 0.93, 0.98)
    parameters = CostAwareParameters(horizon=0.0, rates=rates, chained=rates)
    policy = CostAware(moe(padding=0.0), 8, parameters)
    sure = lambda rate: np.array([r == rate for r in rates], np.float32)
    sizes = policy.choose([sure(0.98)] * 7 + [sure(0.1)])
    assert sizes[:7] == [8] * 7 and sizes[7] <= 1
    padded = CostAware(moe(), 8, parameters).choose([sure(0.98)] * 7 + [sure(0.1)])
    assert padded[:7] == [8] * 7 and padded[7] >= 4  # it costs nothing more; a gain of 0.1^8 is nothing in fp32


def test_more_rows_than_the_policy_was_made_for_raise():
    policy = CostAware(MOE, 1)
    with pytest.raises(InputError, match="2 rows share a pass; this policy was made for a batch of 1"):
        policy.choose([policy.initial()] * 2)


@pytest.mark.parametrize("policy", [Adaptive(), Static(8), CostAware(FLAT, 8)], ids=lambda p: p.name)
def test_rows_at_rest_draft_nothing(policy):
    states, sizes = policy.step([None, policy.initial(), None], [0, 4, 0], [0, 4, 0])
    assert states[0] is None and sizes[0] == sizes[2] == 0 and sizes[1] > 0
    assert policy.choose([None]) == [0]


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_new_requests_are_tried_where_their_prior_alone_says_no(batch):
    """Drafts as dear as half a pass: only what they teach speaks for them, or nothing would ever be learnt."""
    dear = type(MOE)("dear", 1.0, {batch: replace(FLAT.of(batch), draft=2e-3)}, {"kind": "modelled"})
    incurious, curious = CostAware(dear, batch, CostAwareParameters(horizon=0.0)), CostAware(dear, batch)
    assert incurious.choose([incurious.initial()] * batch) == [0] * batch
    assert min(curious.choose([curious.initial()] * batch)) > 0
