"""Two audits compared: nothing gets worse, and no evidence gets lost, without being said."""

import json
from datetime import date

import pytest

from dsv4.errors import InputError
from dsv4.probes.report import json_report
from dsv4.probes.report.difference import difference
from dsv4.probes.report.document import Report, Section
from dsv4.probes.result import Check, Status
from tests.probes.test_report import PROVENANCE

TODAY = date(2026, 3, 10)
WAIVER = {"probe": "P1", "name": "recall", "reason": "known, ticket 7", "expires": "2026-03-31"}


def report(*checks: tuple, **provenance) -> dict:
    """A report of (probe, name, where, status) rows, as it comes back from a file."""
    sections = {}
    for probe, name, where, status in checks:
        check = Check(name, Status(status), where, samples=1, measured=0.5, unit="x", note=f"n{where}")
        sections.setdefault(probe, []).append(check)
    made = Report(
        "r", PROVENANCE | provenance, [Section(probe, probe, found, 0.0) for probe, found in sections.items()]
    )
    return json.loads(json_report.render(made, "s"))


def one(status: str | None) -> dict:
    return report(*([("P1", "recall", "layer 2", status)] if status else []), ("P1", "other", "", "PASS"))


def kinds(found) -> dict[str, int]:
    names = ("regressions", "vanished", "waived", "expired", "remaining", "fixed", "new", "removed", "unused")
    return {name: len(getattr(found, name)) for name in names if getattr(found, name)}


@pytest.mark.parametrize(
    "old,new,kind,code",
    [
        ("PASS", "PASS", None, 0),
        ("PASS", "WARN", "regressions", 1),
        ("PASS", "FAIL", "regressions", 1),
        ("PASS", "ERROR", "regressions", 1),
        ("PASS", "VACUOUS", "vanished", 1),
        ("PASS", None, "vanished", 1),
        ("WARN", "PASS", "fixed", 0),
        ("WARN", "VACUOUS", "vanished", 1),
        ("WARN", "FAIL", "regressions", 1),
        ("WARN", None, "vanished", 1),
        ("VACUOUS", "VACUOUS", None, 0),
        ("VACUOUS", "PASS", "fixed", 0),
        ("VACUOUS", "FAIL", "regressions", 1),
        ("VACUOUS", None, "removed", 0),
        ("FAIL", "PASS", "fixed", 0),
        ("FAIL", "WARN", "fixed", 0),
        ("FAIL", "FAIL", "remaining", 0),
        ("FAIL", "VACUOUS", "vanished", 1),
        ("FAIL", None, "vanished", 1),
        ("FAIL", "ERROR", "regressions", 1),
        ("ERROR", "PASS", "fixed", 0),
        ("ERROR", "FAIL", "remaining", 0),
        ("ERROR", "VACUOUS", "remaining", 0),
        ("ERROR", None, "fixed", 0),
        (None, "PASS", "new", 0),
        (None, "VACUOUS", "new", 0),
        (None, "FAIL", "regressions", 1),
        (None, "ERROR", "regressions", 1),
    ],
)
def test_one_check(old, new, kind, code):
    found = difference(one(old), one(new), [], TODAY)
    assert kinds(found) == ({kind: 1} if kind else {}) and found.exit_code == code
    assert found.unchanged == 1 + (kind is None)


def test_a_probe_that_is_gone_took_its_evidence_along_even_if_it_only_broke():
    kept = ("P1", "a", "", "PASS")
    found = difference(report(kept, ("P2", "b", "", "ERROR"), ("P2", "c", "", "PASS")), report(kept), [], TODAY)
    assert sorted(c.name for c in found.vanished) == ["b", "c"] and found.exit_code == 1


def test_a_report_from_before_a_probe_was_renamed_is_compared_under_its_new_name():
    old = report(("bill", "shapes at which the bill of attention has other bytes", "", "PASS"))
    new = report(("cost_model", "shapes at which the cost model of attention has other bytes", "", "PASS"))
    assert kinds(difference(old, new, [], TODAY)) == {}


def test_the_place_is_part_of_the_key():
    old = report(("P1", "recall", "layer 2", "PASS"), ("P1", "recall", "layer 4", "FAIL"))
    new = report(("P1", "recall", "layer 2", "FAIL"), ("P1", "recall", "layer 4", "PASS"))
    found = difference(old, new, [], TODAY)
    assert [c.where for c in found.regressions] == ["layer 2"] and [c.where for c in found.fixed] == ["layer 4"]


@pytest.mark.parametrize(
    "old,new,kind",
    [
        ("PASS PASS", "PASS FAIL", {"regressions": 1}),
        ("PASS PASS", "FAIL PASS", {"regressions": 1}),
        ("FAIL PASS", "PASS", {"fixed": 1, "vanished": 1}),
        ("PASS FAIL", "FAIL PASS", {"remaining": 1}),
    ],
)
def test_checks_that_share_a_key_cannot_hide_each_other(old, new, kind):
    before, after = (
        report(*(("P1", "recall", "layer 2", status) for status in statuses.split())) for statuses in (old, new)
    )
    assert kinds(difference(before, after, [], TODAY)) == kind


