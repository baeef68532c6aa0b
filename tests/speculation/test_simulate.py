"""Simulation and oracles: sums by hand, and the oracle against every schedule."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dsv4.errors import InputError
from dsv4.speculation import Adaptive, CostAware, Informed, Oracle, Request, Static, Trace, simulate
from dsv4.speculation.oracle import bound, potential
from dsv4.speculation.trace import mixed, stationary
from scripts.bench.speculation_costs import flat, moe

MOE, FLAT = moe(), flat()
RESTING = replace(
    MOE,
    batches={
        n: replace(
            cost,
            verify=(0.84 * cost.verify[0], *cost.verify[1:]),
            catch_up=((1, 0.3e-3), (2, 0.4e-3), (4, 0.5e-3), (8, 0.7e-3)),
            plain=0.8 * cost.verify[0],
        )
        for n, cost in MOE.batches.items()
    },
)


def trace_of(*counts) -> Trace:
    return Trace("by hand", tuple(Request(str(i), np.array(c)) for i, c in enumerate(counts)), {"kind": "synthetic"})


def test_passes_by_hand():
    # position 0: 2 of 4 accepted, 3 committed; position 3: none; position 4: the end leaves room for 1 draft
    run = simulate(Static(4), trace_of([2, 8, 8, 0, 8, 8]), MOE, 1)
    assert run.block_size_history == {"0": [4, 2, 1]} and run.tokens == 6 and run.passes == 3
    assert (run.drafted, run.accepted, run.acceptance) == (7, 3, 3 / 7)
    assert run.seconds == pytest.approx(MOE.uniform(1, 4) + MOE.uniform(1, 2) + MOE.uniform(1, 1))
    assert run.mean_block_size == pytest.approx(7 / 3) and run.block_size_variance == pytest.approx(np.var([4, 2, 1]))
    assert run.tokens_per_second == run.tokens / run.seconds


def test_no_speculation_is_a_token_a_pass():
    run = simulate(Static(0), stationary("s", 0.9, 4, 20), MOE, 1)
    assert run.tokens == run.passes == 80 and run.acceptance is None and run.seconds == pytest.approx(80 * 2.62e-3)


def test_passes_without_drafts_are_followed_before_a_draft_or_when_no_more_may_wait():
    class Pattern(Static):
        sizes = (0, 2)

        def choose(self, states, pressure=False):
            return [next(wanted)]

    wanted, pass_of, cost = (
        iter([0] * 3 + [2] + [0] * 9 + [2, 2] + [0] * 4),
        lambda k: RESTING.seconds(1, [k]),
        RESTING.of(1),
    )
    run = simulate(Pattern(2), trace_of([0] * 19), RESTING, 1)
    assert run.seconds == pytest.approx(16 * cost.verify[0] + 3 * pass_of(2) + 0.5e-3 + 0.7e-3 + 0.3e-3)
    assert [cost.following(n) for n in (0, 1, 2, 3, 4, 5, 8)] == [
        0,
        0.3e-3,
        0.4e-3,
        0.5e-3,
        0.5e-3,
        0.7e-3,
        0.7e-3,
    ] and cost.rests == 8
    assert RESTING.uniform(1, 0) == pytest.approx(cost.verify[0] + 0.7e-3 / 8) and RESTING.uniform(1, 2) == MOE.uniform(
        1, 2
    )
    wanted = iter([0, 0, 2, 0, 2])
    run = simulate(Pattern(2), trace_of([0] * 2, [0] * 3), RESTING, 1)
    # a prompt is followed; the last token leaves no room to draft
    assert run.seconds == pytest.approx(4 * cost.verify[0] + pass_of(2))
    run = simulate(Static(0), trace_of([3] * 10), RESTING, 1)
    assert run.seconds == pytest.approx(10 * cost.plain)  # of decoding without a drafter


class Wishes(Static):
    """Rows' sizes as they are listed, one list for each decision."""

    sizes = tuple(range(9))

    def __init__(self, *lists):
        self.lists, self.name = iter(lists), "wishes"

    def choose(self, states, pressure=False):
        return list(next(self.lists))


def test_with_two_rounds_under_way_a_pass_has_the_sizes_that_were_decided_before_the_last():
    """And the width of then, though the end leaves less room by now."""
    run = simulate(Wishes([3], [0], [2], [8], [8], [8]), trace_of([0] * 6), MOE, 1, ahead=2)
    assert run.block_size_history == {"0": [3, 3, 0, 2, 1, 0]} and run.widths == [3, 3, 0, 2, 2, 1]
    assert run.seconds == pytest.approx(sum(MOE.uniform(1, k) for k in run.widths))
    run = simulate(Wishes([3], [0], [2], [8], [8], [8]), trace_of([0] * 6), MOE, 1, ahead=3)
    assert run.block_size_history == {"0": [3, 3, 3, 0, 1, 0]} and run.widths == [3, 3, 3, 0, 2, 2]
    assert simulate(Wishes([3], [0], [2], [8], [8], [8]), trace_of([0] * 6), MOE, 1).widths == [3, 0, 2, 2, 1, 0]


def test_a_request_that_begins_has_sizes_that_were_decided_for_it():
    two = replace(MOE, batches={2: MOE.of(1)})
    run = simulate(Wishes([1, 4], [2, 5], [3, 3], [4, 2], [8, 8]), trace_of([0] * 2, [0] * 6, [0] * 3), two, 2, ahead=2)
    assert run.block_size_history == {"0": [1, 0], "1": [4, 4, 3, 2, 1], "2": [2, 1, 0]} and run.widths == [
        4,
        4,
        4,
        3,
        2,
    ]


