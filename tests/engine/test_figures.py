"""The figures of a run, beside values computed by hand: latencies of a clock that the test moves, block sizes,
fragmentation."""

from types import SimpleNamespace

import pytest

from dsv4.cache.paging import PagePool
from dsv4.engine import BatchEngine, Request
from dsv4.engine.report import document, markdown, request_document
from dsv4.engine.state import percentiles
from dsv4.engine.watch import POINTS, SAMPLED, Watch
from dsv4.speculation import Static
from dsv4.speculation.result import Speculation
from tests.engine.conftest import paged, random_ids
from tests.engine.test_speculation import knowing

ABOUT = {
    "speculate": "mtp",
    "draft tokens": "4",
    "checkpoint": "c",
    "numerics": "fp32",
    "device": "cpu",
    "notes": [],
    "commit": "0" * 40,
    "dirty": True,
    "versions": {"python": "3", "triton": None},
    "command": "dsv4 batch r.jsonl",
}


def prompt(model, tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random_ids(model, tokens, seed=seed).tolist())


class Clock:
    """Stands still, in seconds, until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def timed_engine(model, rows: int = 2, **options):
    clock, results = Clock(), {}
    cache = paged(model, rows, 512, max_rewind=9)
    return (
        BatchEngine(model, cache, clock=clock, on_result=lambda r: results.setdefault(r.id, r), **options),
        clock,
        results,
    )


def step_at(engine, clock, *times: float) -> None:
    for now in times:
        clock.now = now
        engine.step()


def test_latencies_are_those_of_the_clock(model):
    """A prompt of two pieces, and one submitted later: its first token is measured from then."""
    engine, clock, results = timed_engine(model)
    engine.submit(Request("long", prompt(model, 200), 5))
    step_at(engine, clock, 100.5)
    clock.now = 101.0
    engine.submit(Request("short", prompt(model, 20, 1), 2))
    step_at(engine, clock, 101.25, 101.5, 102.0, 103.0, 105.0)
    long, short = results["long"], results["short"]
    assert (long.first_token, long.between_tokens) == (1.25, [0.25, 0.5, 1.0, 2.0])
    assert (short.first_token, short.between_tokens) == (0.25, [0.25])
    # linear between neighbours: 0.95 and 0.99 of the way over three gaps are 2.85 and 2.97
    assert long.document()["inter_token_percentiles_seconds"] == pytest.approx({"p50": 0.75, "p95": 1.85, "p99": 1.97})
    report = document(ABOUT, engine.figures(), [request_document(r) for r in results.values()])
    assert report["latency_seconds"]["time_to_first_token"] == pytest.approx({"p50": 0.75, "p95": 1.2, "p99": 1.24})
    # of 0.25 0.25 0.5 1 2
    assert report["latency_seconds"]["inter_token"] == pytest.approx({"p50": 0.5, "p95": 1.8, "p99": 1.96})
    text = markdown("clock", report)
    assert (
        "| time to first token | 750.0 | 1200.0 | 1240.0 |" in text
        and "| inter token | 500.0 | 1800.0 | 1960.0 |" in text
    )
    assert "| long | max_tokens | 5 | 4 | 0 | 0 | 0.00 | 0.00 | 0% | 0 | 1250.0 | 750.0 | 1850.0 | 1970.0 |" in text


def test_percentiles_are_the_50th_95th_and_99th():
    assert percentiles([float(i) for i in range(100, -1, -1)]) == pytest.approx({"p50": 50, "p95": 95, "p99": 99})
    assert percentiles([]) is None


def test_passes_block_sizes_and_acceptance_of_the_engine(model):
    """Two of four drafts are right; the last pass has two tokens left to give, so one draft. Tokens of a pass come at
    once."""
    request = Request("r", prompt(model, 20), 12)
    engine, clock, results = timed_engine(model, rows=1, drafter=knowing(model, [request], right=2), policy=Static(4))
    engine.submit(request)
    step_at(engine, clock, 101.0, 101.5, 102.5, 104.5, 108.5)
    found = request_document(results["r"])
    assert found["block_size_history"] == [4, 4, 4, 1] and found["accepted_history"] == [2, 2, 2, 1]
    assert (found["drafted"], found["accepted"], found["acceptance"]) == (13, 7, 7 / 13)
    assert (found["mean_block_size"], found["block_size_variance"]) == (3.25, 1.6875)  # (3 · 0.75² + 2.25²) / 4
    assert found["time_to_first_token_seconds"] == 1.0
    assert found["inter_token_seconds"] == [0.5, 0, 0, 1.0, 0, 0, 2.0, 0, 0, 4.0, 0]
    report = document(ABOUT, engine.figures(), [found])
    assert report["totals"] == {
        "requests": 1,
        "failed": 0,
        "tokens": 12,
        "passes": 4,
        "drafted": 13,
        "accepted": 7,
        "acceptance": 7 / 13,
        "last_token_seconds": 8.5,
    }
    assert "The last token came after 8.50 s: 1 tokens/s." in markdown("passes", report)
    assert "| r | max_tokens | 12 | 4 | 13 | 7 (54%) | 3.25 | 1.69 | – | 0 | 1000.0 |" in markdown("passes", report)


def test_counts_of_speculation_by_hand():
    found = Speculation("mtp")
    assert (found.acceptance, found.mean_block_size, found.block_size_variance) == (None, None, None)
    for proposed, accepted, steps in ((8, 5, 8), (4, 1, 4), (0, 0, 0), (0, 0, 0)):
        found.passed(proposed, accepted, steps)
    # (5² + 1² + 3² + 3²) / 4
    assert (found.acceptance, found.mean_block_size, found.block_size_variance) == (0.5, 3.0, 11.0)
    assert found.document(new_tokens=11) == {
        "method": "mtp",
        "proposed": 12,
        "accepted": 6,
        "acceptance": 0.5,
        "verify_passes": 4,
        "draft_steps": 12,
        "mean_block_size": 3.0,
        "block_size_variance": 11.0,
        "tokens_per_pass": 2.5,
        "block_size_history": [8, 4, 0, 0],
        "accepted_history": [5, 1, 0, 0],
    }


def watched(looks: list[float]) -> Watch:
    """After a run whose pool was fragmented so at each step that is looked at."""
    cache = SimpleNamespace(pools={"pool": PagePool("pool", 10)}, under_pressure=False)
    watch = Watch(cache)
    for step in range(SAMPLED * len(looks)):
        cache.figures = lambda: {"pool": {"fragmentation": looks[step // SAMPLED] if step % SAMPLED == 0 else 99.0}}
        watch.look()
        watch.step()
    return watch


def test_mean_fragmentation_is_that_of_the_looks():
    assert watched([0.5, 0.25, 0.75, 0.25]).mean_fragmentation() == {"pool": 0.4375}
    assert Watch(SimpleNamespace(pools={"pool": PagePool("pool", 10)})).mean_fragmentation() == {"pool": 0.0}


def test_fragmentation_of_a_run_by_hand(model):
    """After the first step, the only one that is looked at, a row holds 100 tokens: 25 of a page's 64 entries of
    CSA."""
    engine, _, _ = timed_engine(model)
    engine.submit(Request("r", prompt(model, 100), 3))
    engine.run()
    assert engine.steps == 3 and engine.cache.groups["csa entries"].rows == 64
    assert engine.figures()["pools"]["csa entries"]["mean_fragmentation"] == 1 - 25 / 64


def test_fragmentation_is_kept_over_time():
    watch = watched([0.5, 0.25, 0.75])
    found = watch.document()
    assert found["fragmentation"] == {"pool": [0.5, 0.25, 0.75]} and found["steps_a_look"] == SAMPLED


def test_a_long_course_of_fragmentation_is_kept_coarser_with_the_same_mean():
    looks = [i % 7 / 8 for i in range(2 * POINTS)]
    watch = watched(looks)
    twice = [(a + b) / 2 for a, b in zip(looks[:POINTS:2], looks[1:POINTS:2])]
    later = looks[POINTS::2]  # from then on every other one is looked at
    assert watch.looked_every == 4 * SAMPLED and len(watch.fragmentation["pool"]) == POINTS // 2
    assert watch.fragmentation["pool"] == [
        (a + b) / 2 for course in (twice, later) for a, b in zip(course[::2], course[1::2])
    ]


def test_hit_rates_are_of_the_blocks_that_could_be_borrowed(model):
    """Of each, and of all. 256 tokens leave one to run, so that one block of theirs can be borrowed."""
    shared = prompt(model, 300)
    engine, _, results = timed_engine(model, rows=1)
    for name, ids in (
        ("first", shared),
        ("same", shared),
        ("half", shared[:256]),
        ("other", shared[:128] + prompt(model, 172, 1)),
        ("short", shared[:128]),
    ):
        engine.submit(Request(name, ids, 1))
    engine.run()
    rates = {name: request_document(r)["prefix_hit_rate"] for name, r in results.items()}
    assert rates == {"first": 0.0, "same": 1.0, "half": 1.0, "other": 0.5, "short": None}
    assert engine.figures()["prefix_hit_rate"] == (256 + 128 + 128) / (3 * 256 + 128)


def test_what_a_request_gets_back_is_no_hit(model):
    """Else it would have borrowed all that it could, and of nobody."""
    engine, _, results = timed_engine(model, rows=1)
    engine.submit(Request("r", prompt(model, 300), 8))
    for _ in range(4):
        engine.step()
    engine._evict(engine.running[0])
    engine.run()
    assert results["r"].evictions == 1 and engine.prefixes.hit_tokens == engine.figures()["prefix_hit_rate"] == 0
    assert request_document(results["r"])["prefix_hit_rate"] == 0 and engine.figures()["eviction_steps"] == [4]
