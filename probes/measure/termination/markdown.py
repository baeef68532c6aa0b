"""The measurement for people: what was found, then every figure, then where it comes from."""

from dsv4.probes.measure.base.markdown import page, paragraph, pictures, section
from dsv4.probes.measure.base.needles import unsolved
from dsv4.probes.measure.base.tables import (
    CONTEXT,
    LAYER,
    Table,
    grouped,
    needle_lines,
    percent,
    shown,
    table_of,
    task_columns,
    task_name,
    together_in_one,
)
from dsv4.probes.measure.termination.document import FAITHFUL, PAYS, idle
from dsv4.probes.report.markdown import escape

REMARKS = """Walks: the last queries of each context along the exact run, in fp64, so nothing of layers below enters. \
Tiles skipped: those that
no head of a group needs any more, which is what saves bytes. Error: ‖o − o⁽ᵀ⁾‖ / ‖o⁽ᵀ⁾‖ of what comes out, held \
against the same order read
to its end. Oracle, whole output: the same rule on all channels; agree: the probe stops at the same tile. Oracle, \
known end: the first tile after
which the whole output is within τ and φ of the final one; agree: the probe stops neither before it nor more than its \
own wait after it. Offsets are
in tiles, from the oracle's stop to the probe's. Definitions, and those of the bounds: \
probes/measure/termination/README.md."""
NEEDLES = """Questions and answers are decoded, prompts are prefilled densely and exactly, once for all. Tiles \
skipped: the share of tiles,
over all layers, that a rule left out while they were decoded. VACUOUS: nothing was left out. Bounds are one-sided \
97.5 % each (Clopper-Pearson)."""
UNDECIDED = "Layers in which neither stops before the end are left out."


def render(document: dict, plots: dict[str, str]) -> str:
    """plots: title → file name beside the report."""
    rule = document["settings"]["rule"]
    head = (
        f"Rule: τ = {rule['tau']:g}, φ = {rule['phi']:g}, p = {rule['patience']}, tiles of {rule['tile']}; "
        f"{document['texts']} rows of text, the last {document['settings']['queries']} queries of each context, every "
        "head a sample."
    )
    parts = [
        _reading(document),
        escape(head),
        escape(paragraph(REMARKS)),
        *pictures(plots),
        *section("By order and context", together(document)),
        *section("The bound by sums, this tool's own", bound(document)),
        *section("The bound by the probe: b = t* − p + 1, ν the probe constant", probe_bound(document)),
        *section("Ablations, longest context", ablations(document), *without_effect(document)),
        *section("By layer: probe against the oracle, whole output", whole_layers(document), UNDECIDED),
        *section("By layer: probe against the oracle, known end", layers(document), UNDECIDED),
        *section("Sweeps, longest context", sweeps(document)),
    ]
    if document["geometries"]:
        parts += section("What the rule can skip at most of published keep-sets", geometries(document))
    if document["needles"]:
        parts += section("Needles", needles(document), escape(_about_needles(document)))
    return page(document, parts)


def _reading(document: dict) -> str:
    lines = [_paying(context, rows) for context, rows in grouped(document["verdicts"], lambda v: v["context"]).items()]
    rows = document["needles"] or []
    lines += needle_lines(rows, str) if task_name(rows) else _found(rows)
    if rows and not any(r["skipped"] for r in rows):
        lines.append("- **Needles: no rule left out a tile, so they say nothing about the rules.**")
    return "\n".join([*lines, *(f"- **{escape(note)}.**" for note in unsolved(rows))])


def _paying(context: int, verdicts: list[dict]) -> str:
    """A line of a list: in which orders the rule pays at a context, and the order in which it skips most."""
    most, paying = max(verdicts, key=lambda v: v["skipped"]), [v["order"] for v in verdicts if v["pays"]]
    verdict = f"pays in {'; '.join(map(escape, paying))}" if paying else f"pays in none of {len(verdicts)} orders"
    what = "Nothing is skipped"
    if most["skipped"]:
        error = shown(most["error_p99"], ".2g")
        what = f"Most is skipped of {escape(most['order'])}: {percent(most['skipped'])} of the tiles"
        what += f", 99th percentile of the relative error {error}"
    return f"- {context:,} tokens: **{verdict}**. {what}."


def _found(rows: list[dict]) -> list[str]:
    """A line of a list a haystack and context: single needles found by policy, under each rule."""
    lines = []
    for (haystack, context), group in grouped(rows, lambda r: (r["haystack"], r["context"])).items():
        each = []
        for order, of in grouped(group, lambda r: r["order"]).items():
            under = (f"{r['hits']} (τ = {r['tau']:g}, {percent(r['skipped'])} skipped)" for r in of if r["tau"])
            each.append(f"{escape(order)}: {of[0]['hits']}; {', '.join(under)}")
        lines.append(
            f"- {context:,} tokens, needles in {escape(haystack)}, of {group[0]['trials']} found, read to the end and "
            f"by rule: {'. '.join(each)}."
        )
    return lines


def _about_needles(document: dict) -> str:
    return paragraph(NEEDLES) + together_in_one(document["settings"])


# ---- tables, which the terminal shows too ---------------------------------------------------------

SKIPPED, ALONE = (">skipped", "skipped", percent), (">each head alone", "skipped_alone", percent)
ORACLE, EARLY = (">oracle, known end", "skipped_oracle_shared", percent), (">early", "early", percent)
WHOLE = (">oracle, whole output", "whole", lambda of: percent(of["skipped_shared"]))
ERROR = (">error, mean", "error_mean", ".2g"), (">99th percentile", "error_p99", ".2g")
LARGEST = (">largest", "error_max", ".2g")
AGREEMENT = (
    (">decided", "decided", percent),
    (">agree", "agree", percent),
    EARLY,
    (">late", "late", percent),
    (">offset, median", "offset_median", "+z.0f"),
    (">5 %", "offset_p5", "+z.0f"),
    (">95 %", "offset_p95", "+z.0f"),
)


