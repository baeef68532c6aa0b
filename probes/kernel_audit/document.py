"""The report of a kernel audit: markdown for a reviewer, JSON for machines."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.probes.kernel_audit.audit import KernelAudit
from dsv4.probes.kernel_audit.plant import CLAUSES
from dsv4.probes.report import junit, sarif
from dsv4.probes.report.document import Report, Section
from dsv4.probes.report.provenance import commit, device, versions, without_paths
from dsv4.probes.result import Check, Status

SCHEMA = 1
UNDEFENDED = (
    "a kernel that reaches into its process to deceive the audit (ctypes, frames, other processes)",
    "shapes that were not run, and rates of races below the one that the repeats exclude",
    "more multiprocessors than this machine has, MIG slices and other clocks",
)
MOST = 12  # findings shown


def document(audit: KernelAudit, command: str, day: str) -> dict:
    """The audit as JSON values: no path, nothing of the machine but its device's name."""
    spec = audit.spec
    return {
        "schema": SCHEMA,
        "about": {
            "command": command,
            "date": day,
            "device": device(torch.device(spec.device)),
            "versions": versions(),
            **commit(),
            "seconds": round(audit.seconds, 1),
        },
        "operation": spec.operation,
        "kernel": without_paths(spec.title),
        "source_sha256": source_hash(spec.kernel),
        "convention": spec.convention,
        "out_arguments": spec.out_arguments,
        "case": audit.case,
        "shapes": audit.shapes,
        "accuracy": audit.accuracy,
        "seed": audit.seed,
        "repeats": audit.repeats,
        "verdict": audit.verdict,
        "looks_like": audit.looks_like,
        "waived": [{"finding": finding_line(c), "reason": why} for c, why in audit.waived],
        "clauses": clauses(audit),
        "skipped": audit.skipped,
        "checks": [c.to_json() for c in audit.checks],
    }


def source_hash(kernel: str) -> str | None:
    """sha256 of the user's file; None for what is not a file."""
    path = Path(kernel.rpartition(":")[0] or kernel)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def leads(checks: list[Check]) -> list[Check]:
    """What compute-sanitizer reports of a published kernel without a proof."""
    return [c for c in checks if c.status is Status.WARN and c.part == "sanitizer"]


def refusals(checks: list[Check]) -> list[Check]:
    """Cases that the kernel said it does not take."""
    return [c for c in checks if c.status is Status.WARN and c.part != "sanitizer"]


def clauses(audit: KernelAudit) -> list[dict]:
    """One row a clause: checks, findings, worst error as a multiple of its limit, the weakest canary, what was not
    run."""
    rows, waived = [], [check for check, _ in audit.waived]
    for name, about in CLAUSES.items():
        mine = [c for c in audit.checks if c.part == name]
        asked = [c for c in mine if c.name != "not run"]
        numbers = [c.measured for c in asked if isinstance(c.measured, float)]
        powers = [c.chance for c in asked if c.chance is not None]
        rows.append(
            {
                "clause": name,
                "about": about,
                "checks": len(asked),
                "findings": sum(c.status in (Status.FAIL, Status.ERROR) and c not in waived for c in asked),
                "refused": len(refusals(asked)),
                "vacuous": sum(c.status is Status.VACUOUS for c in asked),
                "worst": max(numbers, default=None),
                "power": min(powers, default=None),
                "not_run": "; ".join(c.note for c in mine if c.name == "not run") or ("" if mine else "not asked for"),
            }
        )
    return rows


def headline(found: dict) -> str:
    """'FAIL sparse_attention · mine.py:f · small shapes · cpu · accuracy fp32: gate, poison'."""
    caught = [row["clause"] for row in found["clauses"] if row["findings"]]
    parts = [f"{found['verdict']} {found['operation']}", found["kernel"], f"{found['shapes']} shapes"]
    parts += [found["about"]["device"], f"accuracy {found['accuracy']}"]
    count = len(found.get("waived", ()))
    return " · ".join(parts) + (f": {', '.join(caught)}" if caught else "") + (f" · {count} waived" if count else "")


def likeness(found: dict) -> str:
    """'Its wrong results are those of: the sink is ignored.', or ''."""
    names = found["looks_like"]
    return f"Its wrong results are those of a planted fault: {' or '.join(names[:3])}." if names else ""


