"""The report of `dsv4 regime` as markdown, from the JSON document alone."""

from collections.abc import Sequence

from dsv4.units import format_bytes


def tokens(count: int | None) -> str:
    """131072 → '128K'."""
    if count is None:
        return "–"
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % (size // 8) == 0:
            return f"{count / size:g}{unit}"
    return str(count)


def times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"


def micro(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def priced(price: dict) -> str:
    """A price of finding (`dsv4.cost_model.fit.Price` as a document) in words."""
    row = f" + {micro(price['row'])} µs a row" if price.get("row") else ""
    listed = f" + {price['listed'] * 1e9:.3f} ns a block of one row" if price.get("listed") else ""
    return f"{micro(price['fixed'])} µs{row} + {price['each'] * 1e9:.3f} ns a block{listed}"


def launches(costs: dict) -> str:
    """c₀ (of `dsv4.cost_model.fit.CostModel` as a document) in words."""
    row = f" + {micro(costs['row'])} µs for each row of the batch after the first" if costs.get("row") else ""
    return f"{micro(costs['c0'])} µs{row}"


def markdown(report: dict, picture: str) -> str:
    lines = [*_headline(report), "", _formula(report["bill"]), "", _fitted(report["bill"]), ""]
    if report["rows"]:
        lines += [*_quality(report["quality"]), ""]
    lines += _crossovers(report["crossovers"], bool(report["rows"]))
    if report["rows"]:
        lines += _rows(report["rows"])
    lines += [
        "",
        "## Map",
        "",
        _hardware(report["hardware"]),
        "",
        *_whole(report),
        *_map(report["map"]),
        "",
        f"![map]({picture})",
    ]
    notes = [f"- {note}" for note in report["notes"]]
    if (drawn := report.get("drawn")) is not None:
        notes.append(f"- Map drawn at {drawn['date']}, commit {str(drawn['commit'])[:7]}: `{drawn['command']}`")
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _hardware(hardware: dict) -> str:
    resident = hardware.get("resident")
    more = f" of {format_bytes(resident)}" if resident else ""
    return (
        f"{hardware['name']}: capacity {format_bytes(hardware['capacity'])}, {hardware['layers']} layers, weights "
        f"{format_bytes(hardware['weights'])}{more} a step. Times faster than dense of the fastest policy: attention "
        "(whole step); – where the caches do not fit, † where only those of dense attention do not."
    )


def _whole(report: dict) -> list[str]:
    """What the whole-step ratios and the rows of the host tier rest on; each with an empty line behind it."""
    lines, hardware = [], report["hardware"]
    if (steps := report.get("steps")) is not None:
        lines += [
            f"Whole steps by the cost model that was fitted to measured ones ({steps['geometry']}, {steps['device']}, "
            f"`{steps['command']}`): {_fitted(steps['bill'])} c₀ and c₁ are of one layer, and c₀ is what a layer takes "
            "beside its bytes."
            + _batches(steps.get("batches", ()))
            + ("" if steps["dense"] else " No dense step was measured, so that c₀ has the price of finding in it."),
            "",
        ]
    if (tier := report.get("tier")) is not None:
        lines += [
            "Rows “host”: the caches are in host memory. ms of a whole step, times faster than a dense step whose "
            "cache is on the device would be, and bytes fetched. A step takes longer than one with its caches on the "
            f"device by {micro(tier['launch'])} µs a layer, {micro(tier['latency'])} µs more where a layer fetches, "
            f"and the bytes fetched at {tier['link'] / 1e9:.1f} GB/s (fitted to `{tier['command']}` on "
            f"{tier['device']}, worst error {tier['worst']:.1%}). Assumed: this link, {hardware['hit']:.0%} of what a "
            f"step chooses staged already, {format_bytes(hardware['host'])} of host memory. On the device are the "
            "weights, summaries, what is staged, and buffers of whole layers for prompts.",
            "",
        ]
    return lines


def _batches(measured: Sequence[int]) -> str:
    """At which batches steps were measured, so that a reader sees which rows of the map are extrapolated."""
    if not measured:
        return ""
    said = ", ".join(map(str, measured))
    return f" Steps were measured at batch {said}; for other batches a straight line through these is assumed."


def _headline(report: dict) -> list[str]:
    """The title, and where the figures come from. In a map without rows nothing was measured on the hardware, and the
    title names it."""
    about, measured = report["about"], bool(report["rows"])
    where = "" if measured else f" on {report['hardware']['name']}"
    shown = [f"{k} {v}" for k, v in about.items() if k not in ("command", "dirty") and v is not None]
    said = ", ".join(shown + ["tracked files changed since"] * bool(about.get("dirty"))) + "."
    command = ["", f"    {about['command']}"] if about.get("command") else []
    return [
        f"# Regime: when {about['model']} decode should read sparsely{where}",
        "",
        said
        if measured
        else f"A map of {report['hardware']['name']}, where nothing was measured; the cost model was measured as: "
        f"{said}",
        *command,
    ]


def _formula(costs: dict) -> str:
    """The formula of the cost model as it was fitted; it mentions a price for a row of the batch only if there is
    one."""
    parts = ["a fixed price"] + ["one for each row of the batch"] * any(p.get("row") for p in costs["finding"].values())
    parts.append("one for each block that is scored (of all rows and KV heads)")
    said = ", ".join(parts[:-1]) + (", and " if len(parts) > 1 else "") + parts[-1]
    return (
        f"One layer's attention takes bytes / β + c₀, and c₁ more where blocks must be found first: {said}. β and c₀ "
        "are fitted on dense rows only, each c₁ on its own rows, relative errors least squares; rows held out were "
        "predicted on disk before they ran."
    )


def _fitted(costs: dict) -> str:
    prices = "".join(f", c₁ ({name}) = {priced(price)}" for name, price in costs["finding"].items())
    return f"β = {costs['bandwidth'] / 1e12:.3f} TB/s, c₀ = {launches(costs)}{prices}."


def _crossovers(crossovers: Sequence[dict], measured: bool) -> list[str]:
    """The table of crossovers; for a map without rows only the predicted ones."""
    said = "The shortest context from which on the policy is not slower than dense attention"
    if not measured:
        lines = [f"{said}, as the cost model predicts it.", "", "| policy | batch | predicted |", "|---|---:|---:|"]
    else:
        lines = [
            f"{said}; met: within a factor of two of where it was measured.",
            "",
            "| policy | batch | predicted | measured between | |",
            "|---|---:|---:|---|---|",
        ]
    return ["## Crossovers", "", *lines, *(_crossover(c, measured) for c in crossovers)]


def _quality(quality: dict) -> list[str]:
    lines = ["| goal | wanted | found | |", "|---|---|---:|---|"]
    lines += [
        f"| {g['goal']} | {g['wanted']} | {'–' if g['found'] is None else format(g['found'], '.4f')} | {g['verdict']} |"
        for g in quality["goals"]
    ]
    lines += ["", "| rows | count | R² | median error | worst error | which |", "|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {name} | {q['rows']} | {q['r_squared']:.4f} | {q['median_error']:.1%} | {q['worst_error']:.1%} | "
        f"{q['worst']} |"
        for name in ("fitted", "held out", "all")
        if (q := quality[name])
    ]
    return lines


def _rows(rows: Sequence[dict]) -> list[str]:
    lines = [
        "",
        "## Rows",
        "",
        "µs of one layer, cold L2, median; the fastest implementation of each.",
        "",
        "| policy | batch | context | read | measured | predicted | error | | by |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    kind = lambda r: "held out" if r["held_out"] else "fitted" if r["dense"] or r["finding"] else "predicted only"
    lines += [
        f"| {r['policy']} | {r['batch']} | {tokens(r['context'])} | {format_bytes(r['bytes'])} | "
        f"{micro(r['seconds'])} | {micro(r['predicted'])} | {r['error']:+.1%} | {kind(r)} | {r['by']} |"
        for r in sorted(rows, key=lambda r: (r["batch"], r["context"], not r["dense"], r["policy"]))
    ]
    return lines


def _crossover(c: dict, measured: bool) -> str:
    said = "never pays" if c["predicted"] is None else tokens(c["predicted"])
    if not measured:
        return f"| {c['policy']} | {c['batch']} | {said} |"
    below, above = c.get("measured_between", (None, None))
    seen = (
        "not measured"
        if below is above is None
        else f"over {tokens(below)}, never ahead"
        if above is None
        else f"up to {tokens(above)}, always ahead"
        if below is None
        else f"{tokens(below)} … {tokens(above)}"
    )
    return f"| {c['policy']} | {c['batch']} | {said} | {seen} | {verdict(c)} |"


def verdict(c: dict) -> str:
    """Whether the predicted crossover is within one power of two of the measured one."""
    below, above = c.get("measured_between", (None, None))
    if below is above is None:
        return "not measured"
    if c["predicted"] is None:
        return "met" if above is None else "FAILED"
    return (
        "met" if (below or 0) / 2 <= c["predicted"] <= (2 * above if above is not None else float("inf")) else "FAILED"
    )


def _cell(c: dict) -> str:
    if not c["fits"]:
        return "–"
    if c["best"] == "dense":
        return "dense"
    alone = "" if c["fits_by_policy"]["dense"] else " †"
    return f"{c['best']} {times(c['attention_speedup'])} ({times(c['step_speedup'])}){alone}"


def _map(cells: Sequence[dict]) -> list[str]:
    contexts, batches = (list(dict.fromkeys(c[key] for c in cells)) for key in ("context", "batch"))
    at = {(c["batch"], c["context"]): c for c in cells}
    lines = ["| batch | " + " | ".join(map(tokens, contexts)) + " |", "|---:" * (len(contexts) + 1) + "|"]
    for b in batches:
        lines.append(f"| {b} | " + " | ".join(_cell(at[b, c]) for c in contexts) + " |")
        if any("host" in at[b, c] for c in contexts):
            lines.append(f"| {b}, host | " + " | ".join(_host_cell(at[b, c].get("host")) for c in contexts) + " |")
    return lines


def _host_cell(host: dict | None) -> str:
    if host is None or not host["fits"]:
        return "–"
    fetched = format_bytes(host["fetched"]).replace(".00", "") if host["fetched"] else "nothing"
    return f"{host['seconds'] * 1e3:.3g} ms, {times(host['speedup'])}, {fetched}"
