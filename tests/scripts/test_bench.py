"""The benchmark harness without a GPU: gates, arithmetic, reports, restarts, and the compile check."""

import json
import math
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from scripts import bench_kernels
from scripts.bench import assembled, beside, decode, decode_report, fatbin, limits, measure, peers, report
from scripts.bench.journal import Journal, restore, supervise
from scripts.bench.measure import PeerResult, Result
from scripts.bench.row import Beside, Row
from scripts.bench.timing import Machine, Timing, percentile, summary

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("NVIDIA H100 80GB HBM3", 3.0e12, 771e12, 3.7, 1.3, 2.4e12)
ABOUT = {"command": "python scripts/bench_kernels.py", "commit": "abc1234", "device": MACHINE.device, "torch": "2.11",
         "triton": "3.6", "python": "3.12"}
SETUP = {"preset": "Flash", "layers": 16, "numerics": "native", "backend": "triton", "cache": "fp8", "index_cache": "fp4",
         "weight_bytes": 10**10}


class FakeClock:
    """Gives every run the same time, and refuses when told that nothing may be timed."""

    def __init__(self, us: float = 5.0, forbidden: bool = False):
        self.us, self.forbidden = us, forbidden

    def runs(self, runs, replays=30):
        assert not self.forbidden, "a red row was timed"
        for run in runs:
            run()
        return Timing(self.us, self.us - 1, 0.05, replays, 2)


def row(error=0.0, tolerance=1e-3, goal=10.0, **more):
    make = lambda i: (lambda: torch.ones(2) * i, lambda: (error, tolerance))
    return Row("topk", "256K B1", make, 3_000_000, 1000, goal, **more)


def result(us: float | None = 5.0, goal: float | None = 10.0, shape: str = "256K B1", peer_us: float | None = None, why=""):
    timing = None if us is None else Timing(us, us - 1, 0.05, 30, 2)
    found = {"absent": PeerResult(why="not installed: x")}
    if peer_us is not None:
        found["theirs"] = PeerResult(Timing(peer_us, peer_us, 0.0, 30, 1))
    return Result("topk", shape, 3_000_000, 1000, 1.0, goal, 0.0, 1e-3, why, timing, found)


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


def test_table_says_missed_and_shows_no_time_of_a_red_row():
    rows = [result(5.0, 10.0, "met"), result(15.0, 10.0, "late", peer_us=3.0),
            result(None, shape="red", why="error 1.0 over 0.1")]
    text = report.markdown(rows, MACHINE, ABOUT)
    line = {r.shape: next(x for x in text.splitlines() if f"| {r.shape} |" in x) for r in rows}
    assert line["met"].endswith("| met |") and line["late"].endswith("| MISSED |") and line["red"].endswith("| RED |")
    assert "theirs 3.00" in line["late"] and "20%" in line["met"]
    assert "| – | – | – | – | 3 MB | 1.00 | – | 10.0 | RED |" in line["red"]
    assert "1 goals met, 1 MISSED, 1 RED; ahead of the fastest peer in 0 of 1" in text
    assert "error 1.0 over 0.1" in text and "not installed: absent (x)" in text and ABOUT["command"] in text


SASS = """
        /*0000*/ LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0010*/ LDG.E.64 R8, desc[UR4][R2.64] ;  /*0020*/ LDG.E R8, desc[UR4][R2.64] ;  /*0030*/ LDG.E.U8 R1, [R2] ;
        /*0040*/ LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ;  /*0050*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/ HMMA.16816.F32.BF16 R24, R4, R2, R24 ;  /*0070*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;  /*0080*/ STL [R1], R2 ;
"""


def test_a_missed_goal_comes_with_what_limits_it():
    assert limits.count_instructions(SASS) == {"wgmma": 1, "mma": 1, "load 16 B": 1, "load 8 B": 1, "load ≤ 4 B": 2,
                                               "async copy": 1, "barrier": 1, "local": 1}
    late = result(15.0, 10.0, "late")
    late.limits = [limits.Kernel("_scores", 1, 12.3, 168, 0, 65536, 8, {"wgmma": 4}), limits.Kernel("memset", 1, 1.0)]
    text = report.markdown([result(5.0, 10.0, "met"), late], MACHINE, ABOUT)
    missed = text[text.index("## Goals missed"):]
    assert "| `topk` late | 15.0 | 10.0 | 5.0 | 1.00 | 40% | 0.20 | 0 |" in missed  # 3.7 + 1.3 for two kernels; 3 MB in 15 µs
    assert "| `topk` late | `_scores` | 1 | 12.3 | 168 | 0 | 65536 | 8 | wgmma 4 |" in missed
    assert "| `memset` | 1 | 1.0 | – | – | – | – |  |" in missed and "`topk` met" not in missed
    assert "## Goals missed" not in report.markdown([result(5.0, 10.0)], MACHINE, ABOUT)