def finding_line(check: Check) -> str:
    """One finding as one line."""
    measured = "" if check.measured is None else f", {check.measured:g} {check.unit}"
    rest = " ".join(filter(None, (check.note, check.found and f"at {check.found}")))
    return f"{check.part}: {check.name}; {check.where}{measured}" + (f" ({rest})" if rest else "")


def markdown(found: dict, checks: list[Check], findings: list[Check]) -> str:
    """The page: verdict, findings, what each clause saw, identity, what is not defended against."""
    about = found["about"]
    lines = [f"# {headline(found)}", ""]
    if findings:
        lines += [
            *([likeness(found), ""] if found["looks_like"] else []),
            "## Findings",
            "",
            *(f"- {finding_line(c)}" for c in findings[:MOST]),
        ]
        lines += [f"- and {len(findings) - MOST} more, in the JSON"] if len(findings) > MOST else []
    else:
        lines += ["No fault was found by these clauses on these shapes."]
    if found["waived"]:
        lines += ["", "## Waived", "", *(f"- {w['finding']}: {w['reason']}" for w in found["waived"][:MOST])]
        lines += [f"- and {len(found['waived']) - MOST} more, in the JSON"] if len(found["waived"]) > MOST else []
    lines += ["", "## What was asked", "", "| clause | checks | findings | worst, × limit | weakest canary | about |"]
    lines += ["|---|---|---|---|---|---|", *map(_row, found["clauses"])]
    if found["skipped"]:
        reasons = sorted(set(found["skipped"].values()))
        lines += ["", f"{len(found['skipped'])} cases were not asked for: {'; '.join(reasons)}."]
    refused = {c.note for c in refusals(checks)}
    if refused:
        lines += ["", f"The kernel refused: {'; '.join(sorted(refused))}."]
    lines += [line for c in leads(checks) for line in ("", f"{c.name}: {c.note}.")]
    lines += ["", "## How", "", *_how(found, about), "", "Not defended against: " + "; ".join(UNDEFENDED) + ".", ""]
    return "\n".join(lines)


def _row(row: dict) -> str:
    number = lambda x: "" if x is None else f"{x:.3g}"
    what = f"NOT RUN: {row['not_run']}" if row["not_run"] and not row["checks"] else row["about"]
    cells = [
        row["clause"],
        row["checks"] or "",
        row["findings"] or "",
        number(row["worst"]),
        number(row["power"]),
        what,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _how(found: dict, about: dict) -> list[str]:
    known = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    return [
        f"- Command: `{about['command']}`",
        f"- Date {about['date']}, {about['seconds']} s, commit {about['commit']}, seed {found['seed']}, "
        f"{found['repeats']} repeats",
        f"- {about['device']}; {known}",
        f"- Source sha256: {found['source_sha256'] or 'not a file'}; convention {found['convention']}",
        "- Reference: fp64 of the quantised inputs. Limit of a row: 4 times (fp32 results: 16 times) the error of an "
        "honest kernel of the accuracy class on the same case; canaries (zeros, NaN, echo, other inputs, lower "
        "precision) must fail.",
    ]


def files(audit: KernelAudit, found: dict) -> dict[str, str]:
    """Every file of `--out`: a page, JSON, and for continuous integration JUnit XML and SARIF."""
    report = Report(headline(found), found["about"] | {k: found[k] for k in ("operation", "kernel", "seed")})
    reasons = {finding_line(check): f"waived: {why}" for check, why in audit.waived}
    accepted = lambda c: (
        replace(c, status=Status.WARN, note=reasons[finding_line(c)]) if finding_line(c) in reasons else c
    )
    for row in found["clauses"]:
        checks = [accepted(c) for c in audit.checks if c.part == row["clause"]]
        if checks:
            report.sections.append(Section(row["clause"], row["about"], checks, 0.0))
    return {
        "audit.md": markdown(found, audit.checks, audit.findings),
        "audit.json": text(found),
        "audit.xml": junit.render(report, "audit"),
        "audit.sarif": sarif.render(report, "audit"),
    }


def text(found: dict) -> str:
    """The JSON file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
