"""The figures as SVG documents. matplotlib is an optional dependency: without it there are no plots, and the report
says so."""

from io import StringIO
from math import floor, isfinite

MISSING = "no plots: matplotlib is not installed; pip install 'dsv4[plots]' (or matplotlib), and run again"


def available() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(document: dict) -> dict[str, str]:
    """Title → SVG document; the same bytes for the same figures."""
    found = {"By layer": _layers(document["rows"]), "By distance": _distances(document["rows"])}
    if document["needles"] and document["needles"]["rows"]:
        found["Needles"] = _needles(document["needles"]["rows"])
    return found


def canvas(panels: int):
    """(figure, its axes beside each other)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * panels, 3.8), layout="constrained")
    return figure, figure.subplots(1, panels)


def logarithmic(axis, side: str, values) -> None:
    """Make 'x' or 'y' logarithmic with room around the positive ones of `values`; linear where there are none, since
    matplotlib draws no logarithmic axis without a point on it."""
    positive = [v for v in values if v is not None and isfinite(v) and v > 0]
    if positive:
        getattr(axis, f"set_{side}scale")("log")
        low, high = min(positive), max(positive)
        room = max(1.2, (high / low) ** 0.05)
        getattr(axis, f"set_{side}lim")(low / room, high * room)


def legend(figure) -> None:
    """Name the lines below the panels, where they hide none: once if one panel has all names, else panel by panel."""
    named = [(axis, *axis.get_legend_handles_labels()) for axis in figure.axes]
    named = [(axis, handles, labels) for axis, handles, labels in named if labels]
    if not named:
        return
    short = all(len(label) < 34 for _, _, labels in named for label in labels)
    _, handles, most = max(named, key=lambda one: len(one[2]))
    if all(set(labels) <= set(most) for _, _, labels in named):
        columns = min(len(most), (2 if short else 1) * max(1, round(figure.get_figwidth() / 5)))
        figure.legend(handles, most, loc="outside lower center", ncols=columns, fontsize=7)
        rows = -(-len(most) // columns)
    else:
        for axis, handles, labels in named:
            axis.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1 + short, fontsize=7)
        rows = max(-(-len(labels) // (1 + short)) for _, _, labels in named)
    figure.set_figheight(figure.get_figheight() + 0.17 * rows)


def svg(figure) -> str:
    """The figure as an SVG document; equal figures give equal bytes."""
    from matplotlib import rc_context

    out = StringIO()
    with rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _groups(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by the label of their line."""
    groups = {}
    for r in rows:
        vacuous = ", VACUOUS" if r["status"] == "VACUOUS" else ""
        groups.setdefault(f"{r['context']:,} tokens, k = {r['k']}{vacuous}", []).append(r)
    return groups


def share_axis(axis, title: str) -> None:
    """An axis of shares, up to 1; from 0, or from a round share below what was plotted where all of it lies high."""
    values = [v for line in axis.get_lines() for v in line.get_ydata() if isfinite(v)]
    least = max(0.0, floor(10 * (min(values, default=0.0) - 0.02)) / 10)
    least = least if least >= 0.5 else 0.0
    axis.set_title(title + (f"; from {least:g}" if least else ""), fontsize=9)
    axis.set_ylim(least - 0.03 * (1 - least), 1 + 0.03 * (1 - least))
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)


def _layers(rows: list[dict]) -> str:
    figure, (recall, mass) = canvas(2)
    for n, (label, group) in enumerate(_groups([r for r in rows if r["layer"] is not None]).items()):
        layers, color = [str(r["layer"]) for r in group], f"C{n}"
        of = lambda key: [float("nan") if r[key] is None else r[key] for r in group]
        recall.plot(layers, of("recall_fp32"), "o-", color=color, label=label)
        recall.plot(layers, of("recall_matched"), "x--", color=color)
        recall.plot(layers, of("chance"), ":", color=color)
        mass.plot(layers, of("attention_mass_kept"), "o-", color=color, label=label)
        mass.plot(layers, of("attention_mass_best"), "_", color=color, markersize=12)
        mass.plot(layers, of("attention_mass_chance"), ":", color=color)
    share_axis(recall, "recall: fp32 oracle (●), matched (×), chance (dotted)")
    share_axis(mass, "attention mass kept (●), best possible (–), chance (dotted)")
    for axis in (recall, mass):
        axis.set_xlabel("CSA layer", fontsize=8)
    legend(figure)
    return svg(figure)


def _distances(rows: list[dict]) -> str:
    figure, (recall, mass) = canvas(2)
    for n, (label, group) in enumerate(_groups([r for r in rows if r["layer"] is None]).items()):
        bins, color = group[0]["by_distance"], f"C{n}"
        middles = [((d["from"] or d["to"] / 2) * d["to"]) ** 0.5 for d in bins]
        of = lambda key: [float("nan") if d[key] is None else d[key] for d in bins]
        recall.plot(middles, of("recall_fp32"), "o-", color=color, label=label)
        recall.axhline(group[0]["chance"], ls=":", color=color)
        mass.plot(middles, of("attention_mass_kept"), "o-", color=color, label=label)
        mass.bar(middles, of("attention_mass_share"), width=[0.3 * m for m in middles], color=color, alpha=0.25)
    share_axis(recall, "recall (fp32 oracle) by distance, all CSA layers; chance dotted")
    share_axis(mass, "attention mass kept by distance (●), and its share (bars)")
    for axis in (recall, mass):
        axis.set_xscale("log")
        axis.set_xlabel("tokens from the entry to the query", fontsize=8)
    legend(figure)
    return svg(figure)


def _needles(rows: list[dict]) -> str:
    figure, axis = canvas(1)
    by_haystack = {}
    for r in rows:
        by_haystack.setdefault(r["haystack"], []).append(r)
    for n, (name, group) in enumerate(by_haystack.items()):
        lengths, shares = [r["context"] for r in group], [r["share"] for r in group]
        below = [r["share"] - r["at_least"] for r in group]
        style = "--o" if group[0]["window_only"] else "-o"
        axis.errorbar(lengths, shares, [below, [0.0] * len(below)], fmt=style, color=f"C{n}", capsize=3, label=name)
    share_axis(axis, "needles found; bars to the one-sided 97.5 % bound")
    ticks = sorted({r["context"] for r in rows})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axis.minorticks_off()
    axis.set_xlabel("context (tokens)", fontsize=8)
    legend(figure)
    return svg(figure)
