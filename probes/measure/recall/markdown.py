"""The measurement for people: what was found in a few lines, then every figure, then where it comes from."""

from dsv4.probes.measure.base.markdown import page, paragraph, pictures, section
from dsv4.probes.measure.base.tables import CONTEXT, FOUND, Table, grouped, percent, table_of
from dsv4.probes.report.markdown import escape, table

COLUMNS = (  # key, heading, how it is shown
    ("chance", "chance"),
    ("recall_fp32", "recall, fp32 oracle"),
    ("recall_matched", "recall, matched oracle"),
    ("clear_share", "share of picks that are no ties"),
    ("score_mass_kept", "score mass kept"),
    ("score_mass_chance", "its chance"),
    ("attention_mass_kept", "attention mass kept"),
    ("attention_mass_best", "best possible"),
    ("attention_mass_chance", "its chance"),
    ("attention_mass_of_entries", "all attention that is on entries"),
    ("overlap", "overlap with the next step"),
)
REMARKS = """Recall counts picks: a missed entry that nobody would have attended to weighs as much as one that holds \
the answer.
Attention mass weighs entries by what a dense attention would have given them, and is the figure to trust where the two
disagree. Chance is what as many entries picked at random would score. A wrong temperature of the scores moves no \
pick: it shows
in the score scale (1 is right) and nowhere else. Formulas: probes/measure/recall/README.md."""


def render(document: dict, plots: dict[str, str]) -> str:
    """plots: title → file name beside the report."""
    parts = [
        _reading(document),
        _gates(document),
        "## By layer and context",
        paragraph(REMARKS),
        *pictures(plots),
        *_figures(document),
        *section("By distance, all CSA layers", _distances(document)),
    ]
    if document["needles"]:
        parts += section("Needles", needles(document["needles"]), _about(document["needles"]))
    return page(document, parts)


def layer(row: dict) -> str:
    return "all CSA" if row["layer"] is None else str(row["layer"])


def status(text: str) -> str:
    return f"**{text}**" if text in ("VACUOUS", "FAIL") else text


def _reading(document: dict) -> str:
    lines = []
    for r in document["rows"]:
        if r["layer"] is not None:
            continue
        marked = " **VACUOUS**: fewer than 8 · k entries." if r["status"] == "VACUOUS" else ""
        setting = (
            f"{r['context']:,} tokens, k = {r['k']}{' (what-if)' if r['what_if'] else ''} of {r['n_comp']:,} entries"
        )
        lines.append(
            f"- {setting}: attention mass kept **{percent(r['attention_mass_kept'])}** (best possible "
            f"{percent(r['attention_mass_best'])}, chance {percent(r['attention_mass_chance'])}); recall "
            f"{percent(r['recall_fp32'])} against the fp32 oracle, {percent(r['recall_matched'])} against the "
            f"quantisation-matched one (chance {percent(r['chance'])}).{marked}"
        )
    for r in (document["needles"] or {"rows": []})["rows"]:
        lines.append(
            f"- {r['context']:,} tokens, needles in {escape(r['haystack'])}: {r['hits']} of {r['trials']} found, at "
            f"least {percent(r['at_least'])}."
        )
    return "\n".join(lines)


def _gates(document: dict) -> str:
    gates = [document[key] for key in ("gate", "gate_exact") if key in document]  # older reports have one
    return table(["status", "gate", ">measured", ">required", ">chance", ">queries", "note"], map(_gate, gates))


def _gate(gate: dict) -> list[str]:
    said = "; ".join(filter(None, (gate.get("where"), gate.get("note"))))
    return [
        status(gate["status"]),
        escape(gate["name"]),
        percent(gate.get("measured")),
        f"≥ {percent(gate['threshold'])}",
        percent(gate["chance"]),
        f"{gate['samples']:,}",
        escape(said),
    ]


def _figures(document: dict) -> list[str]:
    """A table a context and k."""
    parts = []
    for (context, k), rows in grouped(document["rows"], lambda r: (r["context"], r["k"])).items():
        first = rows[0]
        what_if = "; what-if: the best k of the model's own scores" if first["what_if"] else ""
        parts.append(
            f"**{context:,} tokens, n_comp {first['n_comp']:,}, k = {k}**, {status(first['status'])}, "
            f"{first['queries']:,} queries a layer in {first['texts']} rows of text{what_if}"
        )
        shares = [(f">{heading}", key, percent) for key, heading in COLUMNS]
        parts.append(table(*table_of(rows, ("layer", layer), *shares, (">score scale", "score_scale", ".4g"))))
    return parts


def _distances(document: dict) -> Table:
    bins = [r | d for r in document["rows"] if r["layer"] is None for d in r["by_distance"]]
    return table_of(
        bins,
        CONTEXT,
        (">k", "k"),
        (">distance (tokens)", lambda d: f"{d['from']:,}–{d['to']:,}"),
        (">picks of the oracle", "wanted", ","),
        (">recall of them", "recall_fp32", percent),
        (">share of the attention mass", "attention_mass_share", percent),
        (">kept of it", "attention_mass_kept", percent),
    )


def needles(found: dict, context: str = "tokens") -> Table:
    """context: heading of the contexts."""
    return table_of(found["rows"], "haystack", (f">{context}", "context", ","), *FOUND)


def _about(needles: dict) -> str:
    return escape(
        f"Format: {needles['format']}. At least {needles['beyond']:,} tokens lie between needle and question: sliding "
        'windows alone reach no further, and "window only", with the compressed branches cut off, is the control. '
        f"Chance: {needles['chance']}."
    )
