"""Writes the table of published kernels from the reports of `scripts/audit_kernels.py`.

    python -m scripts.kernel_table                      # prints the table of audits/kernels/*/*/*/{audit,bench}.json
    python -m scripts.kernel_table FILE.json …          # of these reports
    python -m scripts.kernel_table --into docs/kernels_of_others.md   # between the two marks of that page
    python -m scripts.kernel_table --short --into README.md   # other people's kernels alone, in fewer words
    python -m scripts.kernel_table --register           # adds entries of new reports to audits/index.json

The newest audit of a kernel is a row; reports of benchmarks give the last column: time of ours over the kernel's, with
its 95 % interval, of the first and the last row that both have a time in.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from dsv4.kernels.contracts import FOLDERS
from dsv4.probes.kernel_audit.adapters import adapters
from dsv4.probes.kernel_audit.bench import NEEDED
from dsv4.probes.kernel_audit.bench_document import bits_differ

AUDITS = Path(__file__).resolve().parents[1] / "audits"
OURS = "ours"
SHORT = ("operation", "kernel", "clauses held", "accuracy class", "error, × limit", "does not hold", "speed, × ours")
COLUMNS = ("operation", "kernel", "version", "verdict", "worst, × limit", "accuracy", "findings", "speed, × ours")
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
FOUND = ("FAIL", "ERROR")
MOST, LONGEST = 3, 160  # findings of a row, and letters of one
KEPT = 12  # checks of a thinned report
THINNED = (
    f"checks that passed are left out, and findings after the first {KEPT} of clauses that no benchmark needs; "
    "`clauses` counts them; of `skipped` one case a reason is left, and `skipped_cases` counts all; what clauses are "
    "about is on the page"
)


def thinned(report: dict) -> dict:
    """An audit's report without the checks that passed, small enough to be committed."""
    checks = [c for c in report["checks"] if c["status"].upper() in (*FOUND, "VACUOUS") or c["name"] == "not run"]
    skipped = {why: case for case, why in reversed(report["skipped"].items())}
    without = lambda row, key: {k: v for k, v in row.items() if k != key}
    most = checks[:KEPT] + leads(report) + [c for c in checks[KEPT:] if c.get("part") in NEEDED]
    kept = {
        "clauses": [without(row, "about") for row in report["clauses"]],
        "checks": [without(check, "source") for check in most],
        "skipped": {case: why for why, case in skipped.items()},
    }
    return report | kept | {"thinned": THINNED, "skipped_cases": len(report["skipped"])}


def failed(report: dict) -> list[dict]:
    """Its checks that are findings."""
    return [c for c in report["checks"] if c["status"].upper() in FOUND and c["name"] != "not run"]


def leads(report: dict) -> list[dict]:
    """What compute-sanitizer reports of a published kernel without a proof."""
    return [c for c in report["checks"] if c.get("part") == "sanitizer" and c["status"].upper() == "WARN"]


def text(report: dict) -> str:
    """A thinned report: one line an entry."""
    lines = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in report.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def about_kernels() -> dict[tuple[str, str], tuple[str, str]]:
    """(operation, kernel) → (version and entry point, what its contract promises otherwise)."""
    return {(a.operation, a.name): (a.about, a.differs) for a in adapters()}


def cell(text) -> str:
    """Text inside a cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def worst(report: dict) -> str:
    """'0.41', or '37 (edges)' with the clause of the largest error."""
    found = [(row["worst"], row["clause"]) for row in report["clauses"] if row["worst"] is not None]
    if not found:
        return ""
    number, clause = max(found)
    return f"{number:.3g} ({clause})"


def findings(report: dict) -> str:
    """Different findings in words, the first few with where they lie."""
    first = {(c.get("part", ""), c["name"]): c for c in reversed(failed(report))}
    lines = [f"{part}: {name}; {check.get('where', '')}"[:LONGEST] for (part, name), check in reversed(first.items())]
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    count = report.get("skipped_cases", len(report["skipped"]))
    refused = [f"{c['name'].split(':')[0]} reports, unproven" for c in leads(report)]
    refused += [f"{count} cases not taken"] if count else []
    return "; ".join((*lines[:MOST], *more, *refused))


def speeds(benches: list[dict]) -> dict[tuple[str, str], str]:
    """(operation, kernel) → '1.21 [1.19, 1.23] (32 rows)' of the first and the last row that has a time."""
    found: dict[tuple[str, str], list[str]] = {}
    for bench in benches:
        for row in bench["rows"]:
            for time in row["times"]:
                if time["ratio"] is not None and time["verdict"] == "right":
                    ratio, low, high = time["ratio"]
                    about = "; ".join(filter(None, (row["label"], bits_differ(time))))
                    told = f"{ratio:.2f} [{low:.2f}, {high:.2f}] ({about})"
                    found.setdefault((bench["operation"], time["kernel"]), []).append(told)
    return {key: "; ".join(dict.fromkeys((told[0], told[-1]))) for key, told in found.items()}


def row_of(report: dict, about: dict, speed: dict) -> tuple[str, ...]:
    """The cells of one audited kernel."""
    key = report["operation"], report["kernel"]
    version, differs = about.get(key, (f"dsv4 {report['about']['commit'][:7]}" if key[1] == OURS else "", ""))
    words = "; ".join(filter(None, (findings(report), differs)))
    return (
        *(f"`{key[0]}`", key[1], version, report["verdict"], worst(report), report["accuracy"], words),
        "1" if key[1] == OURS else speed.get(key, ""),
    )


def table(reports: list[dict]) -> str:
    """One table of audits and benchmarks, ours before the others of each operation."""
    benches, about = [r for r in reports if "rows" in r], about_kernels()
    audits = sorted(newest(reports), key=lambda r: (r["operation"], r["kernel"] != OURS, r["kernel"]))
    speed = speeds(benches)
    return lined(COLUMNS, (row_of(r, about, speed) for r in audits))


def newest(reports: list[dict]) -> list[dict]:
    """The last audit of each kernel, whatever its device."""
    audits = sorted((r for r in reports if "clauses" in r), key=lambda r: r["about"]["date"])
    return list({(r["operation"], r["kernel"]): r for r in audits}.values())


def lined(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in markdown."""
    line = lambda cells: f"| {' | '.join(map(cell, cells))} |"
    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)]) + "\n"