def test_rows_take_the_next_request_and_it_ends_when_there_is_none():
    run = simulate(Static(0), trace_of([0] * 3, [0] * 5, [0] * 2, [0] * 9), MOE, 1)
    assert run.tokens == 19
    wide = {1: MOE.of(1), 2: MOE.of(8)}
    run = simulate(Static(0), trace_of([0] * 3, [0] * 5, [0] * 4, [0] * 9), type(MOE)("two", 1.0, wide, {"a": 1}), 2)
    assert run.passes == 7 and run.tokens == 14  # row 0: 3 + 4; row 1: 5 + 2 of the last
    with pytest.raises(InputError, match="1 requests for 8 rows"):
        simulate(Static(0), trace_of([0]), MOE, 8)


# two may wait, and following is dear
FEW = replace(RESTING, batches={1: replace(RESTING.of(1), catch_up=((1, 0.9e-3), (2, 1.5e-3)))})


@pytest.mark.parametrize("costs", [MOE, FLAT, RESTING, FEW], ids=["moe", "flat", "resting", "two may wait"])
def test_oracle_at_batch_1_is_the_best_of_all_schedules(costs):
    rng, cost, taken = np.random.default_rng(0), costs.of(1), set()
    for _ in range(20):
        counts = (rng.integers(0, 9, 14) * (rng.random(14) < 0.4)).tolist()

        @cache
        def best(t, rested):
            if t >= len(counts):
                return 0.0
            sizes = range(min(8, len(counts) - t - 1) + 1)
            found = []
            for k in sizes:
                follows = k > 0 or rested == cost.rests
                after = (0 if follows else rested) + (not k) * bool(cost.rests)
                found.append(
                    cost.draft * k
                    + cost.verify[k]
                    + follows * cost.following(rested)
                    + best(t + min(k, counts[t]) + 1, after)
                )
            return min(found)

        run = simulate(Oracle(costs, 1), trace_of(counts), costs, 1)
        assert run.seconds == pytest.approx(best(0, 0)) and run.tokens == 14
        assert potential(Request("r", np.array(counts)), costs, 1)[0, 0] == pytest.approx(best(0, 0))
        taken |= set(run.block_size_history["0"])
    assert 0 in taken and len(taken) > 2


@pytest.mark.parametrize(
    "costs,batch",
    [(MOE, 1), (FLAT, 1), (MOE, 8), (moe(0.0), 8), (RESTING, 1), (RESTING, 8)],
    ids=["moe 1", "flat 1", "moe 8", "live tokens 8", "resting 1", "resting 8"],
)
def test_nobody_passes_the_bound_and_the_oracle_passes_the_static_sizes(costs, batch):
    trace = mixed(requests=16, tokens=200, seed=3)
    limit = bound(trace, costs, batch)
    drafting = (1, 2, 4, 8) if costs.of(batch).plain else (0, 1, 2, 4, 8)  # no drafter at all may beat all who have one
    speed = {k: simulate(Static(k), trace, costs, batch).tokens_per_second for k in drafting}
    widths = [None] if batch == 1 else [0, 2, 8]
    oracle = max(simulate(Oracle(costs, batch, w), trace, costs, batch).tokens_per_second for w in widths)
    assert max(speed.values()) < oracle
    # at batch 8 the run ends before the trace does, so that its texts are not quite those of the bound
    for policy in (Adaptive(), CostAware(costs, batch), Informed(costs, batch)):
        assert simulate(policy, trace, costs, batch).tokens_per_second < oracle * (1.0000001 if batch == 1 else 1.05)
    assert oracle <= limit * (1.0000001 if batch == 1 else 1.05)


@pytest.mark.parametrize("rate", [0.35, 0.95])
@pytest.mark.parametrize("costs,batch", [(MOE, 1), (FLAT, 1), (MOE, 8)], ids=["moe 1", "flat 1", "moe 8"])
def test_cost_aware_keeps_0_98_of_the_best_static_size_on_stationary_text(costs, batch, rate):
    trace = stationary("s", rate, 24, 400, seed=11)
    best = max(simulate(Static(k), trace, costs, batch).tokens_per_second for k in range(9))
    # 400 tokens: the start weighs more
    assert simulate(CostAware(costs, batch), trace, costs, batch).tokens_per_second > 0.975 * best


@pytest.mark.few(costs=[MOE])
@pytest.mark.parametrize("costs", [MOE, FLAT], ids=["moe", "flat"])
def test_cost_aware_gains_over_the_best_static_size_on_mixed_text(costs):
    trace = mixed(requests=24, tokens=600, seed=12)
    best = max(simulate(Static(k), trace, costs, 1).tokens_per_second for k in range(9))
    assert simulate(CostAware(costs, 1), trace, costs, 1).tokens_per_second > 1.06 * best


def test_pressure_caps_the_history_and_leaves_the_rest():
    trace = stationary("s", 0.97, 1, 600)
    run = simulate(Adaptive(), trace, MOE, 1, pressure=lambda tokens: 200 <= tokens < 400)
    sizes, at, inside = run.block_size_history["s 0"], 0, []
    for size in sizes:
        if 200 <= at < 400:
            inside.append(size)
        at += min(size, int(trace.requests[0].accepted[at])) + 1
    assert inside and max(inside) <= 2 and max(sizes) == 8


@pytest.mark.parametrize("make", [Oracle, Informed])
def test_oracles_say_that_they_need_the_future(make):
    with pytest.raises(InputError, match="needs the"):
        make(MOE, 1).initial()
    policy = make(MOE, 1)
    with pytest.raises(InputError, match="under pressure"):
        policy.choose([policy.initial(stationary("s", 0.5, 1, 20).requests[0])], True)


def test_document_of_a_run():
    document = simulate(Static(2), stationary("s", 0.5, 2, 20), MOE, 1).document()
    assert "block_size_history" not in document and document["tokens"] == 40 and document["policy"] == "static 2"
