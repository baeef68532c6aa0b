"""Running probes: what is missing is VACUOUS, what breaks is an ERROR, and nothing escapes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from dsv4.kernels.errors import Dsv4Error
from dsv4.probes import catalogue as catalogue_of_probes
from dsv4.probes.faults import catalogue
from dsv4.probes.probe import BESIDE, CATALOGUE, Probe, available, execute, numbered, probe_named
from dsv4.probes.result import Status, compare
from dsv4.probes.subject import Subject

FOLDER = Path(catalogue_of_probes.__file__).parent
FAULTS_OF_TESTS = {"recorded"}  # a recorded run has no model in which a fault could be planted: its tests damage dumps


@dataclass(frozen=True)
class Fake(Probe):
    name: ClassVar[str] = "fake"
    title: ClassVar[str] = "a fake"
    needs: ClassVar[frozenset[str]] = frozenset({"run"})
    does: object = None

    def run(self, subject):
        return self.does()


class Able(Subject):
    can = frozenset({"run"})


def boom():
    raise ValueError("first line\nsecond")


def typed():
    raise Dsv4Error("one line")


@pytest.mark.parametrize(
    "does,status,note",
    [
        (lambda: [compare("x", 1, "<=", 2, "spec", 1)], Status.PASS, ""),
        (list, Status.VACUOUS, "nothing to check"),
        (boom, Status.ERROR, "ValueError: first line"),
        (typed, Status.ERROR, "one line"),
    ],
)
def test_outcomes(does, status, note):
    [check], seconds = execute(Fake(does=does), Able())
    assert check.status is status and note in check.note and "second" not in check.note and seconds >= 0


def test_a_missing_capability_is_vacuous():
    [check], _ = execute(Fake(does=boom), Subject())
    assert check.status is Status.VACUOUS and "cannot: run" in check.note


def test_every_file_of_the_catalogue_has_its_probe_and_its_page():
    files = {file.stem for file in FOLDER.glob("*.py")} - {"__init__"}
    assert files == {file.stem for file in FOLDER.glob("*.md")} == set(available()) and len(available()) == len(files)
    for name in available():
        probe = probe_named(name)
        assert probe.name == name and probe.needs, name
    with pytest.raises(Dsv4Error, match="is unknown"):
        probe_named("nonsense")


def test_the_catalogue_lacks_no_number():
    """A file that is lost, or whose docstring loses its number, leaves a gap; P32 is as old as this test."""
    numbers = list(numbered(FOLDER).values())
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 32
    assert CATALOGUE[0] == "load_ledger" and set(BESIDE) == {"recorded", "training"}


def text_of_tests() -> str:
    """The text of all tests beside this one."""
    return "".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py") if file != Path(__file__))


def test_every_probe_has_a_fault_that_it_should_name_and_a_test():
    aimed, told = {name for m in catalogue() for name in m.probes}, text_of_tests()
    for name in available():
        assert name in aimed or name in FAULTS_OF_TESTS, f"no planted fault asks {name} first"
        assert re.search(rf"\b{name}\b", told), f"no test names {name}"
