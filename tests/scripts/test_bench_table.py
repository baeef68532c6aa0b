"""One table of measurements: rows of both numerics side by side, goals, and nothing of several commits."""

import json
import re

import pytest

from scripts import bench_kernels, bench_table

ABOUT = {"device": "NVIDIA H200", "commit": "c1", "torch": "2", "triton": "3", "command": "python x"}


def kernel(shape: str, us: float | None, goal=None, peers=()) -> dict:
    timed = lambda value: None if value is None else {"cold_us": value}
    peers = {name: {"timing": timed(value)} for name, value in peers}
    return {"op": "linear_fp8", "shape": shape, "timing": timed(us), "goal_us": goal, "peers": peers}


def steps(numerics: str, ms: float, kernels: int | None = 320) -> dict:
    point = {"batch": 32, "context": 8192, "layers": 16, "step_ms": ms, "kernels": kernels}
    prompt = {"tokens": 8192, "chunk": 4096, "layer_ms": ms}
    return {"about": ABOUT, "setup": {"numerics": numerics}, "points": [point], "prefills": [prompt]}


MEASURED = {
    "kernels": {
        "about": ABOUT,
        "rows": [
            kernel("8x8, 16 tokens", 20.0, None, [("slow", 30.0), ("fast", 25.0), ("refused", None)]),
            kernel("8x8, 16 tokens, x through FP8", 15.0, 14, [("rounded", 16.0)]),
            kernel("8x8, 64 tokens", None),
        ],
    },
    "native": steps("native", 16.8),
    "qat": steps("qat", 11.0, 400),
    "start": {"about": ABOUT, "rows": [{"kind": "full", "first_token_seconds": s} for s in (3.5, 3.9)]},
    "other": {"about": ABOUT, "rows": [{"tokens": 1}]},
}


def written(where, **changes):
    for name, document in (MEASURED | changes).items():
        (where / name).mkdir()
        (where / name / "x.json").write_text(json.dumps(document))
    (where / "list.json").write_text("[1]")
    return where


def test_a_table(tmp_path, capsys):
    assert bench_table.main([str(written(tmp_path)), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    for line in (
        "| linear_fp8 8x8, 16 tokens | 20 | 15 | 16 rounded | ≤ 14 | MISSED |",
        "| batch 32 at 8K | 16.8 | 11 | – | ≤ 13.5 | met |",
        "| batch 32 at 8K | 20 | 25 | – | ≤ 20 | MISSED |",
        "| 8K in chunks of 4096 | 16.8 | 11 | – | ≤ 11.5 | met |",
        "| cache full, the slowest of 2 | 3.9 | – | – | ≤ 4 | met |",
        "3 of 5 goals are met.",
    ):
        assert line in said, line
    assert "64 tokens" not in said
    held = json.loads((tmp_path / "out" / "table_h200.json").read_text())
    assert [row["verdict"] for row in held["rows"]].count("met") == 3
    assert (tmp_path / "out" / "table_h200.md").read_text().rstrip() in said


@pytest.mark.parametrize("key, said", [("commit", "commits c1, c2"), ("device", "devices NVIDIA H100, NVIDIA H200")])
def test_measurements_of_several_commits_or_devices_are_refused(key, said, tmp_path, capsys):
    other = {"commit": "c2", "device": "NVIDIA H100"}[key]
    written(tmp_path, qat=steps("qat", 11.0) | {"about": ABOUT | {key: other}})
    assert bench_table.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_empty_folder(tmp_path, capsys):
    assert bench_table.main([str(tmp_path)]) == 2 and "holds no measurements" in capsys.readouterr().err


def test_a_file_that_was_cut_off(tmp_path, capsys):
    (written(tmp_path) / "cut.json").write_text('{"about": {')
    assert bench_table.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "cut.json is no JSON" in said and said.count("\n") == 1


def test_rows_are_those_with_the_goals_of_official_numerics(capsys):
    assert bench_table.main(["--rows"]) == 0
    wanted = re.compile(capsys.readouterr().out.strip())
    rows, _ = bench_kernels.collect("cpu", None)
    official = [row.name for row in rows if row.goal_us and bench_table.THROUGH.search(row.name)]
    assert len(official) == 20 and all(map(wanted.search, official))
