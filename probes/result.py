"""The result of a probe: checks whose status missing evidence cannot turn green."""

import enum
import math
from dataclasses import asdict, dataclass, replace


class Status(str, enum.Enum):
    """Of a check, from best to worst. VACUOUS: nothing was measured that could have failed."""

    PASS = "PASS"
    WARN = "WARN"
    VACUOUS = "VACUOUS"
    FAIL = "FAIL"
    ERROR = "ERROR"

    @property
    def rank(self) -> int:
        return list(Status).index(self)


@dataclass(frozen=True)
class Check:
    """One measured statement.

    where: the layer or tensor it speaks of ('layer 2', 'layers.2.attn.wkv.weight'); part: what is at fault if it fails,
    in the words of the model ('indexer keys', 'sink', 'load'); measured in `unit`, held by `relation` ('<=', '>=',
    '==') against `threshold`, which comes from `source`; chance: what a random answer would have scored; samples: how
    many comparisons stand behind it (0 makes it VACUOUS). found: where inside `where` the worst or the first was
    measured ('head 6', 'layer 3, row 0'): it may be another in the next run, so it belongs to the measurement.
    Probe, name and `where` identify a check from one report to the next; they never hold what was measured.
    """

    name: str
    status: Status
    where: str = ""
    part: str = ""
    measured: float | int | str | None = None
    unit: str = ""
    relation: str = ""
    threshold: float | int | str | None = None
    source: str = ""
    chance: float | None = None
    samples: int = 0
    note: str = ""
    found: str = ""

    @property
    def at(self) -> str:
        """The place with what was found inside it, for people: 'layer 2, decode, head 6'."""
        return ", ".join(filter(None, (self.where, self.found)))

    def to_json(self) -> dict:
        return {k: v for k, v in asdict(self).items() if v not in (None, "")} | {"status": self.status.value}


def compare(name: str, measured, relation: str, threshold, source: str, samples: int, **about) -> Check:
    """PASS or FAIL by `measured relation threshold`; FAIL for NaN; VACUOUS without samples or at chance level.

    about: the other fields of `Check`. A threshold that chance alone would meet proves nothing: such a check is
    VACUOUS.
    """
    about |= dict(measured=measured, relation=relation, threshold=threshold, source=source, samples=samples)
    check = Check(name, Status.PASS, **about)
    if samples == 0 or measured is None:
        return replace(check, status=Status.VACUOUS, note=check.note or "nothing was measured")
    if isinstance(measured, float) and math.isnan(measured):
        return replace(check, status=Status.FAIL)
    holds = {"<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b}[relation]
    if not holds(measured, threshold):
        return replace(check, status=Status.FAIL)
    if check.chance is not None and holds(check.chance, threshold):
        return replace(check, status=Status.VACUOUS, note=f"chance alone scores {check.chance:.3g}")
    return check


def vacuous(name: str, why: str, **about) -> Check:
    """A check for which there is no evidence."""
    return Check(name, Status.VACUOUS, note=why, **about)


def worst(checks: list[Check]) -> Status:
    """The worst status; VACUOUS for no checks at all."""
    return max((c.status for c in checks), key=lambda status: status.rank, default=Status.VACUOUS)
