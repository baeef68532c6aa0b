"""What a report says, apart from how it is written.

What is no evidence must not look like success: VACUOUS and WARN are never counted as passed in any format, and a report
in which nothing could have failed does not end with exit code 0.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4.probes.result import Check, Status, vacuous, worst

if TYPE_CHECKING:
    from dsv4.probes.report.difference import Difference

CLEAN, FINDINGS, COULD_NOT_RUN = 0, 1, 2
PATH, PATH_PROBES = "path", ("influence", "recorded")  # the check of which path attention took, and who makes it


@dataclass
class Section:
    """What one probe said.

    text: markdown of the probe's own, inserted as it is; plots: name → SVG document. A probe that said nothing has one
    VACUOUS check that says so.
    """

    probe: str
    title: str
    checks: list[Check]
    seconds: float
    text: str = ""
    plots: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.checks = list(self.checks) or [vacuous("evidence", "the probe made no check at all")]

    @property
    def status(self) -> Status:
        return worst(self.checks)

    @property
    def totals(self) -> dict[Status, int]:
        return count(self.checks)


@dataclass
class Report:
    """A title, where it comes from (dsv4.probes.report.provenance), and a section a probe. left_out: probes that do not
    apply to such a model, and why: neither passed nor without evidence. fail_on: the mildest status that is a finding.
    baseline: what differs from an older report (`dsv4.probes.report.difference`), for the summary."""

    title: str
    provenance: dict
    sections: list[Section] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    fail_on: Status = Status.FAIL
    baseline: "Difference | None" = None

    @property
    def checks(self) -> Iterator[tuple[Section, Check]]:
        return ((section, check) for section in self.sections for check in section.checks)

    @property
    def totals(self) -> dict[Status, int]:
        return count(check for _, check in self.checks)

    @property
    def seconds(self) -> float:
        return sum(section.seconds for section in self.sections)

    @property
    def exit_code(self) -> int:
        """1 for any check as bad as `fail_on` or worse; 2 if nothing was measured (no check, or only VACUOUS ones); 0
        otherwise."""
        totals = self.totals
        if any(n for status, n in totals.items() if status.rank >= self.fail_on.rank):
            return FINDINGS
        return CLEAN if totals[Status.PASS] or totals[Status.WARN] else COULD_NOT_RUN

    @property
    def not_shown(self) -> str:
        """Why the report does not show which path each layer's attention took; '' if it does, or nobody asked."""
        sections = [s for s in self.sections if s.probe in PATH_PROBES]
        paths = [c for s in sections for c in s.checks if c.name == PATH]
        missing = [c for c in paths if c.status is Status.VACUOUS]
        if not paths and sections and all(c.status is Status.VACUOUS for s in sections for c in s.checks):
            missing = [sections[0].checks[0]]
        if not missing:
            return ""
        places = list(dict.fromkeys(c.where for c in missing if c.where))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        at = f" of {', '.join(places[:3])}{more}" if places else ""
        return f"the path{at} is not shown: {missing[0].note}"

    @property
    def verdict(self) -> str:
        """'clean' only for a run with no finding that shows which path each layer took."""
        if self.exit_code == FINDINGS:
            return "findings"
        if self.exit_code == COULD_NOT_RUN:
            return "nothing was measured that could have failed"
        return "not shown" if self.not_shown else "clean"

    def plot_files(self, stem: str) -> dict[tuple[int, str], str]:
        """(section number, plot name) → file name beside the report, each once."""
        files, taken = {}, set()
        for i, section in enumerate(self.sections):
            for name in section.plots:
                base = f"{stem}-{slug(section.probe)}-{slug(name, 'plot')}"
                file, n = f"{base}.svg", 2
                while file.lower() in taken:  # some file systems do not tell A from a
                    file, n = f"{base}-{n}.svg", n + 1
                taken.add(file.lower())
                files[i, name] = file
        return files


def count(checks) -> dict[Status, int]:
    """Checks by status; every status has an entry."""
    totals = dict.fromkeys(Status, 0)
    for check in checks:
        totals[check.status] += 1
    return totals


def plot_file(stem: str, title: str) -> str:
    """'By layer' of 'recall' → 'recall-by-layer.svg'."""
    return f"{stem}-{re.sub(r'[^a-z0-9]+', '-', title.lower())}.svg"


def slug(name: str, otherwise: str = "checkpoint") -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or otherwise
