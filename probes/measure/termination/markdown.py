"""The measurement for people: what was found, then every figure, then where it comes from."""

from urllib.parse import quote

from dsv4.probes.measure.recall.markdown import percent
from dsv4.probes.measure.termination.document import FAITHFUL, PAYS, idle
from dsv4.probes.report import words
from dsv4.probes.report.markdown import escape, fence, table

REMARKS = """Walks: the last queries of each context along the exact run, in fp64, so nothing of layers below enters. \
Tiles skipped: those that
no head of a group needs any more, which is what saves bytes. Error: ‖o − o⁽ᵀ⁾‖ / ‖o⁽ᵀ⁾‖ of what comes out, held \
against the same order read
to its end. Oracle: the first tile after which the whole output is within τ and φ of the final one. Agree: the probe \
stops neither before the
oracle nor more than its own wait after it. Definitions, and those of the bound: \
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
        f"# {escape(document['title'])}",
        _reading(document),
        escape(head),
        escape(" ".join(REMARKS.split())),
        *(f"![{escape(title)}]({quote(file)})" for title, file in plots.items()),
        "## By order and context",
        table(*together(document)),
        "## The bound",
        table(*bound(document)),
        "## Ablations, longest context",
        *without_effect(document),
        table(*ablations(document)),
        "## By layer: probe against oracle",
        table(*layers(document)),
        "## Sweeps, longest context",
        table(*sweeps(document)),
    ]
    if document["geometries"]:
        parts += ["## What the rule can skip at most of published keep-sets", table(*geometries(document))]
    if document["needles"]:
        parts += ["## Needles", " ".join(NEEDLES.split()), table(*needles(document))]
    return (
        "\n\n".join([*parts, "## Provenance", fence(document["provenance"]["command"]), _provenance(document)]) + "\n"
    )


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
        lines.append(
            f"- {v['context']:,} tokens, "
            f"{escape(v['order'])}: "
            f"**{percent(v['skipped'])}** of "
            f"{r['tiles']:.1f} tiles skipped (oracle: "
            f"{percent(r['skipped_oracle_shared'])}), "
            f"relative error {number(r['error_mean'])} "
            f"in the mean, {number(v['error_p99'])} at "
            "the 99th percentile. " + ("**Pays.**" if v["pays"] else f"**Does not pay**: {why}.")
        )
    for haystack, context in dict.fromkeys((r["haystack"], r["context"]) for r in document["needles"] or []):
        group = [r for r in document["needles"] if (r["haystack"], r["context"]) == (haystack, context)]
        lines.append(
            f"- {context:,} tokens, needles in {escape(haystack)}, of {group[0]['trials']} found: "
            + "; ".join(f"{escape(r['variant'])}: {r['hits']}" for r in group)
            + "."
        )
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


# ---- tables: (columns, rows of cells), which the terminal shows too -------------------------------


def together(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        ">context",
        "order",
        ">heads",
        ">tiles",
        ">skipped",
        ">each head alone",
        ">oracle",
        ">oracle, alone",
        ">error, mean",
        ">99th percentile",
        ">largest",
    ]
    return columns, [
        [
            f"{r['context']:,}",
            escape(r["order"]),
            f"{r['heads']:,}",
            f"{r['tiles']:.1f}",
            percent(r["skipped"]),
            percent(r["skipped_alone"]),
            percent(r["skipped_oracle_shared"]),
            percent(r["skipped_oracle"]),
            number(r["error_mean"]),
            number(r["error_p99"]),
            number(r["error_max"]),
        ]
        for r in document["rows"]
        if r["layer"] is None
    ]


def bound(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        ">context",
        "order",
        ">heads that stop",
        ">largest error",
        ">bound, median",
        ">largest error / bound",
        ">steady bound, median",
        ">beyond the steady bound",
    ]
    return columns, [
        [
            f"{r['context']:,}",
            escape(r["order"]),
            f"{r['bound_of']:,}",
            number(r["error_alone_max"]),
            number(r["bound_median"]),
            number(r["bound_tight"]),
            number(r["steady_median"]),
            percent(r["steady_broken"]),
        ]
        for r in document["rows"]
        if r["layer"] is None
    ]


def layers(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        ">context",
        "order",
        "layer",
        ">skipped",
        ">oracle",
        ">decided",
        ">agree",
        ">early",
        ">late",
        ">offset, median",
        ">5 %",
        ">95 %",
    ]
    return columns, [
        [
            f"{r['context']:,}",
            escape(r["order"]),
            "all" if r["layer"] is None else str(r["layer"]),
            percent(r["skipped"]),
            percent(r["skipped_oracle_shared"]),
            *_agreement(r),
        ]
        for r in document["rows"]
    ]


def _agreement(r: dict) -> list[str]:
    return [
        *(percent(r[key]) for key in ("decided", "agree", "early", "late")),
        *("–" if r[key] is None else f"{r[key]:+.0f}" for key in ("offset_median", "offset_p5", "offset_p95")),
    ]


def ablations(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "order",
        "rule",
        ">skipped",
        ">each head alone",
        ">error, mean",
        ">99th percentile",
        ">largest",
        ">decided",
        ">agree",
        ">early",
        ">late",
        ">offset, median",
        ">5 %",
        ">95 %",
    ]
    return columns, [
        [
            escape(r["order"]),
            escape(r["varied"]),
            percent(r["skipped"]),
            percent(r["skipped_alone"]),
            number(r["error_mean"]),
            number(r["error_p99"]),
            number(r["error_max"]),
            *_agreement(r),
        ]
        for r in longest(document)
        if r["varied"] not in SWEPT
    ]


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


def sweeps(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "order",
        "swept",
        ">value",
        ">skipped",
        ">each head alone",
        ">oracle",
        ">error, mean",
        ">99th percentile",
        ">early",
    ]
    return columns, [
        [
            escape(r["order"]),
            SWEPT[r["varied"]],
            f"{r[r['varied']]:g}",
            percent(r["skipped"]),
            percent(r["skipped_alone"]),
            percent(r["skipped_oracle_shared"]),
            number(r["error_mean"]),
            number(r["error_p99"]),
            percent(r["early"]),
        ]
        for r in longest(document)
        if r["varied"] in SWEPT
    ]


def longest(document: dict) -> list[dict]:
    most = max(r["context"] for r in document["varied"])
    return [r for r in document["varied"] if r["context"] == most]


def geometries(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = ["keep-set", ">rows of a tile", ">tiles", ">read at least", ">skipped at most"]
    return columns, [
        [escape(g["name"]), str(g["tile"]), str(g["tiles"]), str(g["read_at_least"]), percent(g["skipped_at_most"])]
        for g in document["geometries"]
    ]


def needles(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = ["haystack", ">context", "policy", "rule", ">found", ">share", ">at least (97.5 %)", ">at most (97.5 %)"]
    return columns, [
        [
            escape(r["haystack"]),
            f"{r['context']:,}",
            escape(r["order"]),
            "read to the end" if r["tau"] is None else f"τ = {r['tau']:g}",
            f"{r['hits']} of {r['trials']}",
            percent(r["share"]),
            percent(r["at_least"]),
            percent(r["at_most"]),
        ]
        for r in document["needles"]
    ]


def _provenance(document: dict) -> str:
    rows = words.flat({"text": document["text"], "settings": document["settings"]} | document["provenance"])
    return table(["", ""], [[escape(key), escape(value)] for key, value in rows if key != "command"])