def in_short(report: dict) -> str:
    """'gate: deep below zero, whole logits; layout: q with 4 bytes off' of a report's findings."""
    found: dict[str, dict[str, None]] = {}
    for check in failed(report):
        what, part = check.get("where", "").split(",")[0], check.get("part", "")
        if part == "layout":
            what = check["name"].removeprefix("the result is right with ").replace("laid out ", "")
        elif part in ("addresses", "processors"):
            what = check["name"]
        found.setdefault(part, {})[what] = None
    return "; ".join(f"{part}: {', '.join(list(whats)[:MOST])}" for part, whats in found.items())


def short_row(report: dict, about: dict, speed: dict) -> tuple[str, ...]:
    """The cells of one published kernel."""
    key = report["operation"], report["kernel"]
    asked = [row for row in report["clauses"] if row["checks"]]
    held = sum(not row["findings"] and not row["vacuous"] for row in asked)
    gate = next((row["worst"] for row in asked if row["clause"] == "gate"), None)
    version = about.get(key, ("", ""))[0]
    return (
        *(f"`{key[0]}`", version or key[1], f"{held} of {len(asked)}", report["accuracy"]),
        *("" if gate is None else f"{gate:.2g}", in_short(report), speed.get(key, "")),
    )


def short_table(reports: list[dict]) -> str:
    """One line a published kernel: how many of the clauses that were asked it holds, and which cases it does not."""
    audits = [r for r in newest(reports) if r["kernel"] != OURS]
    audits.sort(key=lambda r: (r["operation"], r["kernel"]))
    about, speed = about_kernels(), speeds([r for r in reports if "rows" in r])
    return lined(SHORT, (short_row(r, about, speed) for r in audits))


def put_into(page: Path, text: str) -> None:
    """Replace what lies between the page's two marks. Raises SystemExit where it has none."""
    before, mark, rest = page.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page.name} has no lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def folder_of(operation: str) -> str:
    """The folder of kernels/ whose contract the operation has."""
    for folder in FOLDERS:
        module = importlib.import_module(f"dsv4.kernels.{folder}.contract")
        if any(c.operation == operation for c in module.CONTRACTS):
            return folder
    raise SystemExit(f"operation {operation!r} has no contract")


def register(audits: Path) -> list[str]:
    """Entries of reports that audits/index.json has not yet; their beginnings."""
    path, new = audits / "index.json", []
    entries = json.loads(path.read_text())
    for file in reports_of(audits):
        key = file.relative_to(audits).with_suffix("").as_posix()
        if key in entries:
            continue
        report = json.loads(file.read_text())
        operation = report["operation"]
        shows = f"kernels of `{operation}` beside each other, each after its audit"
        if "clauses" in report:
            shows = f"audit of {report['kernel']} for `{operation}`: {report['verdict']}"
        measures = [f"kernels/{folder_of(operation)}", "probes/kernel_audit"]
        entries[key] = {"shows": shows, "measures": measures}
        new.append(key)
    path.write_text(written(entries))
    return new


def written(entries: dict[str, dict]) -> str:
    """audits/index.json: one line an entry, in order."""
    text = lambda value: json.dumps(value, ensure_ascii=False)
    return "{\n" + ",\n".join(f" {text(key)}: {text(entries[key])}" for key in sorted(entries)) + "\n}\n"


def reports_of(audits: Path) -> list[Path]:
    """Reports of kernels that lie in audits/kernels/<operation>/<kernel or bench>/<device>/."""
    return sorted(f for f in audits.glob("kernels/*/*/*/*.json") if f.name in ("audit.json", "bench.json"))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--into", type=Path, help="a page with the two marks")
    parser.add_argument("--register", action="store_true")
    parser.add_argument("--short", action="store_true", help="other people's kernels alone, in fewer words")
    options = parser.parse_args(given)
    if options.register:
        print("\n".join(register(AUDITS)))
        return
    reports = [json.loads(f.read_text()) for f in options.files or reports_of(AUDITS)]
    page = (short_table if options.short else table)(reports)
    if options.into:
        put_into(options.into, page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
