"""The definition of a probe, and how one runs.

A probe is one small file with one dataclass: `name` (that of the file), `title`, `needs` (capabilities of a subject,
see `dsv4.probes.subject.CAPABILITIES`) and `run(subject) -> list[Check]`. Its docstring begins with its number in the
catalogue ("P5: …"), which finds the file by it. Beside it lies `<name>.md`: what it measures, the public bug behind it,
and where its thresholds come from.
"""

import importlib
import importlib.util
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from dsv4.errors import RankLost
from dsv4.kernels.errors import Dsv4Error
from dsv4.probes import families
from dsv4.probes.result import Check, Status, vacuous
from dsv4.probes.subject import Subject

NUMBER = re.compile('"""P([0-9]+): ')  # how a file of the catalogue begins
BESIDE = {  # probes of one kind of subject, and the capability of that kind; the others need a model that runs
    "recorded": "recorded",
    "training": "training",
}


def numbered(folder: Path) -> dict[str, int]:
    """Names of the files of a folder that begin with a probe's number, in the order of the numbers. The files are not
    imported."""
    begins = {file.stem: NUMBER.match(file.read_text(encoding="utf-8")) for file in folder.glob("*.py")}
    found = {name: int(number[1]) for name, number in begins.items() if number}
    return dict(sorted(found.items(), key=lambda item: item[1]))


CATALOGUE = tuple(name for name in numbered(Path(__file__).parent / "catalogue") if name not in BESIDE)


@dataclass(frozen=True)
class Probe:
    """Base of all probes. seed: of whatever the probe draws at random; effort: 1.0 is what `dsv4 audit` spends by
    default.

    reads: the capture points (`dsv4.probes.subject.POINTS`) that it asks a subject for.
    A family of models on which it needs or does something else has a subclass of it in `catalogue/FAMILY/NAME.py`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[str]] = frozenset()
    seed: int = 0
    effort: float = 1.0

    def run(self, subject: Subject) -> list[Check]:
        raise NotImplementedError

    def text(self, checks: list[Check]) -> str:
        """Markdown of its own for the report: a table of what its checks measured, say. '' for none."""
        return ""


def available() -> list[str]:
    """Names of the catalogue, and of the additional probes."""
    return [*CATALOGUE, *BESIDE]


def probe_named(name: str) -> type[Probe]:
    """The probe class of a file. Raises Dsv4Error listing the names."""
    if name not in available():
        raise Dsv4Error(f"probe {name!r} is unknown; expected one of {', '.join(available())}")
    return _defined_in(f"dsv4.probes.catalogue.{name}")


def form_for(probe: Probe, subject: Subject) -> Probe:
    """The probe as the subject's family of models has it: that of `catalogue/FAMILY/NAME.py`, where there is one."""
    place = f"dsv4.probes.catalogue.{subject.family}.{probe.name}"
    try:
        found = importlib.util.find_spec(place)
    except ModuleNotFoundError:  # the family has no form of any probe
        found = None
    form = _defined_in(place) if found else type(probe)
    return probe if isinstance(probe, form) else form(**{f.name: getattr(probe, f.name) for f in fields(probe)})


def _defined_in(place: str) -> type[Probe]:
    """The probe class that a module defines."""
    defined = (v for v in vars(importlib.import_module(place)).values() if isinstance(v, type))
    return next(v for v in defined if issubclass(v, Probe) and v.__module__ == place)


def left_out(probe: Probe | type[Probe], subject: Subject) -> str | None:
    """Why a probe does not apply to the subject's family of models, or to what it runs on; None if it does."""
    family = families.of(subject)
    if probe.name in family.lacks:
        return f"does not apply to {family.title}: {family.lacks[probe.name]}"
    asked = sorted({*probe.needs, probe.name} & set(subject.without))
    return f"does not apply: {subject.without[asked[0]]}" if asked else None


def applying(subject: Subject, names: Iterable[str]) -> list[str]:
    """Those of `names` that apply to the subject's family of models."""
    return [name for name in names if left_out(probe_named(name), subject) is None]


def execute(probe: Probe, subject: Subject) -> tuple[list[Check], float]:
    """(checks, seconds). What the subject cannot do is VACUOUS; an exception is an ERROR, and no exception but
    RankLost leaves here."""
    why = left_out(probe, subject)
    if why is not None:
        return [vacuous(probe.title, why)], 0.0
    probe = form_for(probe, subject)
    missing = sorted(probe.needs - subject.can)
    if missing:
        return [vacuous(probe.title, f"the subject cannot: {', '.join(missing)}")], 0.0
    begun = time.monotonic()
    try:
        checks = probe.run(subject)
    except RankLost:
        raise
    except Dsv4Error as error:
        checks = [Check(probe.title, Status.ERROR, note=str(error))]
    except Exception as error:  # an implementation under audit may raise anything
        said = str(error).splitlines()[0] if str(error) else ""
        checks = [Check(probe.title, Status.ERROR, note=f"{type(error).__name__}: {said}")]
    return checks or [vacuous(probe.title, "the probe found nothing to check")], time.monotonic() - begun
