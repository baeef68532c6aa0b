"""Plots of margins: what is drawn, and what is not."""

import pytest

from dsv4.probes.formats.plot import FLOOR, by_layer, margin, margins
from dsv4.probes.result import Check, Status


def check(measured, relation="<=", threshold=2.0, where="layer 0", name="error") -> Check:
    return Check(name, Status.PASS, where, measured=measured, relation=relation, threshold=threshold, samples=1)


@pytest.mark.parametrize(
    "given, wanted",
    [
        (check(1.0), 0.5),
        (check(4.0), 2.0),
        (check(4.0, ">="), 0.5),
        (check(0.0), FLOOR),
        (check(3, "==", 3), None),
        (check("all"), None),
        (check(None), None),
        (check(float("nan")), None),
        (check(0.0, ">="), None),
    ],
)
def test_the_margin_is_1_at_the_threshold(given, wanted):
    assert margin(given) == wanted


def test_the_worst_of_a_layer_is_drawn():
    checks = [
        check(v, where=f"layer {i}, {how}") for i in range(3) for how, v in (("one step", 0.2), ("decode", 1.0 + i))
    ]
    assert by_layer(checks) == {"error": {0: 0.5, 1: 1.0, 2: 1.5}}
    assert by_layer(checks[:4]) == {}  # of two layers a table says as much


def test_the_document_names_what_it_draws_and_is_the_same_twice():
    pytest.importorskip("matplotlib")
    checks = [check(0.1 * (i + 1), where=f"layer {i}") for i in range(4)]
    svg = margins("rope", checks)
    assert svg == margins("rope", checks) and "<svg" in svg and "measured / threshold" in svg and ">error<" in svg
    assert margins("rope", checks[:2]) is None
