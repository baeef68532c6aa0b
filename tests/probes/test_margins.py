"""Margins: how near a check came to its threshold, and what is drawn of it."""

from xml.etree import ElementTree

import pytest

from dsv4.probes.report.margins import margin, strip, worst
from dsv4.probes.result import Check, Status


def check(measured, relation="<=", threshold=2.0, where="layer 0", name="error") -> Check:
    return Check(name, Status.PASS, where, measured=measured, relation=relation, threshold=threshold, samples=1)


@pytest.mark.parametrize(
    "given, wanted",
    [
        (check(1.0), 0.5),
        (check(4.0), 2.0),
        (check(4.0, ">="), 0.5),
        (check(0.0), 0.0),
        (check(0.9995, ">=", 0.999), pytest.approx(0.5)),
        (check(0.9, ">=", 0.999), pytest.approx(100)),
        (check(1.0, ">=", 0.25), 0.25),
        (check(3, "==", 3), None),
        (check("all"), None),
        (check(None), None),
        (check(float("nan")), None),
        (check(0.0, ">="), None),
    ],
)
def test_the_margin_is_1_at_the_threshold(given, wanted):
    assert margin(given) == wanted


def test_the_worst_margin_of_a_probe_is_that_of_one_check():
    checks = [check(0.2, where="layer 0"), check(1.8, where="layer 1"), check("all")]
    assert worst(checks) == (0.9, checks[1]) and worst(checks[2:]) is None


def test_what_is_exact_is_counted_and_is_no_mark_on_the_axis():
    drawn = strip([check(0.0), check(0.0), check(1.0), check(5.0, where="layer 2")])
    marks = ElementTree.fromstring(drawn).findall("circle")
    assert len(marks) == 2 and 'text-anchor="middle">2</text>' in drawn and ">exact<" in drawn
    threshold = float(ElementTree.fromstring(drawn).find("line[@class='limit']").get("x1"))
    assert [float(mark.get("cx")) > threshold for mark in marks] == [False, True]
    assert ">layer 0<" in drawn and ">layer 2<" in drawn


def test_without_a_margin_nothing_is_drawn():
    assert strip([check("all"), check(3, "==", 3)]) == ""
