"""The report for programs: strict JSON (no NaN), described by probes/schema/report-1.json."""

import enum
import json
import math
from pathlib import Path

from dsv4.errors import InputError
from dsv4.probes.report import schema, words
from dsv4.probes.report.document import Report, Section
from dsv4.probes.result import Check, Status

VERSION = "1"
SCHEMA = Path(__file__).resolve().parent.parent / "schema" / f"report-{VERSION}.json"


def render(report: "Report", stem: str) -> str:
    return dumped(document(report, stem))


def dumped(document: dict) -> str:
    """Any document of ours as the text of its file. Raises ValueError for NaN and infinity, which `strict` makes
    words."""
    return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def document(report: "Report", stem: str) -> dict:
    """The report as JSON values."""
    files = report.plot_files(stem)
    sections = [
        {
            "probe": s.probe,
            "title": s.title,
            "status": s.status.value,
            "seconds": strict(s.seconds),
            "totals": _totals(s.totals),
            "text": s.text,
            "plots": {name: files[i, name] for name in s.plots},
            "checks": [_check(c) for c in s.checks],
        }
        for i, s in enumerate(report.sections)
    ]
    return {
        "schema_version": VERSION,
        "title": report.title,
        "exit_code": report.exit_code,
        "verdict": report.verdict,
        "totals": _totals(report.totals),
        "seconds": strict(report.seconds),
        "provenance": strict(report.provenance),
        "sections": sections,
        "left_out": report.left_out,
    }


def read(document: dict) -> "Report":
    """The report that a document (of `load`) is of, to be written in other formats. Its plots are not in it."""
    checks = lambda rows: [Check(**row | {"status": Status(row["status"])}) for row in rows]
    sections = [
        Section(s["probe"], s["title"], checks(s["checks"]), s["seconds"], s["text"]) for s in document["sections"]
    ]
    return Report(document["title"], document["provenance"], sections, document.get("left_out", {}))


def load(path: str | Path) -> dict:
    """A report from a file. Raises InputError unless it is a valid report of this version."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the report {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path.name} is not valid JSON ({str(error)[:60]}); expected a report of dsv4 audit"
        ) from None
    return valid(value, path.name)


def valid(value, where: str) -> dict:
    """`value` itself if it is a report of this version; raises InputError with the first thing that is wrong."""
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != VERSION:
        raise InputError(f"{where} has schema version {version!r}; expected {VERSION!r}, as dsv4 audit writes it")
    problems = schema.problems(value, json.loads(SCHEMA.read_text(encoding="utf-8")))
    if problems:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise InputError(f"{where} is not a report: {problems[0]}{more}")
    return value


def strict(value):
    """JSON values only: keys are strings, numbers are finite (others become words), the rest is text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(v) for v in value]
    if isinstance(value, Path):
        return value.name
    value = words.plain(value)
    return words.number(value) if isinstance(value, float) and not math.isfinite(value) else value


def _totals(totals: dict) -> dict[str, int]:
    return {status.value: n for status, n in totals.items()}


def _check(check: Check) -> dict:
    """JSON has no NaN and no infinity: such a number is null, and the note says what it was."""
    row = check.to_json()
    said = [row["note"]] if "note" in row else []
    for key in ("measured", "threshold", "chance"):
        value = words.plain(row.get(key))
        if isinstance(value, float) and not math.isfinite(value):
            said.append(f"{key} is {words.number(value)}")
            value = None
        if key in row:
            row[key] = value
    if said:
        row["note"] = "; ".join(said)
    return row
