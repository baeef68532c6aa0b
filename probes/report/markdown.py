"""The summary for people, short enough for a comment on a pull request: the verdict, what did not pass, the margins.

Everything else is on the page (`page.py`) and in the JSON.
"""

import html
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from dsv4.probes.report import margins, words
from dsv4.probes.result import Check, Status

if TYPE_CHECKING:
    from dsv4.probes.report.document import Report, Section

MOST = 59_000  # characters of a summary; a comment on GitHub may have 65,536
MOST_BASELINE = 15_000  # of the differences to a baseline
MOST_NOTE = 300  # of one note
MOST_PLACES = 6  # named of a finding that many places share
KEYS = (
    *("subject", "checkpoint", "recorded", "commit", "dirty", "device", "versions", "numerics", "backend"),
    *("ranks", "kernels", "date"),
)
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is only an underscore


def render(report: "Report", stem: str) -> str:
    """Markdown, as GitHub and others render it. Findings that do not fit are counted, never dropped silently."""
    before = [f"# {escape(report.title)}", _verdict(report), _summary(report)]
    after = [_baseline(report), _own(report, stem), _provenance(report.provenance), _left_out(report.left_out)]
    after.append(f"Every check, with filters: `{stem}.html`; for programs: `{stem}.json`.")
    room = MOST - sum(len(part) + 2 for part in (*before, *after))
    return "\n\n".join(part for part in (*before, _findings(report, room), *after) if part) + "\n"


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
    totals, why = report.totals, f": {escape(report.not_shown)}" if report.not_shown else ""
    caution = f"; {totals[Status.VACUOUS]:,} without evidence: **not passed**" if totals[Status.VACUOUS] else ""
    caution += f"; {totals[Status.WARN]:,} to be looked at" if totals[Status.WARN] else ""
    return (
        f"**{report.verdict}** (exit code {report.exit_code}){why}. {words.totals(totals)}{caution}. "
        f"{report.seconds:.1f} s."
    )


def _summary(report: "Report") -> str:
    rows = [[escape(s.probe), *_counts(s.totals), *_nearest(s), f"{s.seconds:.1f}"] for s in report.sections]
    rows.append(["**all**", *_counts(report.totals), "", "", f"{report.seconds:.1f}"])
    return table(["probe", *(">" + status.value for status in Status), ">worst margin", "at", ">seconds"], rows)


def _nearest(section: "Section") -> list[str]:
    """Cells: the worst margin of a probe, where 1 is the threshold, and its check."""
    found = margins.worst(section.checks)
    if found is None:
        return ["·", ""]
    value, check = found
    where = f", {check.at}" if check.at else ""
    return ["exact" if value == 0 else f"{value:.2g}", escape(f"{check.name}{where}") if value else ""]


def _counts(totals: dict[Status, int]) -> list[str]:
    """Cells: what is there and is not PASS stands out, zeros recede."""
    return [f"{n}" if status is Status.PASS else f"**{n}**" if n else "·" for status, n in totals.items()]


def _findings(report: "Report", room: int) -> str:
    """Everything that is not PASS, the worst first, in no more than `room` characters."""
    parts = ["## Findings"]
    for status in (Status.ERROR, Status.FAIL, Status.WARN, Status.VACUOUS):
        groups = _grouped((s.probe, c) for s, c in report.checks if c.status is status)
        if not groups:
            continue
        parts.append(f"### {status.value} ({report.totals[status]:,}): {words.MEANING[status]}")
        lines, left = [], report.totals[status]
        for (probe, *_), checks in groups.items():
            line = _finding(probe, checks)
            if sum(map(len, (*parts, *lines))) + len(line) + 600 > room:
                lines.append(f"- … and {left:,} more checks that are {status.value}, cut here; the page has them all")
                break
            lines, left = [*lines, line], left - len(checks)
        parts.append("\n".join(lines))
    if len(parts) == 1:
        parts.append(
            "None: every check had evidence and passed." if report.totals[Status.PASS] else "There are no checks."
        )
    return "\n\n".join(parts)


def _baseline(report: "Report") -> str:
    """The differences to an older report, if one was given."""
    if report.baseline is None:
        return ""
    text = report.baseline.to_markdown().replace("\n## ", "\n### ").replace("# Difference of two audits", "", 1).strip()
    if len(text) > MOST_BASELINE:
        kept = text[:MOST_BASELINE].rsplit("\n", 1)[0]
        lines = text.count("\n") - kept.count("\n")
        text = f"{kept}\n\n… and {lines:,} lines more, cut here; `dsv4 audit diff` has them all"
    return f"## Differences to the baseline\n\n{text}"


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
    places = list(dict.fromkeys(c.at for c in checks if c.at))
    more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    where = ", ".join(f"**{escape(p)}**" for p in places[:MOST_PLACES]) + more
    part = f" ({escape(check.part)})" if check.part else ""
    times = f" ({len(checks)} checks)" if len(checks) > 1 else ""
    head = f"- **{escape(check.name)}** [{escape(probe)}]" + (f" at {where}" if where else "") + part + times
    return f"{head}: {escape(words.evidence(check))}." + (f"<br>{escape(_short(check.note))}" if check.note else "")


def _short(note: str) -> str:
    return note if len(note) <= MOST_NOTE else note[:MOST_NOTE] + " …"


def _provenance(provenance: dict) -> str:
    rows = words.flat({key: provenance[key] for key in KEYS if key in provenance})
    parts = ["## Provenance"]
    if provenance.get("command"):
        parts.append(fence(str(provenance["command"])))
    shown = [[escape(key), escape(value)] for key, value in rows if "sha256" not in key]
    parts.append(table(["", ""], shown) if shown else "Unknown.")
    return "\n\n".join(parts)


def _own(report: "Report", stem: str) -> str:
    """What probes wrote themselves, with their plots: the tables of a bisection, say."""
    files, parts = report.plot_files(stem), []
    for i, section in enumerate(report.sections):
        plots = [f"![{escape(name)}]({quote(files[i, name])})" for name in section.plots]
        if section.text.strip() or plots:
            own = [f"## {escape(section.probe)}: {escape(section.title)}", section.text.strip(), *plots]
            parts.append("\n\n".join(part for part in own if part))
    return "\n\n".join(parts)
