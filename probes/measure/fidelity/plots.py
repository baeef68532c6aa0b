"""The figures as SVG documents; dsv4.probes.measure.recall.plots says whether they can be drawn."""

from dsv4.probes.measure.recall.plots import canvas, legend, logarithmic, share_axis, svg

DEPTHS = 10  # bins of a needle's depth


def draw(document: dict) -> dict[str, str]:
    """Title → SVG document; the same bytes for the same figures."""
    document = document | {
        key: [r for r in document[key] if r["status"] == "MEASURED"] for key in ("rows", "findability")
    }
    found = {"By budget": _by_budget(document)}
    if document["findability"]:
        found["Findability"], found["By layer"] = _findability(document), _by_layer(document)
    if document["needles"] and document["needles"]["rows"]:
        found["Needles"] = _needles(document["needles"]["rows"])
    return found


def _families(document: dict) -> dict[str, str]:
    """Variant → the line that it is a point of: its policy, or CSA."""
    of = lambda v: "window only" if v["control"] else "CSA" if v["policy"] is None else v["policy"]["name"]
    return {v["name"]: of(v) for v in document["variants"]}


def _lines(document: dict, rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """(line, context) → rows by ascending budget."""
    families, groups = _families(document), {}
    for r in sorted((r for r in rows if r["budget"] is not None), key=lambda r: r["budget"]):
        groups.setdefault((families[r["variant"]], r["context"]), []).append(r)
    return groups


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
            x = [r["budget"] for r in group]
            agreement.plot(x, [r["agreement"] for r in group], "o-", color=f"C{n}", label=family)
            agreement.plot(x, [_or_nan(r["agreement_confident"]) for r in group], "x--", color=f"C{n}")
            kl.plot(x, [r["kl"] or float("nan") for r in group], "o-", color=f"C{n}")
        kl.set_title(f"KL(exact ‖ variant), {context:,} tokens", fontsize=9)
        kl.tick_params(labelsize=7)
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
        of = lambda key: [_or_nan(r[key]) for r in group]
        x = [r["budget"] for r in group]
        budgets.plot(x, of("mass_kept"), "o-", color=f"C{n}", label=f"{family}, {context:,} tokens")
        budgets.plot(x, of("findability"), "x--", color=f"C{n}")
        budgets.plot(x, of("chance"), ":", color=f"C{n}")
    by_variant = {}
    for r in together:
        by_variant.setdefault(r["variant"], []).append(r)
    for n, (name, group) in enumerate(by_variant.items()):
        contexts.plot(
            [r["context"] for r in group], [_or_nan(r["mass_kept"]) for r in group], "o-", color=f"C{n}", label=name
        )
        contexts.plot([r["context"] for r in group], [_or_nan(r["findability"]) for r in group], "x--", color=f"C{n}")
    share_axis(budgets, "mass kept (●), findability (×), chance (dotted)")
    share_axis(contexts, "mass kept (●), findability (×)")
    _logarithmic(contexts, {r["context"] for r in together})
    _labelled(contexts, "context (tokens)")
    _logarithmic(budgets, {r["budget"] for r in together})
    return _finished(figure, (budgets,), "tokens read at most by a choosing layer")


def _by_layer(document: dict) -> str:
    figure, axes = canvas(2)
    longest = max(r["context"] for r in document["findability"])
    rows = [r for r in document["findability"] if r["layer"] is not None and r["context"] == longest]
    for axis, key, title in zip(axes, ("findability", "mass_kept"), ("findability", "attention mass kept")):
        for name in dict.fromkeys(r["variant"] for r in rows):
            group = [r for r in rows if r["variant"] == name]
            axis.plot([str(r["layer"]) for r in group], [_or_nan(r[key]) for r in group], "o-", label=name)
        share_axis(axis, f"{title}, {longest:,} tokens")
    return _finished(figure, axes, "layer")


def _needles(rows: list[dict]) -> str:
    names = list(dict.fromkeys(r["haystack"] for r in rows))
    found = {
        haystack: {
            variant: [d for r in rows if (r["haystack"], r["variant"]) == (haystack, variant) for d in r["depths"]]
            for variant in dict.fromkeys(r["variant"] for r in rows)
        }
        for haystack in names
    }
    return needle_maps({f"needles found in {name}, %, all contexts": trials for name, trials in found.items()})


def needle_maps(panels: dict[str, dict[str, list[dict]]]) -> str:
    """A panel a title: a row a label, a column a tenth of the context, in a cell the share found in percent."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for trials in panels.values() for label in trials))
    figure = Figure(figsize=(1.6 + 4.4 * len(panels), 1.2 + 0.3 * len(labels)), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, trials) in zip(axes, panels.items()):
        cells = [[float("nan")] * DEPTHS for _ in labels]
        for y, label in enumerate(labels):
            for middle, share in zip(*by_depth(trials.get(label, []))):
                cells[y][int(middle * DEPTHS)] = share
                color = "w" if share < 0.6 else "k"
                axis.text(
                    int(middle * DEPTHS) + 0.5,
                    y + 0.5,
                    f"{100 * share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=color,
                )
        axis.pcolormesh(cells, cmap="viridis", vmin=0, vmax=1)
        axis.set_title(title, fontsize=9)
        axis.set_xticks([0, DEPTHS / 2, DEPTHS], ["0", "0.5", "1"])
        axis.set_yticks([y + 0.5 for y in range(len(labels))], labels)
        axis.set_xlabel("depth (0: start of the context)", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0].invert_yaxis()
    return svg(figure)


def by_depth(trials: list[dict]) -> tuple[list[float], list[float]]:
    """(middles of the depth bins that have trials, the share found in each)."""
    bins: dict[int, list[bool]] = {}
    for trial in trials:
        bins.setdefault(min(int(trial["depth"] * DEPTHS), DEPTHS - 1), []).append(trial["hit"])
    return [(b + 0.5) / DEPTHS for b in sorted(bins)], [sum(bins[b]) / len(bins[b]) for b in sorted(bins)]


def _logarithmic(axis, at: set[int]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(sorted(at), [f"{n:,}" for n in sorted(at)])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def _labelled(axis, label: str) -> None:
    axis.set_xlabel(label, fontsize=8)


def _finished(figure, axes, label: str) -> str:
    for axis in axes:
        _labelled(axis, label)
    legend(figure)
    return svg(figure)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
