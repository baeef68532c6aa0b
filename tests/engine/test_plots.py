"""The drawing of a run, read back from the SVG: pixels of a line by its id, and from those the values."""

import json
import xml.etree.ElementTree as ElementTree
from copy import deepcopy

import pytest

from dsv4.engine.plots import svg

SVG = "{http://www.w3.org/2000/svg}"
ABOUT = {"speculate": "mtp", "draft tokens": "adaptive", "checkpoint": "c", "numerics": "fp32", "device": "cpu"}
LONG = {
    "id": "long",
    "token_ids": [7] * 12,
    "block_size_history": [8, 4, 1, 2],
    "accepted_history": [3, 2, 0, 2],
    "acceptance": 7 / 15,
    "pressed_history": [False, False, False, True],
}
SHORT = {
    "id": "short",
    "token_ids": [7] * 4,
    "block_size_history": [1, 0],
    "accepted_history": [1, 0],
    "acceptance": 1.0,
    "pressed_history": [False, False],
}
FAILED = {
    "id": "failed",
    "token_ids": [],
    "block_size_history": [],
    "accepted_history": [],
    "acceptance": None,
    "pressed_history": [],
}
FIGURES = {
    "steps": 20,
    "steps_a_point": 4,
    "live_share": {"csa entries": [0.25, 0.5, 1.0, 0.875, 0.0], "window": [0.1, 0.2, 0.3, 0.2, 0.1]},
    "steps_a_look": 8,
    "fragmentation": {"csa entries": [0.75, 0.5, 0.25], "window": [0.0, 0.1, 0.0]},
    "eviction_steps": [9, 11],
}
REPORT = {
    "about": ABOUT,
    "requests": [SHORT, FAILED, LONG],
    "figures": FIGURES,
    "latency_seconds": {"time_to_first_token": {"p50": 0.5, "p95": 1.5, "p99": 2.0}, "inter_token": None},
}
SIZES = ((0, 12), (-0.3, 8.5))
LIMITS = {
    "request-0": SIZES,
    "request-1": SIZES,
    "pages": ((0, 20), (0, 104)),
    "fragmentation": ((0, 20), (0, 104)),
    "acceptance": ((0, 110), (2 - 0.5, -0.5)),
}


class Drawing:
    """An SVG of `svg`, whose axes have LIMITS: x from left to right, y from the lower edge to the upper one."""

    def __init__(self, report: dict):
        self.text = svg("run", report)
        self.tree = ElementTree.fromstring(self.text)

    def points(self, axis: str, line: str) -> list[tuple[float, float]]:
        """Corners of a line of an axis, in its values. Marks of a line without one: their centres."""
        group = self._group(axis)
        frame = corners(group.find(f".//{SVG}path").get("d"))  # the axis's background comes first
        found = next(g for g in group.iter(f"{SVG}g") if g.get("id") == line)
        marks = [(float(use.get("x")), float(use.get("y"))) for use in found.iter(f"{SVG}use")]
        left, right, upper, lower = (edge(c[i] for c in frame) for i in (0, 1) for edge in (min, max))
        (x0, x1), (y0, y1) = LIMITS[axis]
        return [
            (
                round(x0 + (x - left) / (right - left) * (x1 - x0), 3),
                round(y0 + (lower - y) / (lower - upper) * (y1 - y0), 3),
            )
            for x, y in marks or corners(found.find(f".//{SVG}path").get("d"))
        ]

    def _group(self, name: str):
        return next(g for g in self.tree.iter(f"{SVG}g") if g.get("id") == name)

    def words(self, axis: str) -> list[str]:
        return ["".join(text.itertext()) for text in self._group(axis).iter(f"{SVG}text")]


def corners(path: str) -> list[tuple[float, float]]:
    """'M 1 2 L 3 4 z' → [(1, 2), (3, 4)]."""
    numbers = [float(word) for word in path.split() if word not in "MLz"]
    return list(zip(numbers[::2], numbers[1::2]))


@pytest.fixture(scope="module")
def drawing():
    return Drawing(REPORT)


def near(points) -> object:
    return [pytest.approx(point, abs=0.01) for point in points]


def test_sizes_are_drawn_over_committed_tokens(drawing):
    """The first token came of prefill; passes of 3, 2, 0 and 2 right drafts begin at 1, 5, 8 and 9."""
    assert drawing.points("request-0", "sizes-0") == near(
        [(1, 8), (5, 8), (5, 4), (8, 4), (8, 1), (9, 1), (9, 2), (12, 2), (12, 2)]
    )
    assert drawing.points("request-0", "pressed-0") == near([(9, 2)])
    assert drawing.points("request-1", "sizes-1") == near([(1, 1), (3, 1), (3, 0), (4, 0), (4, 0)])
    assert "“long”" in drawing.words("request-0") and "“short”" in drawing.words("request-1")
    assert any("(1 requests with fewer passes or none are not drawn)" in word for word in drawing.words("request-1"))


def test_pages_and_their_fragmentation_are_drawn_over_steps(drawing):
    assert drawing.points("pages", "live-csa-entries") == near([(0, 25), (4, 50), (8, 100), (12, 87.5), (16, 0)])
    assert drawing.points("pages", "live-window") == near([(0, 10), (4, 20), (8, 30), (12, 20), (16, 10)])
    assert drawing.points("fragmentation", "fragmentation-csa-entries") == near([(0, 75), (8, 50), (16, 25)])
    assert drawing.points("fragmentation", "fragmentation-window") == near([(0, 0), (8, 10), (16, 0)])
    assert [x for x, _ in drawing.points("pages", "evictions")] == near_numbers([9, 11])


def near_numbers(values) -> object:
    return pytest.approx(values, abs=0.01)


def test_acceptance_is_a_bar_a_request(drawing):
    for n, percent in enumerate((100 * 7 / 15, 100)):
        found = drawing.points("acceptance", f"acceptance-{n}")
        assert [min(x for x, _ in found), max(x for x, _ in found)] == near_numbers([0, percent])
        assert sum({y for _, y in found}) / 2 == near_numbers(n)
    assert {"“long”", "“short”", "47", "100"} <= set(drawing.words("acceptance"))


def test_latencies_are_written_in_milliseconds(drawing):
    assert {"500.0", "1500.0", "2000.0"} <= set(drawing.words("time_to_first_token"))


def panels(report: dict) -> set[str]:
    """Names of the panels that are drawn."""
    names = {"acceptance", "time_to_first_token", "inter_token", "pages", "fragmentation", "request-0", "request-1"}
    return names & {g.get("id") for g in ElementTree.fromstring(svg("run", report)).iter(f"{SVG}g")}


def test_a_panel_without_data_is_left_out():
    assert panels(REPORT) == set(LIMITS) | {"time_to_first_token"}  # between tokens nothing was measured
    plain = REPORT | {"requests": [FAILED], "figures": FIGURES | {"fragmentation": {"window": []}}}
    assert panels(plain) == {"pages", "time_to_first_token"}
    nothing = {"live_share": {}, "fragmentation": {}}
    unmeasured = {"time_to_first_token": None, "inter_token": None}
    empty = plain | {"figures": FIGURES | nothing, "latency_seconds": unmeasured}
    assert panels(empty) == set() and "nothing was measured that could be drawn" in svg("run", empty)


def test_the_same_bytes_for_the_same_figures_and_others_for_others(drawing):
    assert svg("run", json.loads(json.dumps(REPORT))) == drawing.text
    other = deepcopy(REPORT)
    other["requests"][2]["block_size_history"][1] = 3
    assert svg("run", other) != drawing.text
