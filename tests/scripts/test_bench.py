"""The benchmark harness without a GPU: gates, arithmetic, peers, restarts."""

import json
import math
import struct
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from scripts import bench_kernels
from scripts.bench import fatbin, limits, measure, peers, report
from scripts.bench.journal import Journal, restore, supervise
from scripts.bench.peers_indexer import selected
from scripts.bench.row import Row
from scripts.bench.timing import Timing, percentile, summary
from tests.scripts.bench_rows import ABOUT, MACHINE, FakeClock, result, row

ROOT = Path(__file__).resolve().parents[2]


def test_floor_is_the_longer_of_bytes_and_products():
    r = row()
    assert r.floor_us() == pytest.approx(1.0)
    assert r.floor_us(bandwidth=1.5e12) == pytest.approx(2.0)
    compute = Row("a", "b", r.make, 1, 771_000_000)
    assert compute.floor_us() == pytest.approx(1.0)
    assert compute.floor_us(matmul=77.1e12) == pytest.approx(10.0)


def test_medians_and_spread():
    t = summary([5, 1, 2, 3, 4], [2, 1, 3])
    assert (t.cold_us, t.hot_us, t.replays) == (3, 2, 5)
    assert percentile([3, 1, 2], 0.9) == 3


@pytest.mark.parametrize("error", [1.0, math.nan, math.inf])
def test_a_wrong_row_is_red_and_never_timed(error):
    r = measure.measure(row(error), FakeClock(forbidden=True), MACHINE, 20)
    assert r.red and r.verdict == "RED" and r.share_of_floor is None and not r.peers


def test_a_row_that_raises_is_red():
    broken = Row("topk", "x", lambda i: 1 / 0, 1, 1)
    r = measure.measure(broken, FakeClock(forbidden=True), MACHINE, 20)
    assert r.red and "ZeroDivisionError" in r.why


def test_peers_are_gated_too_and_an_absent_one_is_named(monkeypatch):
    def absent(i):
        raise peers.NotInstalled("flash_mla")

    monkeypatch.setattr(peers, "for_row", lambda r: {"absent": absent, "plain": lambda i: lambda: None})
    r = row(peers={"wrong": lambda i: (lambda: None, lambda: (1.0, 0.1))})
    begun = []
    got = measure.measure(r, FakeClock(), MACHINE, 20, begin=begun.append, crashed={"plain"})
    assert got.verdict == "met" and begun == ["", "wrong", "absent", "plain"]
    assert got.peers["wrong"].timing is None and "not timed" in got.peers["wrong"].why
    assert got.peers["absent"].why == "not installed: flash_mla"
    assert got.peers["plain"].why == "crashed the process"
    assert got.best_peer is None


def test_a_selection_of_a_query_that_sees_nothing_is_not_an_error():
    """The first positions of a prompt see no entry; a NaN among the scores is an error still."""
    nothing, some = torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 3.0]])
    assert selected(nothing, torch.tensor([[-1, -1]]))[0] == 0.0
    assert selected(some, torch.tensor([[2, 1]]))[0] == 0.0 and selected(some, torch.tensor([[0, 1]]))[
        0
    ] == pytest.approx(0.4)
    assert math.isnan(selected(some * math.nan, torch.tensor([[0, 1]]))[0])


def test_peers_can_be_left_out(monkeypatch):
    monkeypatch.setattr(peers, "for_row", lambda r: {"slow one": lambda i: 1 / 0, "plain": lambda i: lambda: None})
    got = measure.measure(row(), FakeClock(), MACHINE, 20, left_out="^slow")
    assert got.peers["plain"].timing and got.peers["slow one"].why == "left out on the command line"
    assert "left out on the command line: slow one" in report.markdown([got], MACHINE, ABOUT)


def test_peers_may_be_timed_in_turns_with_ours(monkeypatch):
    """What is reported of ours is its time beside the fastest peer; the journal keeps both."""

    class Turns(FakeClock):
        def in_turn(self, sets, replays):
            (ours, theirs) = sets
            return [Timing(theirs[0] + 1.0, math.nan, 0.0, replays, 1), Timing(theirs[0], math.nan, 0.0, replays, 1)]

    monkeypatch.setattr(measure, "capture", lambda run: run())
    monkeypatch.setattr(peers, "for_row", lambda r: {"slow": lambda i: lambda: 30.0, "fast": lambda i: lambda: 20.0})
    got = measure.measure(row(interleaved=True), Turns(), MACHINE, 20)
    assert got.best_peer == ("fast", 20.0) and got.timing.cold_us == 21.0 and got.peers["slow"].beside.cold_us == 31.0
    assert got.timing.hot_us == 4.0 and math.isnan(got.peers["fast"].beside.hot_us)
    assert restore(json.loads(json.dumps(asdict(got)))).peers["fast"].beside.cold_us == got.timing.cold_us
    assert measure.measure(row(), Turns(), MACHINE, 20).peers["fast"].beside is None


