"""The figures as SVG documents; dsv4.probes.measure.base.plots says whether they can be drawn."""

from dsv4.probes.measure.base.plots import canvas, column, finished, legend, logarithmic, share_axis, svg, task_map
from dsv4.probes.measure.base.tables import grouped
from dsv4.probes.measure.termination.markdown import SWEPT, longest

FLOOR = 1e-9  # errors below are no points: the line at the bottom says so


def draw(document: dict) -> dict[str, str]:
    """Title → SVG document; the same bytes for the same figures."""
    found = {
        "Skipped by sweep": _sweeps(document, "skipped", "tiles skipped (oracle dotted)"),
        "Error by sweep": _sweeps(document, "error_p99", "relative error, 99th percentile (mean dashed)"),
        "By layer": _layers(document),
    }
    if document["needles"]:
        tasks = "task" in document["needles"][0]
        found["Tasks" if tasks else "Needles"] = (task_map if tasks else _needles)(document["needles"])
    return found


def _sweeps(document: dict, key: str, title: str) -> str:
    figure, axes = canvas(3)
    rows = longest(document)
    for axis, swept in zip(axes, SWEPT):
        for n, (order, group) in enumerate(grouped(rows, lambda r: r["order"]).items()):
            group = [r for r in group if r["varied"] == swept]
            x = column(group, swept)
            if key == "skipped":
                axis.plot(x, column(group, "skipped"), "o-", color=f"C{n}", label=order)
                axis.plot(x, column(group, "skipped_oracle_shared"), ":", color=f"C{n}")
            else:
                axis.plot(x, [_seen(r["error_p99"]) for r in group], "o-", color=f"C{n}", label=order)
                axis.plot(x, [_seen(r["error_mean"]) for r in group], "--", color=f"C{n}")
        share_axis(axis, f"{title}, {rows[0]['context']:,} tokens")
        if key != "skipped":
            axis.set(yscale="log", ylim=(FLOOR / 2, 3))
            axis.axhline(FLOOR, color="0.6", lw=0.8, ls=":")
            axis.text(
                0.01, 1.1 * FLOOR, "smaller errors are not drawn", transform=axis.get_yaxis_transform(), fontsize=6
            )
        if swept != "patience":
            logarithmic(axis, "x", [r[swept] for r in rows if r["varied"] == swept])
        axis.set_xlabel(SWEPT[swept], fontsize=8)
    legend(figure)
    return svg(figure)


def _seen(error: float) -> float:
    return error if error > FLOOR else float("nan")


def _layers(document: dict) -> str:
    figure, (skipped, offset) = canvas(2)
    most = max(r["context"] for r in document["rows"])
    rows = [r for r in document["rows"] if r["context"] == most and r["layer"] is not None]
    for n, (order, group) in enumerate(grouped(rows, lambda r: r["order"]).items()):
        x = [r["layer"] for r in group]
        skipped.plot(x, column(group, "skipped"), "o-", color=f"C{n}", label=order)
        skipped.plot(x, column(group, "skipped_oracle_shared"), "x:", color=f"C{n}")
        known = [r for r in group if r["offset_median"] is not None]
        offset.errorbar(
            [r["layer"] for r in known],
            [r["offset_median"] for r in known],
            [
                [r["offset_median"] - r["offset_p5"] for r in known],
                [r["offset_p95"] - r["offset_median"] for r in known],
            ],
            fmt="o",
            color=f"C{n}",
            capsize=3,
            label=order,
            alpha=0.7,
        )
        whole = [r for r in group if r["whole"]["offset_median"] is not None]
        offset.plot([r["layer"] + 0.2 for r in whole], [r["whole"]["offset_median"] for r in whole], "+", color=f"C{n}")
        skipped.plot(x, [r["whole"]["skipped_shared"] for r in group], "+:", color=f"C{n}")
    share_axis(skipped, f"tiles skipped, {most:,} tokens: probe (●),\noracles of whole output (+) and known end (×)")
    offset.set_title(
        "tiles from the oracle's stop to the probe's: median,\nknown end (●, 5 % to 95 %) and whole output (+)",
        fontsize=9,
    )
    offset.tick_params(labelsize=7)
    offset.grid(alpha=0.25)
    return finished(figure, (skipped, offset), "layer")


def _needles(rows: list[dict]) -> str:
    figure, axes = canvas(2)
    haystacks = list(dict.fromkeys(r["haystack"] for r in rows))
    rules = list(dict.fromkeys(r["tau"] for r in rows))
    label = lambda tau: "to the end" if tau is None else f"τ = {tau:g}"
    for axis, haystack in zip(axes, haystacks):
        for n, (order, context) in enumerate(dict.fromkeys((r["order"], r["context"]) for r in rows)):
            group = [r for r in rows if (r["haystack"], r["order"], r["context"]) == (haystack, order, context)]
            x = [rules.index(r["tau"]) + 0.06 * n for r in group]
            below = [r["share"] - r["at_least"] for r in group]
            above = [r["at_most"] - r["share"] for r in group]
            axis.errorbar(
                x,
                [r["share"] for r in group],
                [below, above],
                fmt="o-",
                color=f"C{n}",
                capsize=2,
                lw=0.9,
                label=f"{order}, {context:,}",
            )
        share_axis(axis, f"needles found in {haystack}, 97.5 % bounds")
        axis.set_xticks(range(len(rules)), [label(tau) for tau in rules])
    legend(figure)
    return svg(figure)
