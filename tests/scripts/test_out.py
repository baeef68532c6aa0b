"""Scripts try --out before they measure, and draw committed measurements again."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from scripts import redraw
from scripts.bench import report

ROOT = Path(report.__file__).parents[2]
SCRIPTS = {  # what --out names, and what else the command line needs
    "measure_host_tier": ("", []),
    "measure_speculation": ("", []),
    "measure_host_waits": ("", []),
    "measure_start": ("", []),
    "bench_kernels": ("", []),
    "bench_decode": ("", []),
    "bench_experts": ("", []),
    "bench_table": ("", []),
    "bench_host_tier": ("", []),
    "bench_speculation": ("", []),
    "bench_speculation_sim": ("", []),
    "audit_matrix": ("", []),
    "measure_demo": ("x.json", ["absent", "absent"]),
    "measure_numerics": ("x.json", ["absent"]),
    "bench_reference": ("x.json", []),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_in_one_line_that_it_cannot_write(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    last, given = SCRIPTS[name]
    out = tmp_path / "file" / last if last else tmp_path / "file"
    monkeypatch.setattr(sys, "argv", [name, *given, "--out", str(out)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(said) == 1 and "cannot be written" in said[0], said


def test_kernels_are_drawn_in_groups_of_operations():
    """One SVG of all was 12,121 pixels high."""

    class Row:
        red, best_peer, goal_us, floor_us, verdict = False, None, None, 1.0, ""

        def __init__(self, op, n):
            self.op, self.name, self.timing = op, f"{op} {n}", type("T", (), {"cold_us": 2.0})

    about = {"device": "d", "torch": "t", "triton": "t", "commit": "c"}
    report.beside.judged, kept = lambda r: [], report.beside.judged
    try:
        drawn = report.svgs([Row(op, n) for op in ("a", "b", "c") for n in range(10)], about)
        few = report.svgs([Row("a", n) for n in range(3)], about)
    finally:
        report.beside.judged = kept
    assert list(drawn) == ["-01-a.svg", "-02-b.svg", "-03-c.svg"] and list(few) == [".svg"]
    assert all(f">a {n}<" in drawn["-01-a.svg"] for n in range(10)) and ">b 0<" not in drawn["-01-a.svg"]
    assert report.svgs([], about) == {}


def test_ticks_are_numbers_and_no_markup():
    from scripts.bench import host_tier_report

    grouped = {"resident_seconds": 1e-4, "dense_resident_seconds": 1e-2, "stream_seconds": 1.0, "rows": []}
    svg = host_tier_report.svg({"link": {"to_device": 5e10}, "grouped": grouped})
    assert "mathdefault" not in svg and ">100<" in svg


def test_what_is_no_measurement_is_refused(tmp_path, capsys):
    for content in ("{", "[]", "{}"):
        (tmp_path / "x.json").write_text(content)
        assert redraw.main([str(tmp_path / "x.json")]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not list(tmp_path.glob("*.svg"))


def test_a_committed_measurement_is_drawn_from_its_json(tmp_path):
    found = sorted(path for path in (ROOT / "audits").rglob("*.json") if "host_tier_identity" in path.name)
    assert redraw.main([str(found[0]), "--out", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [f"{found[0].stem}.svg"]
    assert json.loads(found[0].read_text())["rows"]


def test_decode_steps_without_prompts_are_drawn(tmp_path):
    """A report may have been measured without `--prefill`."""
    point = dict(batch=1, context=8192, layers=2, step_ms=1.0, mean_ms=1.0, spread=0.0, floor_ms=0.5, bytes=1)
    point |= dict(peak_bytes=1, cache_bytes=1, capture_seconds=0.1, layer_ms=0.5)  # layer_ms is derived
    about = {"device": "d", "torch": "t", "triton": "t", "commit": "c"}
    (tmp_path / "decode.json").write_text(json.dumps({"about": about, "points": [point]}))
    assert redraw.main([str(tmp_path / "decode.json")]) == 0 and (tmp_path / "decode.svg").is_file()
