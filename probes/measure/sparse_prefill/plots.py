"""The figures as SVG documents; dsv4.probes.measure.base.plots says whether they can be drawn."""

from dataclasses import astuple
from itertools import cycle

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.base.plots import canvas, legend, logarithmic, needle_maps, numbers, shaded, share_axis, svg
from dsv4.probes.measure.sparse_prefill.markdown import cut_of
from dsv4.probes.measure.sparse_prefill.mass import KINDS
from dsv4.probes.measure.sparse_prefill.quality import GOAL
from dsv4.probes.measure.sparse_prefill.settings import KEYS, extremes

LABELS = {
    "own": "own chunk alone",
    "kept": "kept",
    "recent": "most recent",
    "random": "random",
    "oracle_next": "oracle, next chunk",
    "oracle_future": "oracle, all later",
}


def draw(document: dict, maps: dict[str, dict[int, torch.Tensor]]) -> dict[str, str]:
    """Title → SVG document; the same bytes for the same figures. maps: cut → layer → what `kept_by_place` gives."""
    cuts = tuple(Chunking(*key) for key in dict.fromkeys(map(key_of, document["rows"])))
    shown = [astuple(c) for c in extremes(cuts)]
    found = {
        "Perplexity": perplexity(document["rows"]),
        "By chunk": by_chunk(document, shown),
        "Mass by layer": by_layer(document["mass"], shown),
        "Mass by head": by_head(document["mass"], shown),
        "Stability": stability(document["stability"], shown),
    }
    found |= {f"Kept, {cut}": kept(cut, layers) for cut, layers in maps.items()}
    if document["needles"]:
        found["Needles"] = needles(document["needles"]["rows"])
    return found


def key_of(row: dict) -> tuple:
    return tuple(row[key] for key in KEYS)


def perplexity(rows: list[dict]) -> str:
    """Loss by H, a line for each L and context; interval as bars."""
    rows = [r for r in rows if r["text"] is None]
    chunks = list(dict.fromkeys(r["chunk"] for r in rows))
    figure, axes = canvas(len(chunks))
    for axis, chunk in zip([axes] if len(chunks) == 1 else axes, chunks):
        of = [r for r in rows if r["chunk"] == chunk]
        for n, context in enumerate(dict.fromkeys(r["context"] for r in of)):
            ways = dict.fromkeys((r["local"], r["score"], r["heads"]) for r in of)
            for style, (local, *rule) in zip(cycle(("o-", "x--", "+:", "^-.", "s-", "d--")), ways):
                line = [r for r in of if (r["context"], r["local"], r["score"], r["heads"]) == (context, local, *rule)]
                down, up = (
                    [100 * abs((r["loss"] if r[k] is None else r[k]) - r["loss"]) for r in line]
                    for k in ("loss_low", "loss_high")
                )
                axis.errorbar(
                    [r["heavy"] for r in line],
                    [100 * r["loss"] for r in line],
                    [down, up],
                    fmt=style,
                    color=f"C{n}",
                    ms=4,
                    capsize=2,
                    lw=1,
                    label=f"{context:,} tokens, {local} local, {' '.join(rule)}",
                )
        axis.axhline(100 * GOAL, color="0.4", lw=0.8, ls="--")
        axis.set_title(f"perplexity lost, %, chunks of {chunk} (goal: below the dashed line)", fontsize=8)
        finish(axis, "heavy tokens H")
    legend(figure)
    return svg(figure)


def by_chunk(document: dict, shown: list[tuple]) -> str:
    """Nats lost, and mass kept, by how far into the text."""
    figure, (lost, share) = canvas(2)
    first = document["texts"][0]["name"]
    styles = {"kept": "-", "random": ":", "oracle_next": "--"}
    middles = lambda r, values: [(i + 1.5) * r["chunk"] for i in range(len(values))]
    for n, key in enumerate(shown):
        of = lambda rows: [r for r in rows if key_of(r) == key and r["text"] == first]
        for r in of(document["by_chunk"]):
            lost.plot(middles(r, r["lost"]), r["lost"], ".-", color=f"C{n}", lw=0.7, ms=3, label=cut_of(r))
        for r in (r for r in of(document["mass_by_chunk"]) if r["kind"] in styles):
            share.plot(
                middles(r, r["share"]),
                numbers(r["share"]),
                styles[r["kind"]],
                color=f"C{n}",
                lw=0.9,
                label=cut_of(r) if r["kind"] == "kept" else None,
            )
    lost.axhline(0, color="0.4", lw=0.5)
    lost.set_title(f"nats lost a token, {first[:45]}", fontsize=8)
    share_axis(share, "mass: kept (–), random (dotted), oracle (dashed)")
    for axis in (lost, share):
        finish(axis, "position")
    legend(figure)
    return svg(figure)


def one_for_each(rows: list[dict], shown: list[tuple]) -> tuple:
    """A figure, and (axis, rows of the first text) of each setting."""
    figure, axes = canvas(len(shown))
    return figure, [(axis, first_text(rows, key)) for axis, key in zip([axes] if len(shown) == 1 else axes, shown)]


