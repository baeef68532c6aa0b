"""What the benchmark harness says of its results: verdicts, limits, goals beside peers, files."""

import json
import sys

import pytest

from scripts import bench_kernels
from scripts.bench import assembled, beside, limits, report
from scripts.bench.measure import PeerResult, Result
from scripts.bench.row import Beside
from scripts.bench.timing import Timing
from tests.scripts.bench_rows import ABOUT, MACHINE, beside_peers, result, row


def test_table_says_missed_and_shows_no_time_of_a_red_row():
    rows = [
        result(5.0, 10.0, "met"),
        result(15.0, 10.0, "late", peer_us=3.0),
        result(None, shape="red", why="error 1.0 over 0.1"),
    ]
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
    assert limits.count_instructions(SASS) == {
        "wgmma": 1,
        "mma": 1,
        "load 16 B": 1,
        "load 8 B": 1,
        "load ≤ 4 B": 2,
        "async copy": 1,
        "barrier": 1,
        "local": 1,
    }
    late = result(15.0, 10.0, "late")
    late.limits = [limits.Kernel("_scores", 1, 12.3, 168, 0, 65536, 8, {"wgmma": 4}), limits.Kernel("memset", 1, 1.0)]
    text = report.markdown([result(5.0, 10.0, "met"), late], MACHINE, ABOUT)
    missed = text[text.index("## Goals missed") :]
    # 3.7 + 1.3 for two kernels; 3 MB in 15 µs
    assert "| `topk` late | 15.0 | 10.0 | 5.0 | 1.00 | 40% | 0.20 | 0 |" in missed
    assert "| `topk` late | `_scores` | 1 | 12.3 | 168 | 0 | 65536 | 8 | wgmma 4 |" in missed
    assert "| `memset` | 1 | 1.0 | – | – | – | – |  |" in missed and "`topk` met" not in missed
    assert "## Goals missed" not in report.markdown([result(5.0, 10.0)], MACHINE, ABOUT)


def test_a_step_assembled_from_peers():
    names = {r.name for r in bench_kernels.collect("cpu")[0]}
    assert all(name in names for s in assembled.STACKS for name, _ in s.parts)
    first = assembled.STACKS[0]
    assert sum(count for name, count in first.parts if "decode" in name) == assembled.LAYERS
    found = [
        Result(
            *name.split(" ", 1),
            1,
            1,
            1.0,
            None,
            0.0,
            1.0,
            "",
            Timing(10.0, 9.0, 0.0, 30, 1),
            {"A": PeerResult(Timing(20.0, 20.0, 0.0, 30, 1)), "B": PeerResult(Timing(30.0, 30.0, 0.0, 30, 1))},
        )
        for name, _ in first.parts
    ]
    ours, theirs, peers_ = assembled.sums(first, found, MACHINE)
    runs = 7 + 9 + 7 + 16 + 16 + 16 + 32
    # 3.7 − 1.3 off each
    assert (ours, theirs) == (pytest.approx(runs * 7.6e-3), pytest.approx(runs * 17.6e-3)) and peers_ == ["A"]
    assert "| batch 1 at 128K | 0.783 | 1.813 | 2.32× ahead | A |" in report.markdown(found, MACHINE, ABOUT)
    assert assembled.sums(first, found[1:], MACHINE) is None and "Parts of a step" not in report.markdown(
        found[1:], MACHINE, ABOUT
    )


def test_lists_of_numbers_stand_on_one_line_of_json_and_nothing_else_changes():
    document = {
        "sizes": [1, -2, 3.5e-7] * 400,
        "nested": [[1, 2], []],
        "said": ["[\n 1\n]", "a"],
        "mixed": [1, None, True],
        "empty": {},
    }
    text = report.dumps(document)
    assert json.loads(text) == document
    assert f'\n "sizes": {json.dumps(document["sizes"])},\n' in text and '\n "nested": [[1, 2], []],\n' in text
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


