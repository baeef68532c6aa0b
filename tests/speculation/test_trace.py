"""Traces and cost tables: files, errors, synthetic texts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import InputError
from dsv4.speculation import Request, Trace, read_costs, read_trace, write_trace
from dsv4.speculation.costs import parse_costs
from dsv4.speculation.trace import counts_of, mixed, parse_trace, stationary
from scripts.bench.speculation_costs import FOLDER, flat, moe


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = mixed(requests=3, tokens=50)
    recorded = Trace("r", (Request("a", np.array([0, 8, 3])),), {"kind": "recorded", "checkpoint": "demo"})
    for one in (trace, recorded):
        write_trace(one, tmp_path / "t.json")
        got = read_trace(tmp_path / "t.json")
        assert got.name == one.name and got.provenance == one.provenance and got.tokens == one.tokens
        for a, b in zip(got.requests, one.requests, strict=True):
            assert a.name == b.name and np.array_equal(a.accepted, b.accepted) and a.accepted.dtype == np.int64
            assert (a.rates is None) == (b.rates is None) and (a.rates is None or np.array_equal(a.rates, b.rates))
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


GOOD = {
    "format": "dsv4-acceptance-trace",
    "version": 1,
    "largest": 8,
    "provenance": {"kind": "recorded"},
    "requests": [{"accepted": [1, 8]}],
}
BAD = {
    "format": {"format": "other"},
    "version": {"version": 2},
    "largest": {"largest": 4},
    "provenance": {"provenance": {}},
    "no requests": {"requests": []},
    "not a list": {"requests": {}},
    "no counts": {"requests": [{}]},
    "over 8": {"requests": [{"accepted": [9]}]},
    "negative": {"requests": [{"accepted": [-1]}]},
    "bool": {"requests": [{"accepted": [True]}]},
    "fraction": {"requests": [{"accepted": [0.5]}]},
    "rates": {"requests": [{"accepted": [1], "rates": [1, 1]}]},
    "rate": {"requests": [{"accepted": [1], "rates": [1.5]}]},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_traces_raise_one_line(change):
    assert parse_trace(GOOD).tokens == 2
    with pytest.raises(InputError) as error:
        parse_trace({**GOOD, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reader", [read_trace, read_costs])
@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe"], ids=["absent", "cut", "list", "not text"])
def test_files_that_are_none_name_the_file(tmp_path, reader, content):
    if content is not None:
        (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(InputError, match="f.json"):
        reader(tmp_path / "f.json")


def test_writing_where_nothing_can_be_written_raises(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(stationary("s", 0.5, 1, 4), tmp_path / "absent" / "t.json")


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0, 1), tokens=st.integers(1, 60), seed=st.integers(0, 99), falloff=st.sampled_from([1.0, 0.8]))
def test_synthetic_counts_are_possible(rate, tokens, seed, falloff):
    [request] = stationary("s", rate, 1, tokens, seed, falloff).requests
    left = tokens - np.arange(tokens)
    assert len(request) == tokens and (request.accepted <= np.minimum(8, left)).all() and (request.accepted >= 0).all()
    if falloff == 1:  # positions of one text agree about which tokens are difficult
        longer = request.accepted[:-1] - 1
        assert (request.accepted[1:] >= longer).all()
    again = stationary("s", rate, 1, tokens, seed, falloff).requests[0]
    assert np.array_equal(again.accepted, request.accepted)


@pytest.mark.parametrize("rate", [0.35, 0.9])
def test_synthetic_rates_are_the_acceptance(rate):
    trace = stationary("s", rate, 8, 4000)
    first = np.concatenate([r.accepted[:-9] >= 1 for r in trace.requests]).mean()
    all_eight = np.concatenate([r.accepted[:-9] == 8 for r in trace.requests]).mean()
    assert abs(first - rate) < 0.01 and abs(all_eight - rate**8) < 0.02


def test_mixed_has_both_kinds_in_segments():
    trace = mixed(high=0.95, low=0.3, segment=100, requests=16, tokens=2000)
    rates = np.concatenate([r.rates for r in trace.requests])
    turns = sum((np.diff(r.rates) != 0).sum() for r in trace.requests)
    assert set(rates) == {0.95, 0.3} and 0.4 < (rates == 0.95).mean() < 0.6 and 240 < turns < 400
    assert not np.array_equal(
        mixed(seed=1, requests=1).requests[0].accepted, mixed(seed=2, requests=1).requests[0].accepted
    )


def test_counts_of_a_recorded_run():
    chosen = [5, 6, 7, 8, 9, 1, 1, 1, 1, 1]
    drafted = [[5, 6, 0], [6, 7, 8, 9], [0, 8], []]
    assert counts_of(drafted, chosen).tolist() == [2, 4, 0, 0]
    assert counts_of([[9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], [9] + [1] * 20).tolist() == [8]


@pytest.mark.parametrize("table", [moe(), flat()], ids=["moe", "flat"])
def test_cost_files_in_the_tree_are_what_the_model_gives(table):
    name = "flat" if table.provenance["model"].startswith("weights") else "h100_flash16"
    assert read_costs(FOLDER / f"speculation_{name}.json").document() == table.document()


def test_costs_of_a_pass():
    table = moe(padding=0.5)
    verify, draft = table.of(8).verify, table.of(8).draft
    assert table.seconds(8, [3] * 8) == pytest.approx(draft * 3 + verify[3]) == pytest.approx(table.uniform(8, 3))
    assert table.seconds(8, [0] * 8) == verify[0]
    assert table.seconds(8, [4, 0] * 4) == pytest.approx(draft * 4 + (verify[4] + verify[2]) / 2)
    assert moe(1.0).seconds(8, [4, 0] * 4) == moe(1.0).uniform(8, 4)
    base, price = table.linear(8)
    assert base[5] + price[5] * 40 == pytest.approx(table.uniform(8, 5)) and price[0] == 0
    with pytest.raises(InputError, match=r"no batch 3; it has \[1, 8, 32\]"):
        table.of(3)


COSTS = json.loads(json.dumps(moe().document()))
ONE = COSTS["batches"]["1"]
BAD_BATCH = {
    "draft": {"draft": -1},
    "zero": {"verify": [0] * 9},
    "short": {"verify": [1] * 8},
    "nan": {"verify": [float("nan")] * 9},
    "measured": {"measured": [1] * 9},
    "catch_up": {"catch_up": [1] * 5},
    "negative": {"catch_up": [[1, -1]]},
    "order": {"catch_up": [[2, 1], [2, 1]]},
    "nothing": {"catch_up": [[0, 1]]},
    "part": {"catch_up": [[1.5, 1]]},
    "plain": {"plain": 0},
    "no plain": {"plain": "fast"},
}
BAD_COSTS = {
    "unit": {"unit": "ms"},
    "padding": {"padding": 2},
    "provenance": {"provenance": {}},
    "batches": {"batches": {}},
    "key": {"batches": {"x": {}}},
    **{name: {"batches": {"1": {**ONE, **change}}} for name, change in BAD_BATCH.items()},
}


@pytest.mark.parametrize("change", BAD_COSTS.values(), ids=BAD_COSTS)
def test_bad_costs_raise_one_line(change):
    assert parse_costs(COSTS) == moe()
    resting = replace(moe(), batches={1: replace(moe().of(1), catch_up=((2, 1e-3), (8, 2e-3)), plain=3e-3)})
    assert parse_costs(json.loads(json.dumps(resting.document()))) == resting
    with pytest.raises(InputError, match="expected") as error:
        parse_costs({**COSTS, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize("batch", [8, 32])
def test_the_linear_cost_is_exact_for_equal_rows_and_never_too_low(batch, padding):
    table, rng = moe(padding), np.random.default_rng(0)
    base, price = table.linear(batch)
    for largest in range(9):
        assert base[largest] + price[largest] * batch * largest == pytest.approx(table.uniform(batch, largest))
        for _ in range(20):
            sizes = [largest, *rng.integers(0, largest + 1, batch - 1).tolist()]
            assert table.seconds(batch, sizes) <= base[largest] + price[largest] * sum(sizes) + 1e-12
