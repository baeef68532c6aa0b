"""JUnit XML, as continuous integration shows it: a suite a probe, a test case a check.

JUnit knows no warning and no missing evidence. Both are `skipped` there with a message, so that nobody counts them as
passed.
"""

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from dsv4.probes.report import words
from dsv4.probes.result import Check, Status

if TYPE_CHECKING:
    from dsv4.probes.report.document import Report, Section

ELEMENTS = {Status.FAIL: "failure", Status.ERROR: "error", Status.VACUOUS: "skipped", Status.WARN: "skipped"}
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 has no way to write these


def render(report: "Report", stem: str) -> str:
    root = ElementTree.Element("testsuites", _attributes(report.title, report.totals, report.seconds))
    for section in report.sections:
        root.append(_suite(section, report.provenance))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(section: "Section", provenance: dict) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", _attributes(section.probe, section.totals, section.seconds))
    if provenance.get("date"):
        suite.set("timestamp", clean(provenance["date"]).removesuffix("Z"))
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in words.flat(provenance):
        ElementTree.SubElement(properties, "property", {"name": clean(key), "value": clean(value)})
    for check in section.checks:
        suite.append(_case(section, check))
    return suite


def _case(section: "Section", check: Check) -> ElementTree.Element:
    name = f"{check.name} [{check.where}]" if check.where else check.name
    case = ElementTree.Element("testcase", {"classname": clean(section.probe), "name": clean(name)})
    kind = ELEMENTS.get(check.status)
    if kind:
        found = f" in {words.place(check)}" if words.place(check) else ""
        message = f"{check.status.value}{found}: {words.evidence(check)}" + (f". {check.note}" if check.note else "")
        element = ElementTree.SubElement(case, kind, {"message": clean(message)})
        if kind != "skipped":
            element.set("type", check.status.value)
            element.text = clean(words.sentence(check))
    return case


def _attributes(name: str, totals: dict[Status, int], seconds: float) -> dict[str, str]:
    skipped = totals[Status.VACUOUS] + totals[Status.WARN]
    return {
        "name": clean(name),
        "tests": str(sum(totals.values())),
        "failures": str(totals[Status.FAIL]),
        "errors": str(totals[Status.ERROR]),
        "skipped": str(skipped),
        "time": f"{seconds:.3f}",
    }


def clean(text) -> str:
    """Text that XML can hold; what it cannot hold shows as the replacement character."""
    return _FORBIDDEN.sub("\ufffd", str(text))
