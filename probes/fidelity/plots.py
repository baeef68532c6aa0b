"""The figures as SVG documents; dsv4.probes.recall.plots says whether they can be drawn."""

from dsv4.probes.recall.plots import canvas, share_axis, svg

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
    figure, (agreement, kl) = canvas(2)
    for n, ((family, context), group) in enumerate(_lines(document, document["rows"]).items()):
        label, x = f"{family}, {context:,} tokens", [r["budget"] for r in group]
        agreement.plot(x, [r["agreement"] for r in group], "o-", color=f"C{n}", label=label)
        agreement.plot(x, [_or_nan(r["agreement_confident"]) for r in group], "x--", color=f"C{n}")
        kl.plot(x, [max(r["kl"], 1e-9) for r in group], "o-", color=f"C{n}", label=label)
    share_axis(agreement, "same next token (●); where the exact run is confident (×)")
    kl.set(yscale="log")
    kl.set_title("KL(exact ‖ variant), nats a token", fontsize=9)
    kl.tick_params(labelsize=7)
    kl.grid(alpha=0.25)
    for axis in (agreement, kl):
        _logarithmic(axis, {r["budget"] for r in document["rows"]})
    return _finished(figure, (agreement, kl), "tokens read at most by a choosing layer")


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
    figure, axes = canvas(2)
    names = list(dict.fromkeys(r["haystack"] for r in rows))
    for axis, haystack in zip(axes, names):
        for n, variant in enumerate(dict.fromkeys(r["variant"] for r in rows)):
            trials = [d for r in rows if (r["haystack"], r["variant"]) == (haystack, variant) for d in r["depths"]]
            axis.plot(*by_depth(trials), "o-", color=f"C{n}", label=variant, alpha=0.8)
        share_axis(axis, f"needles found in {haystack}, all contexts")
    return _finished(figure, axes, "depth (0: start of the context)")


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
    if axis.has_data():
        axis.legend(fontsize=7)


def _finished(figure, axes, label: str) -> str:
    for axis in axes:
        _labelled(axis, label)
    return svg(figure)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
