"""`python -m dsv4.probes.NAME`: reports, exit codes, and one line for wrong input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4 import probes
from dsv4.probes.probe import available
from dsv4.probes.report import json_report

ROOT = Path(probes.__file__).resolve().parent.parent


NAME = "isolation"  # in a process of its own; the others in that of the tests


def in_a_process(name: str, *arguments) -> tuple[int, str, str]:
    command = [sys.executable, "-m", f"dsv4.probes.catalogue.{name}", *map(str, arguments)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=one_thread)
    return done.returncode, done.stdout, done.stderr


# Over 5 s: one of them in a new process.
@pytest.mark.parametrize(
    "name,options",
    [
        ("config_ledger", ()),
        (NAME, ("--numerics", "native")),
        ("memory_map", ("--subject", "ours:fp32:reference")),
    ],
)
def test_a_probe_by_itself(official, tmp_path, by_itself, name, options):
    run = in_a_process if name == NAME else by_itself
    code, _, err = run(name, official, "--out", tmp_path / "deep" / "audit.md", *options)
    assert code == 0, err
    report = json_report.load(tmp_path / "deep" / "audit.json")
    assert [s["probe"] for s in report["sections"]] == [name] and report["totals"]["PASS"] > 0
    assert f"python -m dsv4.probes.catalogue.{name} official" in (tmp_path / "deep" / "audit.md").read_text()


def test_exit_codes_and_one_line(official, tmp_path, by_itself):
    code, out, _ = by_itself("isolation", official, "--subject", "files")
    assert code == 2 and "VACUOUS" in out  # nothing was measured
    code, _, err = by_itself("isolation", tmp_path, "--out", tmp_path / "x.md")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert not (tmp_path / "x.md").exists()


def test_every_probe_can_be_run_by_itself():
    for name in available():
        text = (ROOT / "probes" / "catalogue" / f"{name}.py").read_text()
        assert text.count('if __name__ == "__main__":\n') == 1 and "    main(" in text.splitlines()[-1], name
