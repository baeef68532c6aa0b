"""Two reports compared: what got worse, what got better, and what is no longer proved.

A check that is gone, or that measures nothing any more, is a finding: evidence must not vanish silently. A waiver
accepts a finding for a reason and until a date; one that has expired is a finding itself.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date

from dsv4.probes.report import json_report, words
from dsv4.probes.report.markdown import escape, table
from dsv4.probes.report.waivers import Waiver, sorted_out
from dsv4.probes.result import Status

BROKEN = (Status.FAIL, Status.ERROR)
EVIDENCE = (Status.PASS, Status.WARN, Status.FAIL)  # an ERROR measured nothing
# Of the provenance: what makes two reports comparable or not.
COMPARED = ("subject", "checkpoint", "recorded", "commit", "device", "versions", "numerics", "backend", "seeds")
RENAMED = {"bill": "cost_model"}  # former names of probes in older reports

Key = tuple[str, str, str, int]  # probe, name, where, and a number for those that share all three
# a check of this name counts what checks without the suffix name one by one, if there is something
COUNT = ": exceptions"


@dataclass(frozen=True)
class Change:
    """One check in both reports; `old` or `new` is None where it is absent. text: what the newer (or older)
    measured."""

    probe: str
    name: str
    where: str
    old: Status | None
    new: Status | None
    text: str = ""
    counted: bool = False  # the newer report still counts what this check named, as "NAME: exceptions"


@dataclass
class Difference:
    """regressions: worse than before, or new and broken. vanished: evidence before, none now. remaining: broken before,
    and not fixed. fixed: better, which includes evidence where there was none. removed: gone, and never had evidence.
    """

    regressions: list[Change] = field(default_factory=list)
    vanished: list[Change] = field(default_factory=list)
    waived: list[tuple[Change, Waiver]] = field(default_factory=list)
    expired: list[Waiver] = field(default_factory=list)
    remaining: list[Change] = field(default_factory=list)
    fixed: list[Change] = field(default_factory=list)
    new: list[Change] = field(default_factory=list)
    removed: list[Change] = field(default_factory=list)
    unused: list[Waiver] = field(default_factory=list)
    context: list[tuple[str, str, str]] = field(default_factory=list)
    unchanged: int = 0

    @property
    def exit_code(self) -> int:
        """1 for a regression, vanished evidence or an expired waiver; 0 otherwise, also while old failures remain."""
        return 1 if self.regressions or self.vanished or self.expired else 0

    def to_markdown(self) -> str:
        return render(self)


def difference(old: dict, new: dict, waivers: list[dict], today: date) -> Difference:
    """Compare two reports in the form of probes/schema/report-1.json.

    waivers: [{"probe", "name", "where" (optional glob), "reason", "expires": "YYYY-MM-DD"}]; a waiver still holds on
    the day that it names. Raises InputError for what is no report and for a malformed waiver.
    """
    before, after = _checks(json_report.valid(old, "the old report")), _checks(json_report.valid(new, "the new report"))
    result = Difference(context=_context(old["provenance"], new["provenance"]))
    holding, result.expired = sorted_out(waivers, today)
    proved = {key[0] for key, check in after.items() if Status(check["status"]) in EVIDENCE}
    counts = {key[:2] for key, check in after.items() if Status(check["status"]) in EVIDENCE}
    for key in sorted(before.keys() | after.keys()):
        change = _change(key, before.get(key), after.get(key), (key[0], key[1] + COUNT) in counts)
        _sort_in(result, change, proved, holding)
    seen = [*(c for c, _ in result.waived), *result.remaining]
    result.unused = [w for w in holding if not any(w.covers(c.probe, c.name, c.where) for c in seen)]
    return result


def _checks(report: dict) -> dict[Key, dict]:
    """Checks by key. Those that share one are numbered from the worst, so that a lost one shows and a bad one is not
    hidden."""
    groups = defaultdict(list)
    for section in report["sections"]:
        probe = RENAMED.get(section["probe"], section["probe"])
        for check in section["checks"]:
            name = check["name"].replace("the bill", "the cost model") if probe == "cost_model" else check["name"]
            groups[probe, name, check.get("where", "")].append(check)
    worst_first = {key: sorted(group, key=lambda c: -Status(c["status"]).rank) for key, group in groups.items()}
    return {(*key, i): check for key, group in worst_first.items() for i, check in enumerate(group)}


def _change(key: Key, before: dict | None, after: dict | None, counted: bool) -> Change:
    status = [None if check is None else Status(check["status"]) for check in (before, after)]
    return Change(*key[:3], *status, text=_told(after if after is not None else before), counted=counted)


def _told(check: dict) -> str:
    """The measurement of a check in a report, in short."""
    said = [f"at {check['found']}"] if check.get("found") else []
    if check.get("measured") is not None:
        said.append(f"measured {words.number(check['measured'])} {check.get('unit', '')}".strip())
    if check.get("threshold") is not None:
        sign = words.SIGNS.get(check.get("relation", ""), check.get("relation", ""))
        said.append(f"required {sign} {words.number(check['threshold'])}")
    return "; ".join([*said, *([check["note"]] if check.get("note") else [])])


def _sort_in(result: Difference, change: Change, proved: set[str], waivers: list[Waiver]) -> None:
    """Put a change where it belongs; findings that a waiver covers are waived."""
    kind = _kind(change, proved)
    if kind is None:
        result.unchanged += 1
        return
    covering = (w for w in waivers if w.covers(change.probe, change.name, change.where))
    waiver = next(covering, None) if kind in ("regressions", "vanished") else None
    if waiver is not None:
        result.waived.append((change, waiver))
    else:
        getattr(result, kind).append(change)


def _kind(change: Change, proved: set[str]) -> str | None:
    """The list that a change belongs to; None if nothing happened. proved: probes with evidence in the new report."""
    old, new = change.old, change.new
    if old is None:
        return "regressions" if new in BROKEN else "new"
    if new is None and old is Status.ERROR and change.probe in proved:
        return "fixed"  # the probe broke, and now it runs and says other things
    if new is None and old in BROKEN and change.counted:
        return "fixed"
    if new is None and old is Status.VACUOUS:
        return "removed"
    if new is None or (new is Status.VACUOUS and old in EVIDENCE):
        return "vanished"  # even if it was a FAIL: a check that no longer runs fixes nothing
    if new.rank > old.rank:
        return "regressions"
    if new in BROKEN or new is Status.VACUOUS and old is Status.ERROR:
        return "remaining"
    return "fixed" if new is not old else None


def _context(old: dict, new: dict) -> list[tuple[str, str, str]]:
    """What differs in the provenance: two reports about different things compare badly."""
    before, after = (dict(words.flat({k: p.get(k) for k in COMPARED})) for p in (old, new))
    return [
        (key, before.get(key, "–"), after.get(key, "–"))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def render(found: Difference) -> str:
    """Markdown: findings first."""
    counts = [
        (len(found.regressions), "regressions"),
        (len(found.vanished), "lost their evidence"),
        (len(found.expired), "expired waivers"),
        (len(found.waived), "waived"),
        (len(found.remaining), "not fixed"),
        (len(found.fixed), "fixed"),
        (len(found.new), "new"),
        (len(found.removed), "removed, never with evidence"),
        (found.unchanged, "unchanged"),
    ]
    verdict = "findings" if found.exit_code else "nothing got worse"
    parts = [
        "# Difference of two audits",
        f"**{verdict}** (exit code {found.exit_code}): " + ", ".join(f"{n:,} {what}" for n, what in counts if n) + ".",
    ]
    parts.append(_rows("Regressions", found.regressions))
    parts.append(_rows("Vanished evidence: these were measured before, and are not any more", found.vanished))
    parts.append(_waivers("Expired waivers: renew them with a reason, or remove them", found.expired))
    parts.append(_waived(found.waived))
    parts.append(_rows("Not fixed", found.remaining))
    parts.append(_rows("Fixed", found.fixed))
    parts.append(_rows("New checks", found.new))
    parts.append(_waivers("Waivers that waive nothing", found.unused))
    if found.context:
        rows = [[escape(cell) for cell in row] for row in found.context]
        parts.append("## The reports differ in\n\n" + table(["", "old", "new"], rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(title: str, changes: Iterable[Change]) -> str:
    rows = [_cells(change) for change in changes]
    return f"## {title}\n\n" + table(["probe", "check", "where", "old", "new", "measured"], rows) if rows else ""


def _cells(change: Change) -> list[str]:
    old, new = ("absent" if status is None else status.value for status in (change.old, change.new))
    return [escape(change.probe), escape(change.name), escape(change.where), old, f"**{new}**", escape(change.text)]


def _waived(waived: list[tuple[Change, Waiver]]) -> str:
    rows = [[*_cells(change)[:5], escape(waiver.reason), waiver.expires.isoformat()] for change, waiver in waived]
    return "## Waived\n\n" + table(["probe", "check", "where", "old", "new", "reason", "until"], rows) if rows else ""


def _waivers(title: str, waivers: list[Waiver]) -> str:
    rows = [
        [escape(w.probe), escape(w.name), escape(w.where), escape(w.reason), w.expires.isoformat()] for w in waivers
    ]
    return f"## {title}\n\n" + table(["probe", "check", "where", "reason", "until"], rows) if rows else ""
