"""Findings of `dsv4 kernel audit` as traces of FlashInfer-Trace."""

import json
from pathlib import Path

from dsv4.errors import InputError
from dsv4.probes.kernel_audit.trace.definitions import Exported

SHAPE = "shape and dtype"  # the measure of a judgement of shapes


def load_reports(files: list[Path], shapes: str, seed: int) -> list[dict]:
    """JSON reports of kernel audits. Raises InputError for another kind of file, shapes or seed: its cases would be
    others than the workloads."""
    found = []
    for file in files:
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"report {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(report, dict) or not {"operation", "kernel", "shapes", "seed", "checks"} <= set(report):
            raise InputError(f"report {file} is none of dsv4 kernel audit; expected its audit.json")
        if (report["shapes"], report["seed"]) != (shapes, seed):
            raise InputError(
                f"report {file} has {report['shapes']} shapes and seed {report['seed']}; export with "
                f"--shapes {report['shapes']} --seed {report['seed']}"
            )
        found.append(report)
    return found


def traces_of(exported: Exported, workload: dict, reports: list[dict]) -> list[dict]:
    """One trace a report with findings on this case. A case that passed has none: the schema wants its time, which an
    audit does not measure."""
    case, operation = exported.case, exported.call.contract.operation
    label = f"{case.family}, {case.label}, {str(exported.dtype).removeprefix('torch.')}"
    found = []
    for report in reports:
        mine = [c for c in report["checks"] if c["where"] == label and c["status"] in ("FAIL", "ERROR")]
        if report["operation"] == operation and mine:
            line = {"definition": exported.call.name, "workload": workload, "solution": report["kernel"]}
            found.append(line | {"evaluation": _evaluation(report, mine)})
    return found


def _evaluation(report: dict, checks: list[dict]) -> dict:
    about, first = report.get("about", {}), checks[0]
    log = "; ".join(f"{c.get('part')}: {c['name']}: {c.get('note', '')}" for c in checks)
    base = {
        "environment": {
            "hardware": about.get("device") or "unknown",
            "libs": {name: str(version) for name, version in (about.get("versions") or {}).items() if version},
        },
        "timestamp": about.get("date") or "unknown",
        "log": log,
        "performance": None,
    }
    if first["status"] == "ERROR":
        return {"status": "RUNTIME_ERROR", "correctness": None} | base
    if first.get("note") == SHAPE:
        return {"status": "INCORRECT_SHAPE", "correctness": None} | base
    keep = ("part", "name", "measured", "threshold", "unit", "found", "note")
    extra = {"dsv4": [{key: c[key] for key in keep if c.get(key) is not None} for c in checks]}
    numbers = {"max_relative_error": "NaN", "max_absolute_error": "NaN", "extra": extra}  # an audit has neither
    return {"status": "INCORRECT_NUMERICAL", "correctness": numbers} | base
