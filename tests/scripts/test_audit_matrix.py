"""The table of audits: a red check, an audit that cannot run and one that does not end are not clean."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts import audit_matrix

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tiny_fp32"


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*more, settings=(("fp32", "auto", "auto"),)):
        monkeypatch.setattr(audit_matrix, "SETTINGS", settings)
        code = audit_matrix.main([str(GOLDEN), "--backends", "cpu", "--out", str(tmp_path), *more])
        return (
            code,
            json.loads((tmp_path / "tiny_fp32_matrix_cpu.json").read_text())["rows"],
            (tmp_path / "tiny_fp32_matrix_cpu.md").read_text(),
        )

    return call


def test_what_cannot_run_and_what_does_not_end_is_red(run):
    """4 s and more: a row is an audit in a process of its own, which imports torch before it can refuse anything."""
    code, [row], text = run(settings=(("fp32", "fp8", "auto"),))
    assert (
        code == 1 and row["exit"] == 2 and "error:" in row["red"][0] and "**0 of 1 clean**" in text and "## Red" in text
    )
    code, [row], text = run("--limit", "0.5")
    assert code == 1 and row["exit"] is None and row["red"] == ["not ended after 0 s"]


def test_what_ended_in_an_earlier_run_is_not_run_again(run, monkeypatch, tmp_path):
    asked = []

    def audited(args, backend, setting, places):
        asked.append(setting[0])
        ended = (
            {"exit": 0, "PASS": 3, "red": []}
            if setting[0] == "fp32" or len(asked) > 2
            else {"exit": None, "red": ["not ended after 1 s"]}
        )
        return {"backend": backend, **dict(zip(audit_matrix.KEYS[1:], setting)), "seconds": 1, **ended}

    monkeypatch.setattr(audit_matrix, "audited", audited)
    both = (("fp32", "auto", "auto"), ("native", "auto", "auto"))
    code, rows, _ = run("--journal", str(tmp_path / "j"), settings=both)
    assert code == 1 and asked == ["fp32", "native"] and rows[1]["exit"] is None
    code, rows, text = run("--journal", str(tmp_path / "j"), settings=both)
    assert (
        code == 0
        and asked == ["fp32", "native", "native"]
        and [r["numerics"] for r in rows] == ["fp32", "native"]
        and "**2 of 2 clean**" in text
    )
    code, rows, _ = run("--journal", str(tmp_path / "j"), settings=both)
    assert code == 0 and len(asked) == 3 and len(rows) == 2
    monkeypatch.setenv("DSV4_COMMIT", "another")
    assert (
        audit_matrix.main([str(GOLDEN), "--backends", "cpu", "--out", str(tmp_path), "--journal", str(tmp_path / "j")])
        == 2
        and len(asked) == 3
    )


def test_a_red_check_is_red_whatever_the_exit_code():
    check = lambda status, **more: {"name": "n", "status": status, **more}
    document = {
        "totals": {"PASS": 1, "FAIL": 1, "VACUOUS": 1},
        "sections": [{"probe": "mhc", "checks": [check("PASS"), check("FAIL", where="layer 3"), check("VACUOUS")]}],
    }
    row = {"exit": 0} | audit_matrix.summary(document)
    assert (row["PASS"], row["FAIL"], row["VACUOUS"], row["red"]) == (
        1,
        1,
        1,
        ["mhc: n: layer 3"],
    ) and not audit_matrix.clean(row)
    nothing = {"exit": 0} | audit_matrix.summary(
        {"totals": {"VACUOUS": 1}, "sections": [{"probe": "mhc", "checks": [check("VACUOUS")]}]}
    )
    assert not audit_matrix.clean(nothing) and audit_matrix.clean(nothing | {"PASS": 1})


def test_audits_at_a_time_share_no_processor_and_take_turns_on_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    cores = sorted(os.sched_getaffinity(0))
    places = audit_matrix.Places(jobs := min(2, len(cores)), gpus=2)
    told = (
        "import os, time; time.sleep(0.5); print(sorted(os.sched_getaffinity(0)), "
        "os.environ['CUDA_VISIBLE_DEVICES'], sep=';')"
    )
    with ThreadPoolExecutor(jobs) as pool:
        said = [
            f.result().stdout.strip().split(";")
            for f in [pool.submit(places.run, [sys.executable, "-c", told], 60.0) for _ in range(jobs)]
        ]
    assert sorted(c for own, _ in said for c in json.loads(own)) == cores and {gpu for _, gpu in said} == set(
        "35"[:jobs]
    )
    assert sorted(os.sched_getaffinity(0)) == cores and os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


def test_of_several_ranks_each_audit_has_as_many_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(audit_matrix, "gpu_names", lambda gpus: tuple("01234"[:gpus]))
    free = audit_matrix.Places(3, 5, ranks=2).free
    assert [free.get()[1] for _ in range(3)] == ["0,1", "2,3", "0,1"]

    def run(self, command, limit):
        asked.append(command[command.index("--tensor-parallel-size") :])
        return subprocess.CompletedProcess(command, 2, "", "error: nothing")

    asked = []
    monkeypatch.setattr(audit_matrix.Places, "run", run)
    monkeypatch.setattr(audit_matrix, "SETTINGS", (("fp32", "auto", "auto"),))
    given = [str(GOLDEN), "--backends", "cpu", "--tensor-parallel-size", "2", "--out", str(tmp_path)]
    assert audit_matrix.main(given) == 1 and asked == [["--tensor-parallel-size", "2"]]
    assert (tmp_path / "tiny_fp32_matrix_2_ranks_cpu.md").exists()
