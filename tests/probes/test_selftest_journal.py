"""A self-test that was cut off goes on where it stopped, and only where it is the same self-test."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dsv4.errors import InputError
from dsv4.probes.selftest import detection
from dsv4.probes.selftest import run as selftest
from dsv4.probes.selftest.detection import document
from dsv4.probes.selftest.journal import SelftestJournal, name_of
from dsv4.probes.selftest.run import Bench, Clean
from tests.probes.test_selftest import BY_NAME

NAMES = ("ties go to the highest entry", "sink block lost")
WHAT = {"commit": "abc", "device": "cpu"}


@pytest.fixture
def looked(monkeypatch):
    """Names of the tasks that are run."""
    names, work = [], selftest.work
    monkeypatch.setattr(selftest, "work", lambda task, bench: (names.append(name_of(task)), work(task, bench))[1])
    return names


def run(journal, mutations=NAMES):
    return detection.selftest(
        [BY_NAME[name] for name in mutations], Bench(None, "cpu"), 1, "two", ["dsv4"], journal=journal
    )


# 8 s: a self-test and the rest of it, with the sound subjects of two families
def test_what_is_in_the_journal_is_not_run_again(tmp_path, quick, looked):
    file = tmp_path / "journal"
    first = run(file)
    assert len(looked) == len(first.outcomes) + len(first.clean) > 2
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:2]) + "\n")  # as if it had ended after the first task
    looked.clear()
    second = run(file)
    assert len(looked) == len(lines) - 2, "exactly what had not been finished"
    found = lambda matrix: [
        {k: v for k, v in row.items() if k != "seconds"}
        for key in ("mutations", "clean")
        for row in document(matrix)[key]
    ]
    assert found(second) == found(first)
    assert second.seconds >= json.loads(lines[1])[1], "the time of the run that was cut off counts"
    looked.clear()
    assert found(run(file)) == found(first) and not looked


def test_a_sound_subject_is_itself_only_with_its_caches(tmp_path):
    names = {
        name_of(Clean("default", "qat", "cpu", caches=caches))
        for caches in (("auto", "auto"), ("fp8", "fp4"), ("fp8", "fp8"))
    }
    assert len(names) == 3


def test_a_journal_of_another_commit_is_refused(tmp_path, quick):
    SelftestJournal(tmp_path / "journal", WHAT)
    with pytest.raises(InputError, match="journal of another run .*commit.* differ"):
        SelftestJournal(tmp_path / "journal", WHAT | {"commit": "abd"})
    with pytest.raises(InputError, match="journal of another run"):
        run(tmp_path / "journal")


def heeds():
    """A shell that starts a job in the background lets it ignore Ctrl-C, and the job's children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "signals,jobs,code", [((signal.SIGINT, signal.SIGINT), "2", 130), ((signal.SIGTERM,), "1", 143)]
)
def test_a_self_test_that_is_stopped_leaves_its_journal_and_nothing_else(tmp_path, signals, jobs, code):
    """Ctrl-C twice at once, or a request to end. Processes that import everything: 8 s."""
    folder, journal, said = tmp_path / "temporary", tmp_path / "journal", tmp_path / "said"
    folder.mkdir()
    command = [sys.executable, "-m", "dsv4", "audit", "selftest", "--jobs", jobs, "--section", "1.1"]
    given = dict(env=os.environ | {"TMPDIR": str(folder)}, preexec_fn=heeds)
    with said.open("w") as stream:
        process = subprocess.Popen([*command, "--journal", str(journal)], stdout=stream, stderr=stream, **given)
    deadline = time.monotonic() + 120
    while " of " not in said.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    for number in signals:
        process.send_signal(number)
    assert process.wait(60) == code, said.read_text()
    assert "Traceback" not in said.read_text()
    assert '"done"' in journal.read_text()
    assert list(folder.iterdir()) == []
