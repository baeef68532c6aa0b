"""SARIF 2.1.0, as code scanning services read it: a rule a probe, a result a check that did not pass.

The findings are in tensors and layers, not in lines of a file, so their locations are logical ones.
"""

import hashlib
import json
from typing import TYPE_CHECKING

from dsv4.probes.report import words
from dsv4.probes.report.json_report import strict
from dsv4.probes.result import Check, Status

if TYPE_CHECKING:
    from dsv4.probes.report.document import Report, Section

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Status.FAIL: "error", Status.ERROR: "error", Status.WARN: "warning", Status.VACUOUS: "note"}


def render(report: "Report", stem: str) -> str:
    return json.dumps(document(report), ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def document(report: "Report") -> dict:
    """The SARIF log as JSON values."""
    rules: dict[str, dict] = {}
    for section in report.sections:
        rules.setdefault(
            section.probe, {"id": section.probe, "shortDescription": {"text": section.title or section.probe}}
        )
    index = {probe: i for i, probe in enumerate(rules)}
    results = [_result(s, c, index[s.probe]) for s, c in report.checks if c.status in LEVELS]
    driver = {"name": "dsv4 audit", "rules": list(rules.values())}
    version = (report.provenance.get("versions") or {}).get("dsv4")
    if version:
        driver["version"] = version
    invocation = {"executionSuccessful": not report.totals[Status.ERROR], "exitCode": report.exit_code}
    for key, name in (("command", "commandLine"), ("date", "startTimeUtc")):
        if report.provenance.get(key):
            invocation[name] = str(report.provenance[key])
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": results,
        "columnKind": "unicodeCodePoints",
        "properties": {
            "title": report.title,
            "provenance": strict(report.provenance),
            "totals": {status.value: n for status, n in report.totals.items()},
        },
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(section: "Section", check: Check, rule: int) -> dict:
    return {
        "ruleId": section.probe,
        "ruleIndex": rule,
        "level": LEVELS[check.status],
        "message": {"text": f"{check.status.value}: {words.sentence(check)}"},
        "locations": [_location(check)],
        "partialFingerprints": {"check/v1": fingerprint(section.probe, check.name, check.where)},
        "properties": {"status": check.status.value, "name": check.name, "samples": check.samples},
    }


def _location(check: Check) -> dict:
    """Logical: the layer or tensor, or the whole model."""
    name = check.at or "model"
    return {
        "logicalLocations": [{"name": name.rsplit(".", 1)[-1] or name, "fullyQualifiedName": name, "kind": "member"}]
    }


def fingerprint(probe: str, name: str, where: str) -> str:
    """Identifies a check across reports: it depends on its name and place, never on what was measured."""
    return hashlib.sha256("\0".join((probe, name, where)).encode("utf-8", "replace")).hexdigest()
