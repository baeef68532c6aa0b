"""Plots of measurements: names beside the lines, axes that fit, no floor drawn as a point."""

import pytest

pytest.importorskip("matplotlib")

from dsv4.probes.measure.base.plots import canvas, legend, logarithmic, needle_maps, share_axis, svg
from dsv4.probes.measure.termination import plots as terminating


@pytest.mark.parametrize("values,least", [((0.85, 0.95), 0.8), ((0.05, 0.95), 0.0), ((0.3, 0.9), 0.0), ((), 0.0)])
def test_an_axis_of_shares_begins_where_they_lie(values, least):
    _, axis = canvas(1)
    axis.plot(range(len(values)), values)
    share_axis(axis, "share")
    low, high = axis.get_ylim()
    assert low == pytest.approx(least, abs=0.04) and high > 1
    assert axis.get_title() == ("share; from 0.8" if least else "share")


def test_names_stand_below_the_panels_and_cover_no_line():
    figure, axes = canvas(2)
    for axis in axes:
        for n in range(8):
            axis.plot([0, 1], [n, n], label=f"series {n}")
    legend(figure)
    figure.draw_without_rendering()
    [names] = figure.legends
    below = names.get_window_extent().y1
    assert below <= min(axis.get_window_extent().y0 for axis in axes) and not any(a.get_legend() for a in axes)
    assert all(svg(figure).count(f">series {n}<") == 1 for n in range(8))


def test_needles_are_a_map_whose_cells_say_the_share():
    trials = [{"depth": 0.05, "hit": True}, {"depth": 0.05, "hit": False}, {"depth": 0.95, "hit": True}]
    drawn = needle_maps({"prose": {"dense": trials, "block mean": []}})
    assert all(drawn.count(f">{text}<") == 1 for text in ("50", "100", "dense", "block mean", "prose"))


def test_an_error_below_the_floor_is_no_point(monkeypatch):
    order = {"order": "newest first", "context": 64}
    rows = [
        order | {"varied": "tau", "tau": t, "phi": 1e-3, "patience": 5, "error_p99": e, "error_mean": e}
        for t, e in ((1e-5, 0.0), (1e-4, 1e-3))
    ]
    monkeypatch.setattr(terminating, "longest", lambda document: rows)
    seen = []
    monkeypatch.setattr(terminating, "svg", lambda figure: seen.append(figure) or "")
    terminating._sweeps({}, "error_p99", "error")
    assert rows[0]["tau"] > seen[0].axes[0].get_xlim()[0] > 0
    heights = [v for line in seen[0].axes[0].get_lines()[:2] for v in line.get_ydata()]
    assert [v == v for v in heights] == [False, True] * 2
    assert "smaller errors are not drawn" in [text.get_text() for text in seen[0].axes[0].texts]


@pytest.mark.parametrize("values", [[0.0, None, float("nan")], [], [0.0, 1e-3, 1e-2]], ids=["none", "empty", "some"])
@pytest.mark.parametrize("side", ["x", "y"])
def test_a_logarithmic_axis_is_drawn_whatever_is_on_it(side, values):
    """All errors below the floor are no points, and matplotlib refuses a logarithmic axis without any."""
    figure, axis = canvas(1)
    nothing = [float("nan")] * 2
    axis.plot([1, 2] if side == "y" else nothing, nothing)
    logarithmic(axis, side, values)
    assert "<svg" in svg(figure)
    assert getattr(axis, f"get_{side}scale")() == ("log" if len(values) == 3 and values[1] else "linear")