def by_layer(rows: list[dict], shown: list[tuple]) -> str:
    figure, panels = one_for_each(rows, shown)
    for axis, of in panels:
        for n, kind in enumerate(KINDS):
            means = [sum(r[kind]) / len(r[kind]) for r in of]
            axis.plot([r["layer"] for r in of], means, "o-", ms=3, lw=1, color=f"C{n}", label=LABELS[kind])
        share_axis(axis, f"dense mass that is seen, {cut_of(of[0])}")
        finish(axis, "layer")
    legend(figure)
    return svg(figure)


def by_head(rows: list[dict], shown: list[tuple]) -> str:
    """Of the mass outside the own chunk, the share that the memory kept: layer × head."""
    figure, panels = one_for_each(rows, shown)
    for axis, of in panels:
        cells = [[(k - o) / (1 - o) if o < 1 else float("nan") for k, o in zip(r["kept"], r["own"])] for r in of]
        mesh = shaded(axis, cells, 6)
        axis.set_xticks([x + 0.5 for x in range(len(cells[0]))], [str(x) for x in range(len(cells[0]))])
        axis.set_yticks([y + 0.5 for y in range(len(of))], [str(r["layer"]) for r in of])
        axis.set_title(f"% kept of the mass before the own chunk\n{cut_of(of[0])}", fontsize=8)
        axis.set_xlabel("query head", fontsize=8)
        axis.set_ylabel("layer", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.colorbar(mesh, ax=[axis for axis, _ in panels])
    return svg(figure)


def stability(rows: list[dict], shown: list[tuple]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(shown), 6), layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False)
    for (above, below), key in zip(zip(*axes), shown):
        of = first_text(rows, key)
        for n, r in enumerate(of):
            style = dict(lw=0.9, color=f"C{n}", label=f"layer {r['layer']}")  # lines: a mark a point was 440 KB
            above.plot(range(2, 2 + len(r["jaccard"])), numbers(r["jaccard"]), **style)
            below.plot(range(1, 1 + len(r["survivors"])), r["survivors"], **style)
        below.plot(
            range(1, 1 + len(of[0]["survivors_chance"])), of[0]["survivors_chance"], "k:", lw=1, label="by chance"
        )
        share_axis(above, f"Jaccard of heavy tokens, {cut_of(of[0])}")
        below.set_title("tokens of chunk 0 in the memory, mean over KV heads", fontsize=8)
        logarithmic(below, "y", [n for r in of for n in (*r["survivors"], *r["survivors_chance"])])
        below.yaxis.set_major_formatter("{x:g}")
        for axis in (above, below):
            finish(axis, "update")
    legend(figure)
    return svg(figure)


def kept(cut: str, layers: dict[int, torch.Tensor]) -> str:
    """Heat maps, a layer each: position × update. Drawn as pictures, since a cell each would be megabytes."""
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    with rc_context({"image.interpolation": "nearest", "image.composite_image": False}):
        columns = min(3, len(layers))
        figure = Figure(figsize=(4 * columns, 3 * -(-len(layers) // columns)), layout="constrained")
        axes = figure.subplots(-(-len(layers) // columns), columns, squeeze=False).flat
        most = max(1.0, max(float(kept.max()) for kept in layers.values()))
        for axis, (layer, found) in zip(axes, layers.items()):
            picture = axis.imshow(
                found[1:].masked_fill(found[1:] == 0, float("nan")).numpy(),
                aspect="auto",
                cmap="viridis",
                norm=LogNorm(0.5, max(1.0, most)),
                extent=(0, 1, len(found) - 0.5, 0.5),
            )
            axis.set_title(f"layer {layer}", fontsize=8)
            axis.set_xlabel("position, of the whole text", fontsize=7)
            axis.set_ylabel("update", fontsize=7)
            axis.tick_params(labelsize=6)
        figure.suptitle(f"what the memory holds: {cut}", fontsize=9)
        figure.colorbar(picture, ax=list(figure.axes)).set_label(
            "tokens held of each position's bin, mean over KV heads", fontsize=7
        )
        return svg(figure)


def needles(rows: list[dict]) -> str:
    kinds = [
        kind for kind in dict.fromkeys(r["kind"] for r in rows) if any(r["depths"] for r in rows if r["kind"] == kind)
    ]
    cuts = list(dict.fromkeys(map(cut_of, rows)))
    trials = lambda kind, cut: [d for r in rows if (r["kind"], cut_of(r)) == (kind, cut) for d in r["depths"]]
    return needle_maps({f"{kind}, % found, all contexts": {cut: trials(kind, cut) for cut in cuts} for kind in kinds})


def first_text(rows: list[dict], key: tuple) -> list[dict]:
    """Rows of a cut and the first text and row, by layer."""
    found = {}
    for r in rows:
        if key_of(r) == key and r["layer"] is not None:
            found.setdefault(r["layer"], r)
    return list(found.values())


def finish(axis, label: str) -> None:
    axis.set_xlabel(label, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)
