"""The measurement for people: what was found, then every figure, then where it comes from."""

from dsv4.probes.measure.base.markdown import page, paragraph, pictures, section
from dsv4.probes.measure.base.needles import unsolved
from dsv4.probes.measure.base.tables import (
    CONTEXT,
    LAYER,
    Table,
    needle_lines,
    percent,
    shown,
    table_of,
    task_columns,
    task_name,
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
NEEDLES = """Questions and answers are decoded, prompts are prefilled densely and exactly, once for all. Bounds are \
one-sided 97.5 % each
(Clopper-Pearson)."""


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
        *section("By layer: probe against the oracle, whole output", whole_layers(document)),
        *section("By layer: probe against the oracle, known end", layers(document)),
        *section("Sweeps, longest context", sweeps(document)),
    ]
    if document["geometries"]:
        parts += section("What the rule can skip at most of published keep-sets", geometries(document))
    if document["needles"]:
        parts += section("Needles", needles(document), paragraph(NEEDLES))
    return page(document, parts)


def _reading(document: dict) -> str:
    lines = []
    for v in document["verdicts"]:
        r = next(
            r for r in document["rows"] if (r["order"], r["context"], r["layer"]) == (v["order"], v["context"], None)
        )
        why = (
            f"less than {PAYS:.0%} is skipped"
            if v["skipped"] < PAYS
            else f"99th percentile of the error beyond {FAITHFUL:.0%}"
        )
        mean, most = (shown(error, ".2g") for error in (r["error_mean"], v["error_p99"]))
        verdict = "**Pays.**" if v["pays"] else f"**Does not pay**: {why}."
        lines.append(
            f"- {v['context']:,} tokens, {escape(v['order'])}: **{percent(v['skipped'])}** of {r['tiles']:.1f} tiles "
            f"skipped (oracle, whole output: {percent(r['whole']['skipped_shared'])}; known end: "
            f"{percent(r['skipped_oracle_shared'])}), relative error {mean} in the mean, {most} at the 99th "
            f"percentile. {verdict}"
        )
    rows = document["needles"] or []
    lines += needle_lines(rows, lambda r: str(r["hits"]))
    return "\n".join([*lines, *(f"- **{escape(note)}.**" for note in unsolved(rows))])


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
    (">offset, median", "offset_median", "+.0f"),
    (">5 %", "offset_p5", "+.0f"),
    (">95 %", "offset_p95", "+.0f"),
)


AGREED = [column[1] for column in AGREEMENT]


def _all_layers(document: dict) -> list[dict]:
    return [r for r in document["rows"] if r["layer"] is None]


def together(document: dict) -> Table:
    return table_of(
        _all_layers(document),
        CONTEXT,
        "order",
        (">heads", "heads", ","),
        (">tiles", "tiles", ".1f"),
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
    return table_of(rows, CONTEXT, "order", LAYER, SKIPPED, WHOLE, *AGREEMENT)


def layers(document: dict) -> Table:
    return table_of(document["rows"], CONTEXT, "order", LAYER, SKIPPED, ORACLE, *AGREEMENT)


def ablations(document: dict) -> Table:
    rows = [r for r in longest(document) if r["varied"] not in SWEPT]
    return table_of(rows, "order", ("rule", "varied"), SKIPPED, ALONE, *ERROR, LARGEST, *AGREEMENT)


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
    rows = [r for r in longest(document) if r["varied"] in SWEPT]
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
    return table_of(rows, *what, *task_columns(rows))
