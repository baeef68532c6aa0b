"""The figures as SVG documents; dsv4.probes.measure.base.plots says whether they can be drawn."""

from dsv4.probes.measure.base.plots import MISSING as MISSING  # old places of these names, until 0.4
from dsv4.probes.measure.base.plots import available as available
from dsv4.probes.measure.base.plots import canvas, column, finished, share_axis
from dsv4.probes.measure.base.plots import legend as legend
from dsv4.probes.measure.base.plots import logarithmic as logarithmic
from dsv4.probes.measure.base.plots import svg as svg
from dsv4.probes.measure.base.tables import grouped


def draw(document: dict) -> dict[str, str]:
    """Title → SVG document; the same bytes for the same figures."""
    found = {"By layer": _layers(document["rows"]), "By distance": _distances(document["rows"])}
    if document["needles"] and document["needles"]["rows"]:
        found["Needles"] = _needles(document["needles"]["rows"])
    return found


def _label(row: dict) -> str:
    """The name of the line that a row is a point of."""
    return f"{row['context']:,} tokens, k = {row['k']}{', VACUOUS' if row['status'] == 'VACUOUS' else ''}"


def _layers(rows: list[dict]) -> str:
    figure, (recall, mass) = canvas(2)
    for n, (label, group) in enumerate(grouped((r for r in rows if r["layer"] is not None), _label).items()):
        layers, color = [str(r["layer"]) for r in group], f"C{n}"
        recall.plot(layers, column(group, "recall_fp32"), "o-", color=color, label=label)
        recall.plot(layers, column(group, "recall_matched"), "x--", color=color)
        recall.plot(layers, column(group, "chance"), ":", color=color)
        mass.plot(layers, column(group, "attention_mass_kept"), "o-", color=color, label=label)
        mass.plot(layers, column(group, "attention_mass_best"), "_", color=color, markersize=12)
        mass.plot(layers, column(group, "attention_mass_chance"), ":", color=color)
    share_axis(recall, "recall: fp32 oracle (●), matched (×), chance (dotted)")
    share_axis(mass, "attention mass kept (●), best possible (–), chance (dotted)")
    return finished(figure, (recall, mass), "CSA layer")


def _distances(rows: list[dict]) -> str:
    figure, (recall, mass) = canvas(2)
    for n, (label, group) in enumerate(grouped((r for r in rows if r["layer"] is None), _label).items()):
        bins, color = group[0]["by_distance"], f"C{n}"
        middles = [((d["from"] or d["to"] / 2) * d["to"]) ** 0.5 for d in bins]
        recall.plot(middles, column(bins, "recall_fp32"), "o-", color=color, label=label)
        recall.axhline(group[0]["chance"], ls=":", color=color)
        mass.plot(middles, column(bins, "attention_mass_kept"), "o-", color=color, label=label)
        shares, widths = column(bins, "attention_mass_share"), [0.3 * m for m in middles]
        mass.bar(middles, shares, width=widths, color=color, alpha=0.25)
    share_axis(recall, "recall (fp32 oracle) by distance, all CSA layers; chance dotted")
    share_axis(mass, "attention mass kept by distance (●), and its share (bars)")
    for axis in (recall, mass):
        axis.set_xscale("log")
    return finished(figure, (recall, mass), "tokens from the entry to the query")


def _needles(rows: list[dict]) -> str:
    figure, axis = canvas(1)
    for n, (name, group) in enumerate(grouped(rows, lambda r: r["haystack"]).items()):
        lengths, shares = column(group, "context"), column(group, "share")
        below = [r["share"] - r["at_least"] for r in group]
        style = "--o" if group[0]["window_only"] else "-o"
        axis.errorbar(lengths, shares, [below, [0.0] * len(below)], fmt=style, color=f"C{n}", capsize=3, label=name)
    share_axis(axis, "needles found; bars to the one-sided 97.5 % bound")
    ticks = sorted({r["context"] for r in rows})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axis.minorticks_off()
    return finished(figure, (axis,), "context (tokens)")
