"""The summary fits a comment, says what did not pass, and counts what it cuts."""

from datetime import date

from dsv4.probes.report import json_report, markdown
from dsv4.probes.report.difference import difference
from dsv4.probes.result import Check, Status, compare, vacuous
from tests.probes.test_report import PROVENANCE, Report, Section

LIMIT = 60_000


def report(*checks: Check, probe: str = "rope") -> Report:
    return Report("Audit of ours", PROVENANCE, [Section(probe, "title", list(checks), 1.0)])


def good(i: int, value: float = 0.1) -> Check:
    return compare("error", value, "<=", 1.0, "x", 5, where=f"layer {i}")


def test_a_large_clean_report_is_a_short_summary():
    text = markdown.render(report(*(good(i % 60) for i in range(2000)), good(7, 0.75)), "s")
    assert len(text) < 3000 and "**clean** (exit code 0)" in text
    assert "| rope | 2001 | · | · | · | · | 0.75 | error, layer 7 | 1.0 |" in text
    assert "dsv4 audit demo" in text and "abc" in text and "2.13.0" in text  # command, commit, versions


def test_a_flood_is_cut_with_a_count_and_fits():
    bad = [Check(f"check {i}", Status.FAIL, f"layer {i}", note="n" * 500, samples=1) for i in range(3000)]
    text = markdown.render(report(*bad, vacuous("lost", "no evidence")), "s")
    assert len(text) < LIMIT
    shown = text.count("- **check ")
    assert 50 < shown < 3000 and f"and {3000 - shown:,} more checks that are FAIL, cut here" in text
    assert "and 1 more checks that are VACUOUS" in text  # what did not fit at all is counted too


def test_the_baseline_is_compared_and_cut_too():
    old, new = report(*(good(i) for i in range(2000))), report(*(good(i, 3.0) for i in range(2000)))
    of = lambda r: json_report.document(r, "s")
    new.baseline = difference(of(old), of(new), [], date(2026, 3, 10))
    text = markdown.render(new, "s")
    assert len(text) < LIMIT and "## Differences to the baseline" in text and "2,000 regressions" in text
    assert "lines more, cut here" in text
