"""The report for people: what is wrong first, then where it comes from, then everything, folded."""

import html
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from dsv4.probes.formats import words
from dsv4.probes.result import Check, Status

if TYPE_CHECKING:
    from dsv4.probes.report import Report, Section

MOST_FINDINGS = 100  # a status; the folded tables have all
MOST_PLACES = 6  # named of a finding that many places share
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is only an underscore


def render(report: "Report", stem: str) -> str:
    """Markdown, as GitHub and others render it, with the plots beside it."""
    parts = [
        f"# {escape(report.title)}",
        _verdict(report),
        _summary(report),
        _findings(report),
        _provenance(report.provenance),
    ]
    parts += [_left_out(report.left_out), "## All checks"]
    files = report.plot_files(stem)
    for i, section in enumerate(report.sections):
        parts.append(_section(section, [(name, files[i, name]) for name in section.plots]))
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text) -> str:
    """Text that shows as it is, in a paragraph or in the cell of a table."""
    shown = html.escape(str(text), quote=False)
    shown = _SPECIAL.sub(lambda found: "\\" + found[0], shown)
    return re.sub(r"\r\n|[\r\n\v\f\x85\u2028\u2029]", "<br>", shown)


def table(columns: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are escaped already. A column that begins with '>' is aligned right."""
    lines = [[c.lstrip(">") for c in columns], ["---:" if c.startswith(">") else "---" for c in columns], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fence(text: str) -> str:
    """A code block around `text`, whatever backticks are in it."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}\n{text}\n{ticks}"


def _verdict(report: "Report") -> str:
    """One line that cannot be misread: what is no evidence is named as not passed."""
    meaning = {0: "clean", 1: "findings", 2: "nothing was measured that could have failed"}[report.exit_code]
    totals = report.totals
    caution = f"; {totals[Status.VACUOUS]:,} without evidence: **not passed**" if totals[Status.VACUOUS] else ""
    caution += f"; {totals[Status.WARN]:,} to be looked at" if totals[Status.WARN] else ""
    return f"**{meaning}** (exit code {report.exit_code}): {words.totals(totals)}{caution}. {report.seconds:.1f} s."


def _summary(report: "Report") -> str:
    rows = [[f"{escape(s.probe)}: {escape(s.title)}", *_counts(s.totals), f"{s.seconds:.2f}"] for s in report.sections]
    rows.append(["**all**", *_counts(report.totals), f"{report.seconds:.2f}"])
    return table(["probe", *(">" + status.value for status in Status), ">seconds"], rows)


def _counts(totals: dict[Status, int]) -> list[str]:
    """Cells: what is there and is not PASS stands out, zeros recede."""
    return [f"{n}" if status is Status.PASS else f"**{n}**" if n else "·" for status, n in totals.items()]


def _findings(report: "Report") -> str:
    parts = ["## Findings"]
    for status in (Status.ERROR, Status.FAIL, Status.WARN, Status.VACUOUS):
        groups = _grouped((s.probe, c) for s, c in report.checks if c.status is status)
        if not groups:
            continue
        parts.append(f"### {status.value} ({report.totals[status]:,}): {words.MEANING[status]}")
        lines = [_finding(probe, checks) for (probe, *_), checks in list(groups.items())[:MOST_FINDINGS]]
        if len(groups) > MOST_FINDINGS:
            lines.append(f"- … and {len(groups) - MOST_FINDINGS} more, in the tables below")
        parts.append("\n".join(lines))
    if len(parts) == 1:
        parts.append(
            "None: every check had evidence and passed." if report.totals[Status.PASS] else "There are no checks."
        )
    return "\n\n".join(parts)


def _left_out(found: dict[str, str]) -> str:
    lines = [f"- {escape(probe)} {escape(why)}." for probe, why in found.items()]
    return "## Left out\n\n" + "\n".join(lines) if lines else ""


def _grouped(found: Iterable[tuple[str, Check]]) -> dict[tuple, list[Check]]:
    """Checks that differ only in their place are one finding."""
    groups: dict[tuple, list[Check]] = {}
    for probe, check in found:
        groups.setdefault((probe, check.name, check.part, words.evidence(check), check.note), []).append(check)
    return groups


def _finding(probe: str, checks: list[Check]) -> str:
    check = checks[0]
    places = list(dict.fromkeys(c.where for c in checks if c.where))
    more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    where = ", ".join(f"**{escape(p)}**" for p in places[:MOST_PLACES]) + more
    part = f" ({escape(check.part)})" if check.part else ""
    times = f" ({len(checks)} checks)" if len(checks) > 1 else ""
    head = f"- **{escape(check.name)}** [{escape(probe)}]" + (f" at {where}" if where else "") + part + times
    return f"{head}: {escape(words.evidence(check))}." + (f"<br>{escape(check.note)}" if check.note else "")


def _provenance(provenance: dict) -> str:
    rows = [[escape(key), escape(value)] for key, value in words.flat(provenance) if key != "command"]
    parts = ["## Provenance"]
    if provenance.get("command"):
        parts.append(fence(str(provenance["command"])))
    parts.append(table(["", ""], rows) if rows else "Unknown.")
    dispatch = provenance.get("dispatch")
    if dispatch:
        cells = [[escape(row.get(k, "")) for k in ("operation", "implementation", "calls", "why")] for row in dispatch]
        ran = table(["operation", "implementation", ">calls", "why"], cells)
        parts.append(_folded(f"what ran: {len(dispatch)} operations", ran))
    return "\n\n".join(parts)


def _section(section: "Section", plots: list[tuple[str, str]]) -> str:
    parts = [f"### {escape(section.probe)}: {escape(section.title)}", section.text.strip()]
    parts += [f"![{escape(name)}]({quote(file)})" for name, file in plots]
    rows = [[_status(c.status), *(escape(cell) for cell in _cells(c))] for c in section.checks]
    columns = ["status", "check", "where", ">measured", ">required", "threshold from", ">chance", ">samples", "note"]
    parts.append(_folded(f"{words.totals(section.totals)} in {section.seconds:.2f} s", table(columns, rows)))
    return "\n\n".join(part for part in parts if part)


def _cells(check: Check) -> list[str]:
    chance = "" if check.chance is None else words.number(check.chance)
    return [
        check.name,
        words.place(check),
        words.measured(check),
        words.required(check),
        check.source,
        chance,
        f"{check.samples:,}",
        check.note,
    ]


def _status(status: Status) -> str:
    return status.value if status is Status.PASS else f"**{status.value}**"


def _folded(summary: str, content: str) -> str:
    """The blank lines are what makes markdown inside HTML markdown."""
    return f"<details><summary>{html.escape(summary)}</summary>\n\n{content}\n\n</details>"
