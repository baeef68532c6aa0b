"""The figures as SVG documents; dsv4.probes.measure.base.plots says whether they can be drawn."""

from dsv4.probes.measure.base.plots import (
    canvas,
    column,
    finished,
    legend,
    logarithmic,
    needle_maps,
    numbers,
    share_axis,
    svg,
    task_map,
)
from dsv4.probes.measure.base.tables import grouped


def draw(document: dict) -> dict[str, str]:
    """Title → SVG document; the same bytes for the same figures."""
    document = document | {
        key: [r for r in document[key] if r["status"] == "MEASURED"] for key in ("rows", "findability")
    }
    found = {"By budget": _by_budget(document)}
    if document["findability"]:
        found["Findability"], found["By layer"] = _findability(document), _by_layer(document)
    if document["needles"] and document["needles"]["rows"]:
        rows = document["needles"]["rows"]
        found["Needles"] = _needles([r for r in rows if r.get("task", "single") == "single"] or rows)
        if "task" in rows[0]:
            found["Tasks"] = task_map(rows)
    return found


def _families(document: dict) -> dict[str, str]:
    """Variant → the line that it is a point of: its policy, or CSA."""
    of = lambda v: "window only" if v["control"] else "CSA" if v["policy"] is None else v["policy"]["name"]
    return {v["name"]: of(v) for v in document["variants"]}


def _lines(document: dict, rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """(line, context) → rows by ascending budget."""
    families = _families(document)
    ascending = sorted((r for r in rows if r["budget"] is not None), key=lambda r: r["budget"])
    return grouped(ascending, lambda r: (families[r["variant"]], r["context"]))


def _by_budget(document: dict) -> str:
    """A column a context: agreement above, KL below."""
    from matplotlib.figure import Figure

    lines = _lines(document, document["rows"])
    contexts, families = (list(dict.fromkeys(key[n] for key in lines)) for n in (1, 0))
    figure = Figure(figsize=(5 * len(contexts), 6.4), layout="constrained")
    panels = figure.subplots(2, len(contexts), squeeze=False, sharey="row", sharex=True)
    for (agreement, kl), context in zip(panels.T, contexts):
        for n, family in enumerate(families):
            group = lines.get((family, context), [])
            x = column(group, "budget")
            agreement.plot(x, column(group, "agreement"), "o-", color=f"C{n}", label=family)
            agreement.plot(x, column(group, "agreement_confident"), "x--", color=f"C{n}")
            kl.plot(x, numbers(r["kl"] or None for r in group), "o-", color=f"C{n}")
        kl.set_title(f"KL(exact ‖ variant), {context:,} tokens", fontsize=9)
        kl.tick_params(which="both", labelsize=7)
        kl.grid(alpha=0.25)
        kl.set_xlabel("tokens read at most by a choosing layer", fontsize=8)
        _logarithmic(kl, {r["budget"] for r in document["rows"] if r["budget"] is not None})
    lows = []
    for axis, context in zip(panels[0], contexts):
        share_axis(axis, "")
        lows.append(axis.get_ylim()[0])
        axis.set_title(f"same next token, {context:,} tokens", fontsize=9)
    panels[0][0].set_ylabel("● all, × where the exact run is confident", fontsize=8)
    low = min(lows)  # the panels share their axis
    panels[0][0].set_ylim(low, 1 + 0.03 * (1 - low))
    panels[1][0].set_ylabel("nats a token", fontsize=8)
    logarithmic(panels[1][0], "y", [r["kl"] for r in document["rows"]])
    legend(figure)
    return svg(figure)


def _findability(document: dict) -> str:
    figure, (budgets, contexts) = canvas(2)
    together = [r for r in document["findability"] if r["layer"] is None]
    for n, ((family, context), group) in enumerate(_lines(document, together).items()):
        x = column(group, "budget")
        budgets.plot(x, column(group, "mass_kept"), "o-", color=f"C{n}", label=f"{family}, {context:,} tokens")
        budgets.plot(x, column(group, "findability"), "x--", color=f"C{n}")
        budgets.plot(x, column(group, "chance"), ":", color=f"C{n}")
    for n, (name, group) in enumerate(grouped(together, lambda r: r["variant"]).items()):
        x = column(group, "context")
        contexts.plot(x, column(group, "mass_kept"), "o-", color=f"C{n}", label=name)
        contexts.plot(x, column(group, "findability"), "x--", color=f"C{n}")
    share_axis(budgets, "mass kept (●), findability (×), chance (dotted)")
    share_axis(contexts, "mass kept (●), findability (×)")
    _logarithmic(contexts, {r["context"] for r in together})
    contexts.set_xlabel("context (tokens)", fontsize=8)
    _logarithmic(budgets, {r["budget"] for r in together})
    return finished(figure, (budgets,), "tokens read at most by a choosing layer")


def _by_layer(document: dict) -> str:
    figure, axes = canvas(2)
    longest = max(r["context"] for r in document["findability"])
    rows = [r for r in document["findability"] if r["layer"] is not None and r["context"] == longest]
    for axis, key, title in zip(axes, ("findability", "mass_kept"), ("findability", "attention mass kept")):
        for name, group in grouped(rows, lambda r: r["variant"]).items():
            axis.plot([str(r["layer"]) for r in group], column(group, key), "o-", label=name)
        share_axis(axis, f"{title}, {longest:,} tokens")
    return finished(figure, axes, "layer")


def _needles(rows: list[dict]) -> str:
    trials = {
        haystack: {
            variant: [depth for r in of for depth in r["depths"]]
            for variant, of in grouped(group, lambda r: r["variant"]).items()
        }
        for haystack, group in grouped(rows, lambda r: r["haystack"]).items()
    }
    return needle_maps({f"needles found in {name}, %, all contexts": of for name, of in trials.items()})


def _logarithmic(axis, at: set[int]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(sorted(at), [f"{n:,}" for n in sorted(at)])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