def test_a_step_assembled_from_peers():
    names = {r.name for r in bench_kernels.collect("cpu")[0]}
    assert all(name in names for s in assembled.STACKS for name, _ in s.parts)
    first = assembled.STACKS[0]
    assert sum(count for name, count in first.parts if "decode" in name) == assembled.LAYERS
    found = [Result(*name.split(" ", 1), 1, 1, 1.0, None, 0.0, 1.0, "", Timing(10.0, 9.0, 0.0, 30, 1),
                    {"A": PeerResult(Timing(20.0, 20.0, 0.0, 30, 1)), "B": PeerResult(Timing(30.0, 30.0, 0.0, 30, 1))})
             for name, _ in first.parts]
    ours, theirs, peers_ = assembled.sums(first, found, MACHINE)
    runs = 7 + 9 + 7 + 16 + 16 + 16 + 32
    assert (ours, theirs) == (pytest.approx(runs * 7.6e-3), pytest.approx(runs * 17.6e-3)) and peers_ == ["A"]  # 3.7 − 1.3 off each
    assert "| batch 1 at 128K | 0.783 | 1.813 | 2.32× ahead | A |" in report.markdown(found, MACHINE, ABOUT)
    assert assembled.sums(first, found[1:], MACHINE) is None and "Parts of a step" not in report.markdown(found[1:], MACHINE, ABOUT)


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


def test_lists_of_numbers_stand_on_one_line_of_json_and_nothing_else_changes():
    document = {"sizes": [1, -2, 3.5e-7], "nested": [[1, 2], []], "said": ["[\n 1\n]", "a"], "mixed": [1, None, True], "empty": {}}
    text = report.dumps(document)
    assert json.loads(text) == document
    assert '"sizes": [1, -2, 3.5e-07]' in text and "  [1, 2]," in text
    with pytest.raises(ValueError):
        report.dumps({"us": float("nan")})


def test_json_and_svg(tmp_path):
    rows = [result(5.0, None, peer_us=8.0), result(None, shape="wrong one")]
    picture, text = report.svg(rows, ABOUT), report.markdown(rows, MACHINE, ABOUT)
    files = report.write(tmp_path, "bench", report.document(rows, MACHINE, ABOUT), text, picture)
    assert [f.suffix for f in files] == [".json", ".md", ".svg"]
    read = json.loads((tmp_path / "bench.json").read_text())
    assert read["about"]["commit"] == "abc1234" and read["machine"]["empty_us"] == 3.7
    assert read["rows"][0]["best_peer"] == {"name": "theirs", "cold_us": 8.0}
    assert read["rows"][0]["share_of_floor"] == pytest.approx(0.2)
    assert read["rows"][1]["timing"] is None and read["rows"][1]["verdict"] == "RED"
    assert picture.startswith("<?xml") and "topk 256K B1" in picture and "wrong one" not in picture
    assert report.svg([result(None)], ABOUT) is None


def test_slug_and_units():
    names = {MACHINE.device: "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s"}
    assert {name: report.device_slug(name) for name in names} == names
    assert (report.us(1234.5), report.us(12.34), report.us(1.234), report.us(None)) == ("1234", "12.3", "1.23", "–")


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
    child = ("import os, sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; lines = Path(sys.argv[1])\n"
             "if 'crash' in (lines.read_text() if lines.exists() else ''): sys.exit(0)\n"
             "lines.write_text('[\"begin\", \"row\", \"peer\"]\\n'); os.kill(os.getpid(), 9)")
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


def point(batch=1, context=8192, step_ms=2.0, **more):
    return decode.Point(batch, context, 16, step_ms, step_ms, 0.01, 1.4, 4_200_000_000, 10**10, 10**8, 3.0, **more)