AGREED = [column[1] for column in AGREEMENT]


def _all_layers(document: dict) -> list[dict]:
    return [r for r in document["rows"] if r["layer"] is None]


def _verdict(row: dict) -> str:
    """Whether the rule pays, and why not."""
    if row["skipped"] < PAYS:
        return f"no: skips less than {PAYS:.0%}"
    return "yes" if row["error_p99"] <= FAITHFUL else f"no: error beyond {FAITHFUL:.0%}"


def together(document: dict) -> Table:
    return table_of(
        _all_layers(document),
        CONTEXT,
        "order",
        (">heads", "heads", ","),
        (">tiles", "tiles", ".1f"),
        ("pays", _verdict),
        SKIPPED,
        ALONE,
        WHOLE,
        ORACLE,
        (">known end, alone", "skipped_oracle", percent),
        *ERROR,
        LARGEST,
    )


def bound(document: dict) -> Table:
    return table_of(
        _all_layers(document),
        CONTEXT,
        "order",
        (">heads that stop", "bound_of", ","),
        (">largest error", "error_alone_max", ".2g"),
        (">bound, median", "bound_median", ".2g"),
        (">largest error / bound", "bound_tight", ".2g"),
        (">steady bound, median", "steady_median", ".2g"),
        (">beyond the steady bound", "steady_broken", percent),
    )


def probe_bound(document: dict) -> Table:
    return table_of(
        [r | r["by_probe"] for r in _all_layers(document)],
        CONTEXT,
        "order",
        (">heads that stop", "bound_of", ","),
        (">largest error", "error_alone_max", ".2g"),
        (">ν, median", "nu_median", ".2g"),
        (">least", "nu_least", ".2g"),
        (">with drift", "drifting", percent),
        (">bound, median", "bound_median", ".2g"),
        (">largest error / bound", "bound_tight", ".2g"),
        (">steady bound, median", "steady_median", ".2g"),
        (">beyond the steady bound", "steady_broken", percent),
    )


def whole_layers(document: dict) -> Table:
    rows = [r | {key: value for key, value in r["whole"].items() if key in AGREED} for r in document["rows"]]
    return table_of(_decided(rows), CONTEXT, "order", LAYER, SKIPPED, WHOLE, *AGREEMENT)


def layers(document: dict) -> Table:
    return table_of(_decided(document["rows"]), CONTEXT, "order", LAYER, ORACLE, *AGREEMENT)


def _decided(rows: list[dict]) -> list[dict]:
    """Without layers in which neither the rule nor the oracle stops; all layers together always stay."""
    return [r for r in rows if r["decided"] or r["layer"] is None]


def ablations(document: dict) -> Table:
    """Without what changed no figure, which `without_effect` names."""
    rows = [r for r in _effective(document) if r["varied"] not in SWEPT]
    return table_of(rows, "order", ("rule", "varied"), SKIPPED, ALONE, *ERROR, LARGEST, *AGREEMENT)


def _effective(document: dict) -> list[dict]:
    """Rows of the longest context, without those of `idle`."""
    unchanged = {(r["order"], r["context"], r["varied"]) for r in idle(document["varied"])}
    return [r for r in longest(document) if (r["order"], r["context"], r["varied"]) not in unchanged]


def without_effect(document: dict) -> list[str]:
    """A list of what could have been left out of the rule with no figure changed; empty where every part changed
    some."""
    contexts: dict[tuple[str, str], list[int]] = {}
    for row in idle(document["varied"]):
        contexts.setdefault((row["varied"], row["order"]), []).append(row["context"])
    orders = {
        (name, tuple(found)): [o for (n, o), f in contexts.items() if (n, f) == (name, found)]
        for (name, _), found in contexts.items()
    }
    label = lambda name: f"sweeping {SWEPT[name]}" if name in SWEPT else name
    lines = [
        f"- **{label(name)}**: {'; '.join(map(escape, of))} at {', '.join(f'{c:,}' for c in found)} tokens."
        for (name, found), of in sorted(orders.items())
    ]
    return (
        [
            "Changed no figure, so that this measurement cannot tell whether that part of the rule matters:\n\n"
            + "\n".join(lines)
        ]
        if lines
        else []
    )


SWEPT = {"tau": "τ", "phi": "φ", "patience": "p"}


def sweeps(document: dict) -> Table:
    """Without sweeps that changed no figure."""
    rows = [r for r in _effective(document) if r["varied"] in SWEPT]
    value = ">value", lambda r: r[r["varied"]], "g"
    return table_of(rows, "order", ("swept", "varied", SWEPT.get), value, SKIPPED, ALONE, ORACLE, *ERROR, EARLY)


def longest(document: dict) -> list[dict]:
    most = max(r["context"] for r in document["varied"])
    return [r for r in document["varied"] if r["context"] == most]


def geometries(document: dict) -> Table:
    return table_of(
        document["geometries"],
        ("keep-set", "name"),
        (">rows of a tile", "tile"),
        (">tiles", "tiles"),
        (">read at least", "read_at_least"),
        (">skipped at most", "skipped_at_most", percent),
    )


def needles(document: dict) -> Table:
    rule = lambda tau: "read to the end" if tau is None else f"τ = {tau:g}"
    rows = document["needles"]
    what = *task_name(rows), "haystack", CONTEXT, ("policy", "order"), ("rule", "tau", rule)
    return table_of(rows, *what, (">tiles skipped", "skipped", percent), ("status", "status"), *task_columns(rows))