def test_exit_codes():
    met, missed, red = result(5.0), result(50.0), result(None)
    assert bench_kernels.exit_code([met, missed], []) == 0
    assert bench_kernels.exit_code([met, red], []) == 1
    assert bench_kernels.exit_code([met], ["rows_x: ImportError"]) == 1


def test_rows_of_every_module_can_be_listed_without_a_device():
    rows, broken = bench_kernels.collect("cpu")
    assert not broken
    for r in rows:
        assert r.bytes > 0 and r.flops >= 0 and (r.goal_us is None or r.goal_us > 0), r.name
        peers.for_row(r)


def test_journal_remembers_results_and_crashes(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin("topk 256K B1")
    journal.begin("topk 256K B1", "theirs")
    done = result(5.0, peer_us=8.0)
    done.limits = [limits.Kernel("_scores", 2, 12.3, 168, sass={"wgmma": 4})]
    journal.done(done)
    journal.begin("other", "FlashMLA")
    again = Journal(path)
    assert str(again.results["topk 256K B1"]) == str(done)  # as text: NaN is not equal to itself
    assert again.running == ("other", "FlashMLA") and again.crash() == ("other", "FlashMLA")
    assert Journal(path).crashed == {("other", "FlashMLA")} and Journal(path).running is None


def test_a_crash_is_noted_and_the_run_goes_on(tmp_path):
    path = tmp_path / "journal"
    child = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; lines = Path(sys.argv[1])\n"
        "if 'crash' in (lines.read_text() if lines.exists() else ''): sys.exit(0)\n"
        'lines.write_text(\'["begin", "row", "peer"]\\n\'); os.kill(os.getpid(), 9)'
    )
    assert supervise(path, [sys.executable, "-c", child, str(path), str(ROOT)]) == 0
    assert Journal(path).crashed == {("row", "peer")}
    assert supervise(tmp_path / "none", [sys.executable, "-c", "import sys; sys.exit(7)"]) == 7


def test_peers_not_on_this_machine_say_so(monkeypatch):
    monkeypatch.setenv("PEERS", "/nowhere")
    with pytest.raises(peers.NotInstalled):
        peers.require("no_such_peer.kernels")
    with pytest.raises(peers.NotInstalled):
        peers.library("_no_such_library", "_C")
    found = peers.for_row(Row("topk", "x", lambda i: None, 1, 1, facts={"batch": 1, "entries": 4096, "k": 100}))
    assert "torch.topk" in found and "vLLM cooperative_topk" not in found  # it takes 512, 1024 and 2048


def container(*entries):
    """A fat-binary container of (kind, architecture, code)."""
    body = b""
    for kind, arch, code in entries:
        body += struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_what_a_gpu_loads_keeps_its_code(monkeypatch):
    native = container((2, 80, b"a" * 64), (2, 90, b"b" * 64), (1, 80, b"c" * 64))
    from_ptx = container((2, 80, b"d" * 64), (1, 75, b"e" * 64), (1, 80, b"f" * 64), (1, 120, b"g" * 64))
    data = bytearray(b"xx" + native + bytes(8) + from_ptx)
    monkeypatch.setattr(fatbin, "sections", lambda data: {".nv_fatbin": (2, len(data) - 2)})
    fatbin.blank(data, 90)
    assert bytes(data).count(b"bbbb") and bytes(data).count(b"ffff")
    assert not any(bytes(data).count(c * 4) for c in (b"a", b"c", b"d", b"e", b"g"))


def test_the_row_of_whole_prompts_calls_the_selection_as_it_is(monkeypatch):
    """Its arguments are drawn with a hint, which the row gives itself."""
    from scripts.bench import rows_indexer

    seen = []

    def selection(q, weights, keys, visible, k, rounded=False):
        seen.append(rounded)
        return rows_indexer.reference.topk_entries(rows_indexer.reference.index_scores(q, weights, keys, visible), k)

    monkeypatch.setattr(rows_indexer.triton, "select_entries", selection)
    production = rows_indexer.contract_of("select_entries").production
    made = rows_indexer.select(production, dict(keys="fp4", entries=32, prompt=True, k=8), "cpu")
    _, check = made.make(0)
    found, most = check()
    assert found <= most and seen == [True] and made.name.endswith("128 tokens k8, queries in FP4")