def test_decode_goals_are_judged():
    points = [point(kernels=288), point(context=1 << 20, step_ms=3.0, kernels=288)]
    said = {r["what"]: r["verdict"] for r in decode_report.verdicts(points, {"layer_ms": 10.0})}
    assert said["ms a layer, batch 1 at 8K"] == "met" and said["ms a layer, batch 1 at 1M"] == "MISSED"
    assert said["kernels a layer, batch 1 at 8K"] == "met" and said["1M over 8K, batch 1"] == "MISSED"
    assert said["times faster a layer than transformers eager, batch 1"] == "met"
    assert said["compiles after warm-up, all points"] == "met"
    assert not decode_report.red(points) and decode_report.red([point(compiles=1)]) and decode_report.red([point(syncs=2)])
    theirs = {"version": "5", "layers": 5, "experts": 16, "context": 8192, "step_ms": 50.0, "layer_ms": 10.0}
    text = decode_report.markdown(points, MACHINE, ABOUT, SETUP, theirs, ["batch 8 at 1M: out of memory"])
    assert "| 1 | 1M | 3.000 |" in text and "MISSED" in text and "out of memory" in text
    json.dumps(report.finite(decode_report.document(points, MACHINE, ABOUT, SETUP, theirs, [])), allow_nan=False)
    assert decode_report.svg(points, ABOUT, theirs).startswith("<?xml")


def test_bytes_of_a_flash_step():
    """perf.md §2: 11.21 GB of weights at batch 1; the caches add 0.004, 0.023 and 0.16 ms at 3.0 TB/s."""
    from dsv4 import dummy
    from dsv4.cache import Cache
    from dsv4.config import ModelConfig
    from dsv4.model import Model
    from dsv4.numerics import numerics_named
    from loaders.expected import official_tensors, preset
    raw = preset("flash")
    config = ModelConfig.from_official(raw | {"num_nextn_predict_layers": 0, "compress_ratios": raw["compress_ratios"][:43]})
    tensors = official_tensors(config)
    numerics = numerics_named("native").with_caches("fp8", "fp4")
    with torch.device("meta"):
        model = Model(config, numerics, "reference", lambda name: dummy._storage(tensors, False, name), mtp=False)
    assert decode.weight_bytes(model, 1) == pytest.approx(11.21e9, rel=1e-3)
    cache = Cache(config, numerics, 1, 8192, 128, [torch.device("meta")] * 43, False)
    for context, ms in ((8192, 0.004), (131072, 0.023), (1 << 20, 0.16)):
        assert decode.cache_bytes(model, cache, 1, context) / 3.0e9 == pytest.approx(ms, rel=0.1)


CASES = '''
import triton
import triton.language as tl

@triton.jit
def copy(X, Y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i, mask=i < n), mask=i < n)

@triton.jit
def broken(X, B: tl.constexpr):
    tl.store(X, no_such_name)

def cases():
    types = {"X": "*bf16", "Y": "*bf16", "n": "i32", "B": "constexpr"}
    return [("copies", copy, types, {"B": 256}, {"num_warps": 4}),
            ("breaks", broken, {"X": "*bf16", "B": "constexpr"}, {"B": 1}, {})]
'''


def test_a_kernel_that_does_not_compile_fails_the_check(tmp_path):
    folder = tmp_path / "aot_cases"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "some.py").write_text(CASES)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path),
                   "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, ROOT / "scripts" / "check_aot.py", "--modules", "aot_cases", "--capabilities", "80",
                          "--jobs", "1", "--json", str(tmp_path / "aot.json")], capture_output=True, text=True, env=environment)
    assert ran.returncode == 1, ran.stderr
    rows = {r["name"]: r for r in json.loads((tmp_path / "aot.json").read_text())["rows"]}
    assert not rows["copies"]["error"] and rows["copies"]["registers"] > 0 and rows["copies"]["shared"] == 0
    assert "no_such_name" in rows["breaks"]["error"] and "| breaks | FAILED |" in ran.stdout and "1 of 2 compiled" in ran.stdout


def test_tf32_is_seen_in_every_kind_of_product():
    from scripts import check_aot
    for line in ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1};", "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%f1};",
                 "@%p1 tcgen05.mma.cta_group::1.kind::tf32 [ %r1 ], %rd1;"):
        assert check_aot.re.search(check_aot.TF32, line)
    assert not check_aot.re.search(check_aot.TF32, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}; cvt.rna.tf32.f32 %r1;")


def beside_peers(ours, us, wanted, **turns):
    """A result of `ours` µs beside peers of `us`, with goals `wanted`; turns: ours as timed in turn with a peer."""
    timing = lambda value: None if value is None else Timing(value, math.nan, 0.0, 30, 1)
    found = {name: PeerResult(timing(value), beside=timing(turns.get(name))) for name, value in us.items()}
    return Result("topk", "256K B1", 3_000_000, 1000, 1.0, 10.0, 0.0, 1e-3, "", timing(ours), found, beside=wanted)


