"""Running probes: what is missing is VACUOUS, what breaks is an ERROR, and nothing escapes."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from dsv4.kernels.errors import Dsv4Error
from dsv4.probes.probe import CATALOGUE, Probe, available, execute, probe_named
from dsv4.probes.result import Status, compare
from dsv4.probes.subject import Subject


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
    from pathlib import Path

    from dsv4 import probes

    for name in available():
        probe = probe_named(name)
        assert probe.name == name and probe.needs, name
        assert (Path(probes.__file__).parent / "catalogue" / f"{name}.md").is_file(), name
    with pytest.raises(Dsv4Error, match="is unknown"):
        probe_named("nonsense")
    assert len(set(CATALOGUE)) == 31