def test_goals_beside_peers_are_judged_in_the_same_run():
    """Against the fastest peer that the goal names, and with ours as timed in turn with that one."""
    r = beside_peers(
        5.0,
        {"SDPA a": 20.0, "SDPA b": 11.0, "other": 6.0, "SDPA broken": None},
        [Beside(2.3, "^SDPA"), Beside(1.5), Beside(1 / 1.02, "other"), Beside(2.0, "absent")],
    )
    first, second, third, none = beside.judged(r)
    assert (first.peer, first.times, first.verdict) == ("SDPA b", pytest.approx(2.2), "MISSED")
    assert (second.peer, second.times, second.verdict) == ("other", pytest.approx(1.2), "MISSED")
    assert third.verdict == "met" and (none.times, none.verdict) == (None, "not judged")
    # in turn with the peer; what it took alone is of another moment
    for ours, verdict in ((102.0, "met"), (102.1, "MISSED")):
        assert beside.judged(beside_peers(90.0, {"x": 100.0}, [Beside(1 / 1.02)], x=ours))[0].verdict == verdict
    assert beside.judged(beside_peers(None, {"x": 100.0}, [Beside(2.0)]))[0].verdict == "not judged"
    text = report.markdown([r], MACHINE, ABOUT)
    assert (
        "| 10.0, 2.3× as fast, 1.5× as fast, ≤ 1.02 of its time, 2× as fast | met, MISSED, MISSED, met, not "
        "judged |" in text
    )
    assert "| `topk` 256K B1 | 2.3× as fast | SDPA b | 11.0 | 5.0 | 2.200 | MISSED |" in text
    assert (
        "Beside peers of the same run: 1 goals met, 2 MISSED, 1 not judged." in text
        and "1 goals met, 0 MISSED, 0 RED" in text
    )
    assert "5.00 MISSED: 2.3× as fast, MISSED: 1.5× as fast<" in report.svg([r], ABOUT)
    assert "Goals beside" not in report.markdown([result()], MACHINE, ABOUT)


def test_the_goals_of_gqa_rows_beside_their_peers():
    goals = {r.name: r.beside for r in bench_kernels.collect("cpu", "^gqa_|^chunked")[0] if r.beside}
    times = {name: g[0].times for name, g in goals.items()}
    assert {name.split(",")[0]: t for name, t in times.items() if name.startswith("gqa_gather 1")} == {
        "gqa_gather 128K B1 28q/4kv/128": 2.3,
        "gqa_gather 1M B1 28q/4kv/128": 10.2,
        "gqa_gather 1M B8 28q/4kv/128": 41.9,
    }
    never = [name for name in goals if "never_stopping" in name]
    assert (
        len(never) == 4
        and sum("4096 kept" in name for name in never) == 2
        and all(times[name] == 1 / 1.013 for name in never)
    )
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
    assert after["rows"][0]["judged"] == [
        {
            "goal": {"times": 3.0, "peers": ""},
            "peer": "theirs",
            "peer_us": 20.0,
            "ours_us": 8.0,
            "times": 2.5,
            "verdict": "MISSED",
        }
    ]
    for was, now in zip(before["rows"], after["rows"], strict=True):
        assert all(now[key] == was[key] for key in was if key not in ("beside", "judged"))
    assert (
        before["machine"] == after["machine"]
        and after["about"]["command"] == ABOUT["command"]
        and "--from" in after["about"]["redrawn"]
    )
    assert (
        "| 10.0, 3× as fast | met, MISSED |" in text and "| 10.0 | met |" in old and "nothing was measured anew" in text
    )
    assert (tmp_path / "bench.svg").is_file()
    (tmp_path / "bench.json").write_text('{"rows": [{}]}')
    assert bench_kernels.main() == 2 and "is no report of kernels" in capsys.readouterr().err


def test_a_written_report_says_how_long_it_took(tmp_path):
    """Not one that was drawn again: nothing was measured."""
    about = {"command": "x", "device": "cpu"}
    for name, more in (("a", {"seconds": None}), ("b", {}), ("c", {"seconds": 5.0})):
        report.write(tmp_path, name, {"about": about | more, "rows": []}, "# a", None)
    first, again, held = (json.loads((tmp_path / f"{name}.json").read_text())["about"] for name in "abc")
    assert first.pop("seconds") > 0 and first == again == about and held == about | {"seconds": 5.0}
