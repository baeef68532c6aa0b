"""The ranking: ratios, verdicts, and a report that is the same every time."""

import dataclasses
import json

import pytest

from scripts import bench_speculation_sim
from scripts.bench import speculation, speculation_report, speculation_traces
from scripts.bench.speculation import Point, Timeline, ranked, verdicts
from scripts.bench.speculation_costs import moe

ABOUT = {"device": "cpu", "torch": "t", "triton": "t", "commit": "c", "command": "x"}
SETUP = {"title": "t", "how": "By hand."}


def points(asbs: float, aware: float, kind: str = "mixed", oracle: float | None = 130.0) -> list[Point]:
    speeds = {"no speculation": 90.0, "static 1": 100.0, "static 8": 80.0, "ASBS": asbs, "cost-aware": aware}
    if oracle is not None:
        speeds |= {"informed": 125.0, "oracle": oracle}
    return [Point("trace", kind, 8, policy, speed) for policy, speed in speeds.items()]


@pytest.mark.parametrize(
    "kind,speed,of_static,of_oracle",
    [
        ("mixed", 107.9, "MISSED", "MISSED"),
        ("mixed", 108.0, "met", "MISSED"),
        ("mixed", 117.0, "met", "met"),
        ("stationary", 98.0, "met", "MISSED"),
        ("stationary", 97.9, "MISSED", "MISSED"),
    ],
)
def test_verdicts(kind, speed, of_static, of_oracle):
    found = {v["of"]: v["verdict"] for v in verdicts(points(120.0, speed, kind)) if v["policy"] == "cost-aware"}
    assert found == {"best static size": of_static, "oracle": of_oracle}


def test_ratios_are_of_the_best_static_size_and_no_speculation_competes():
    rows = {r["policy"]: r for r in ranked(points(110.0, 120.0))}
    assert rows["ASBS"]["of_static"] == pytest.approx(1.1) and rows["ASBS"]["best_static"] == "static 1"
    assert rows["ASBS"]["of_oracle"] == pytest.approx(110 / 130)
    slow = [Point("trace", "mixed", 8, "no speculation", 200.0), *points(110.0, 120.0)[1:]]
    assert {r["best_static"] for r in ranked(slow)} == {"no speculation"}


def test_a_goal_without_an_oracle_is_not_judged():
    assert {v["of"] for v in verdicts(points(110.0, 120.0, oracle=None))} == {"best static size"}
    assert "| – | – | – |" in speculation_report.markdown(points(110.0, 120.0, oracle=None), ABOUT, SETUP)


def test_timeline_has_a_plateau_a_dip_and_a_collapse():
    line = speculation.timeline(moe())
    for sizes in line.sizes.values():
        inside = lambda begin, end: [size for at, size in sizes if begin <= at < end]
        assert max(inside(100, 300)) >= 7
        dip = inside(line.low[0] + 50, line.low[1])
        assert sum(dip) / len(dip) < 2.5
        assert max(inside(*line.pressure)) <= 2 and max(inside(line.pressure[1] + 50, line.tokens)) >= 7


def test_the_drawing_says_that_its_timeline_is_simulated():
    """Under bars that were measured, too. Without a timeline it says nothing of it."""
    drawn = [
        speculation_report.svg(points(110.0, 120.0), ABOUT, {"title": "Measured"}, line)
        for line in (Timeline(50, (10, 20), (30, 40), {"ASBS": [(0, 8), (10, 1), (20, 8)]}), None)
    ]
    assert ["simulated" in text for text in drawn] == [True, False] and all("Measured" in text for text in drawn)


def test_report_of_a_small_simulation(tmp_path, capsys, monkeypatch):
    """With a few requests of each recorded trace."""
    few = [(kind, dataclasses.replace(t, requests=t.requests[:4])) for kind, t in speculation_traces.recorded()]
    monkeypatch.setattr(speculation_traces, "recorded", lambda: few)
    command = ["--requests", "2", "--tokens", "12", "--batch", "1", "--out"]
    assert (
        bench_speculation_sim.main([*command, str(tmp_path / "a")])
        == 0
        == bench_speculation_sim.main([*command, str(tmp_path / "b")])
    )
    for suffix in ("json", "md", "svg"):
        a, b = ((tmp_path / d / f"speculation_sim_h100_flash16.{suffix}").read_text() for d in "ab")
        assert a == b
    document = json.loads((tmp_path / "a" / "speculation_sim_h100_flash16.json").read_text())
    # recorded ones have no true rates to be informed of
    assert len(document["points"]) == 4 * (9 + 2 + 3) + 3 * (9 + 2 + 2)
    assert len(document["goals"]) == (4 + 3) * 2 * 2
    for row in document["points"]:
        assert row["of_static"] > 0 and (row["policy"] == "bound" or row["of_oracle"] <= 1.0000001)
    markdown = (tmp_path / "a" / "speculation_sim_h100_flash16.md").read_text()
    assert "Simulated, not timed" in markdown and "modelled" in markdown and "MISSED" in markdown


@pytest.mark.parametrize(
    "wrong",
    [["--costs", "absent.json"], ["--trace", "fast=x.json"], ["--padding", "2"], ["--batch", "3"], ["--tokens", "0"]],
    ids=str,
)
def test_input_that_cannot_be_used_is_one_line_and_exit_code_2(wrong, tmp_path, capsys):
    assert bench_speculation_sim.main(["--requests", "4", "--tokens", "8", "--out", str(tmp_path), *wrong]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