# waivers


@pytest.mark.parametrize("new", ["FAIL", "VACUOUS", None])
def test_a_waiver_accepts_a_regression_and_lost_evidence(new):
    found = difference(one("PASS"), one(new), [WAIVER], TODAY)
    assert kinds(found) == {"waived": 1} and found.exit_code == 0
    assert "known, ticket 7" in found.to_markdown() and "2026-03-31" in found.to_markdown()


@pytest.mark.parametrize(
    "today,code", [("2026-03-30", 0), ("2026-03-31", 0), ("2026-04-01", 1)], ids=["before", "on it", "after"]
)
def test_a_waiver_holds_through_its_last_day(today, code):
    found = difference(one("PASS"), one("FAIL"), [WAIVER], date.fromisoformat(today))
    assert found.exit_code == code
    assert kinds(found) == ({"regressions": 1, "expired": 1} if code else {"waived": 1})


def test_an_expired_waiver_is_a_finding_even_if_nothing_is_wrong():
    found = difference(one("PASS"), one("PASS"), [{**WAIVER, "expires": "2026-03-09"}], TODAY)
    assert kinds(found) == {"expired": 1} and found.exit_code == 1 and "## Expired waivers" in found.to_markdown()


@pytest.mark.parametrize(
    "where,covered",
    [
        ("layer 2", True),
        ("layer *", True),
        ("layer ?", True),
        ("layer 4", False),
        ("*", True),
        ("Layer 2", False),
        ("", False),
    ],
)
def test_where_is_a_glob(where, covered):
    found = difference(one("PASS"), one("FAIL"), [{**WAIVER, "where": where}], TODAY)
    assert kinds(found) == ({"waived": 1} if covered else {"regressions": 1, "unused": 1})


def test_a_place_with_brackets_matches_itself():
    row = ("P1", "recall", "experts[12]")
    found = difference(report((*row, "PASS")), report((*row, "FAIL")), [{**WAIVER, "where": "experts[12]"}], TODAY)
    assert kinds(found) == {"waived": 1}


@pytest.mark.parametrize("other", [{"probe": "P2"}, {"name": "rec*"}])
def test_a_waiver_of_another_check_waives_nothing(other):
    found = difference(one("PASS"), one("FAIL"), [WAIVER | other], TODAY)
    assert found.exit_code == 1 and kinds(found) == {"regressions": 1, "unused": 1}


def test_a_waiver_of_what_is_still_broken_is_in_use():
    assert kinds(difference(one("FAIL"), one("FAIL"), [WAIVER], TODAY)) == {"remaining": 1}


@pytest.mark.parametrize(
    "damage,message",
    [
        ({"expires": "soon"}, "waiver 1 expires on 'soon'; expected a date as YYYY-MM-DD"),
        ({"expires": "2026-02-30"}, "expires on '2026-02-30'"),
        ({"expires": "20260331"}, "expires on '20260331'"),
        ({"expires": None}, "no expires"),
        ({"reason": "  "}, "no reason"),
        ({"probe": ""}, "no probe"),
        ({"name": None}, "no name"),
        ({"where": 3}, "no where"),
        ({"were": "layer 2"}, "has were"),
    ],
)
def test_a_malformed_waiver_is_refused(damage, message):
    with pytest.raises(InputError, match=message):
        difference(one("PASS"), one("PASS"), [WAIVER | damage], TODAY)
    with pytest.raises(InputError, match="waiver 1 is a str"):
        difference(one("PASS"), one("PASS"), ["P1"], TODAY)


# input and output


def test_what_is_no_report_is_refused():
    with pytest.raises(InputError, match="the new report has schema version None"):
        difference(one("PASS"), {}, [], TODAY)
    with pytest.raises(InputError, match="the old report is not a report: .*no provenance"):
        difference({k: v for k, v in one("PASS").items() if k != "provenance"}, one("PASS"), [], TODAY)


def test_markdown_names_what_happened_findings_first():
    old = report(("P1", "a|b", "x", "PASS"), ("P1", "gone", "", "PASS"), ("P1", "better", "", "FAIL"))
    new = report(("P1", "a|b", "x", "FAIL"), ("P1", "fresh", "", "PASS"), ("P1", "better", "", "PASS"), numerics="qat")
    text = difference(old, new, [], TODAY).to_markdown()
    order = [
        text.index(h)
        for h in (
            "**findings** (exit code 1)",
            "## Regressions",
            "## Vanished evidence",
            "## Fixed",
            "## New checks",
            "## The reports differ in",
        )
    ]
    assert order == sorted(order)
    assert "| P1 | a\\|b | x | PASS | **FAIL** | measured 0.5 x; nx |" in text
    assert "| P1 | gone |  | PASS | **absent** |" in text and "| numerics | fp32 | qat |" in text
    assert "## Waived" not in text and "## Not fixed" not in text


def test_two_equal_reports_differ_in_nothing():
    found = difference(one("PASS"), one("PASS"), [], TODAY)
    assert kinds(found) == {} and found.context == []
    assert "**nothing got worse** (exit code 0): 2 unchanged." in found.to_markdown()
