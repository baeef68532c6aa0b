"""One report, in every format: a summary and a page for people, JSON, JUnit XML and SARIF for machines.

What is no evidence must not look like success: VACUOUS and WARN are never counted as passed in any format, and a report
in which nothing could have failed does not end with exit code 0.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.loaders.errors import WriteError
from dsv4.probes.report import json_report, junit, markdown, page, sarif
from dsv4.probes.result import Check, Status, vacuous, worst

if TYPE_CHECKING:
    from dsv4.probes.report.difference import Difference

CLEAN, FINDINGS, COULD_NOT_RUN = 0, 1, 2
FORMATS = {".md": markdown.render, ".html": page.render, ".xml": junit.render, ".sarif": sarif.render}
FORMATS |= {".json": json_report.render}
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


def write(report: Report, directory: str | Path, stem: str) -> list[Path]:
    """Write stem.md, .html, .xml, .sarif, .json and the plots into `directory` (created if absent). Returns the paths.

    Everything is rendered first, then written aside, then renamed: no file is ever half-written, and a failure to
    render or to write leaves what was there. Raises WriteError.
    """
    if not stem or stem != Path(stem).name:
        raise WriteError(f"report name {stem!r} is not a plain file name; expected something like 'audit'")
    plots = report.plot_files(stem)
    texts = {name: report.sections[i].plots[plot] for (i, plot), name in plots.items()}
    texts |= {stem + suffix: render(report, stem) for suffix, render in FORMATS.items()}
    return write_files(directory, texts)


def write_files(directory: str | Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files by name, each whole or not at all. Raises WriteError for anything the operating system refuses."""
    directory, partial = Path(directory), None
    targets = [directory / name for name in texts]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for target in targets:
            if target.is_dir():  # found before the first rename, not between two
                raise IsADirectoryError(0, f"{target.name} is a directory")
        partial = Path(tempfile.mkdtemp(prefix=".report.partial-", dir=directory))
        for name, text in texts.items():
            (partial / name).write_bytes(text.encode("utf-8", "replace"))  # a lone surrogate in a name must not end it
        for target in targets:
            os.replace(partial / target.name, target)
    except OSError as error:
        why = error.strerror or error
        raise WriteError(f"writing the report to {directory} failed ({why}); no file is half-written") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return targets


def write_measurement(
    directory: str | Path, stem: str, plots: Mapping[str, str], markdown: Callable[[dict[str, str]], str], document: str
) -> list[Path]:
    """Write stem.md, stem.json and an SVG for each title of `plots`, all or none: markdown(file by title), and the JSON
    `document`. Raises WriteError."""
    files = {title: plot_file(stem, title) for title in plots}
    texts = {files[title]: svg for title, svg in plots.items()}
    return write_files(directory, texts | {f"{stem}.md": markdown(files), f"{stem}.json": document})


def plot_file(stem: str, title: str) -> str:
    """'By layer' of 'recall' → 'recall-by-layer.svg'."""
    return f"{stem}-{re.sub(r'[^a-z0-9]+', '-', title.lower())}.svg"


def slug(name: str, otherwise: str = "checkpoint") -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or otherwise