def test_goals_beside_peers_are_judged_in_the_same_run():
    """Against the fastest peer that the goal names, and with ours as timed in turn with that one."""
    r = beside_peers(5.0, {"SDPA a": 20.0, "SDPA b": 11.0, "other": 6.0, "SDPA broken": None},
                     [Beside(2.3, "^SDPA"), Beside(1.5), Beside(1 / 1.02, "other"), Beside(2.0, "absent")])
    first, second, third, none = beside.judged(r)
    assert (first.peer, first.times, first.verdict) == ("SDPA b", pytest.approx(2.2), "MISSED")
    assert (second.peer, second.times, second.verdict) == ("other", pytest.approx(1.2), "MISSED")
    assert third.verdict == "met" and (none.times, none.verdict) == (None, "not judged")
    for ours, verdict in ((102.0, "met"), (102.1, "MISSED")):  # in turn with the peer; what it took alone is of another moment
        assert beside.judged(beside_peers(90.0, {"x": 100.0}, [Beside(1 / 1.02)], x=ours))[0].verdict == verdict
    assert beside.judged(beside_peers(None, {"x": 100.0}, [Beside(2.0)]))[0].verdict == "not judged"
    text = report.markdown([r], MACHINE, ABOUT)
    assert "| 10.0, 2.3× as fast, 1.5× as fast, ≤ 1.02 of its time, 2× as fast | met, MISSED, MISSED, met, not judged |" in text
    assert "| `topk` 256K B1 | 2.3× as fast | SDPA b | 11.0 | 5.0 | 2.200 | MISSED |" in text
    assert "Beside peers of the same run: 1 goals met, 2 MISSED, 1 not judged." in text and "1 goals met, 0 MISSED, 0 RED" in text
    assert "5.00 MISSED: 2.3× as fast, MISSED: 1.5× as fast<" in report.svg([r], ABOUT)
    assert "Goals beside" not in report.markdown([result()], MACHINE, ABOUT)


def test_the_goals_of_gqa_rows_beside_their_peers():
    goals = {r.name: r.beside for r in bench_kernels.collect("cpu", "^gqa_|^chunked")[0] if r.beside}
    times = {name: g[0].times for name, g in goals.items()}
    assert {name.split(",")[0]: t for name, t in times.items() if name.startswith("gqa_gather 1")} == {
        "gqa_gather 128K B1 28q/4kv/128": 2.3, "gqa_gather 1M B1 28q/4kv/128": 10.2, "gqa_gather 1M B8 28q/4kv/128": 41.9}
    never = [name for name in goals if "never_stopping" in name]
    assert len(never) == 4 and sum("4096 kept" in name for name in never) == 2 and all(times[name] == 1 / 1.02 for name in never)
    assert {t for name, t in times.items() if "chunked_prefill 4096 " in name} == {1.5}
    assert {t for name, t in times.items() if "chunked_prefill 131072 " in name} == {5.0}


def test_a_report_is_drawn_again_from_its_json(tmp_path, monkeypatch, capsys):
    """The figures of the run, the goals of today; what stands on disk is as it was where nothing is new."""
    late = beside_peers(5.0, {"theirs": 20.0}, [], theirs=8.0)
    late.limits = [limits.Kernel("_scores", 2, 12.3, 168, sass={"wgmma": 4})]
    rows = [late, result(None, shape="wrong one", why="error")]
    report.write(tmp_path, "bench", report.document(rows, MACHINE, ABOUT), report.markdown(rows, MACHINE, ABOUT), None)
    before, old = json.loads((tmp_path / "bench.json").read_text()), (tmp_path / "bench.md").read_text()
    monkeypatch.setattr(bench_kernels, "collect", lambda device: ([row(beside=(Beside(3.0),))], []))
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--from", str(tmp_path / "bench.json")])
    assert bench_kernels.main() == 0
    after, text = json.loads((tmp_path / "bench.json").read_text()), (tmp_path / "bench.md").read_text()
    assert after["rows"][0]["judged"] == [{"goal": {"times": 3.0, "peers": ""}, "peer": "theirs", "peer_us": 20.0, "ours_us": 8.0, "times": 2.5,
                                           "verdict": "MISSED"}]
    for was, now in zip(before["rows"], after["rows"], strict=True):
        assert all(now[key] == was[key] for key in was if key not in ("beside", "judged"))
    assert before["machine"] == after["machine"] and after["about"]["command"] == ABOUT["command"] and "--from" in after["about"]["redrawn"]
    assert "| 10.0, 3× as fast | met, MISSED |" in text and "| 10.0 | met |" in old and "nothing was measured anew" in text
    assert (tmp_path / "bench.svg").is_file()
    (tmp_path / "bench.json").write_text('{"rows": [{}]}')
    assert bench_kernels.main() == 2 and "is no report of kernels" in capsys.readouterr().err
