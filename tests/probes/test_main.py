"""`python -m dsv4.probes.NAME`: reports, exit codes, and one line for wrong input, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4 import probes
from dsv4.probes.formats import json_report
from dsv4.probes.probe import available

ROOT = Path(probes.__file__).resolve().parent.parent


def run(name: str, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"dsv4.probes.{name}", *map(str, arguments)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=one_thread)


@pytest.mark.parametrize(
    "name,options",
    [
        ("config_ledger", ()),
        ("isolation", ("--numerics", "native")),
        ("memory_map", ("--subject", "ours:fp32:reference")),
    ],
)
def test_a_probe_by_itself(official, tmp_path, name, options):
    done = run(name, official, "--out", tmp_path / "deep" / "audit.md", *options)
    assert done.returncode == 0, done.stderr
    report = json_report.load(tmp_path / "deep" / "audit.json")
    assert [s["probe"] for s in report["sections"]] == [name] and report["totals"]["PASS"] > 0
    assert f"python -m dsv4.probes.{name} official" in (tmp_path / "deep" / "audit.md").read_text()


def test_exit_codes_and_one_line(official, tmp_path):
    done = run("isolation", official, "--subject", "files")
    assert done.returncode == 2 and "VACUOUS" in done.stdout  # nothing was measured
    done = run("isolation", tmp_path, "--out", tmp_path / "x.md")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "x.md").exists()


def test_every_probe_can_be_run_by_itself():
    for name in available():
        text = (ROOT / "probes" / f"{name}.py").read_text()
        assert text.count('if __name__ == "__main__":\n') == 1 and "    main(" in text.splitlines()[-1], name
