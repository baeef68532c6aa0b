"""The measurement for people: what was found in a few lines, then every figure, then where it comes from."""

from urllib.parse import quote

from dsv4.probes.report import words
from dsv4.probes.report.markdown import escape, fence, table

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
        f"# {escape(document['title'])}",
        _reading(document),
        _gate(document["gate"]),
        "## By layer and context",
        " ".join(REMARKS.split()),
        *(f"![{escape(title)}]({quote(file)})" for title, file in plots.items()),
    ]
    parts += _figures(document)
    parts += ["## By distance, all CSA layers", _distances(document)]
    if document["needles"]:
        parts += ["## Needles", _needles(document["needles"])]
    if document["notes"]:
        parts += ["## Notes", "\n".join(f"- {escape(note)}" for note in document["notes"])]
    parts += ["## Provenance", fence(document["provenance"]["command"]), _provenance(document)]
    return "\n\n".join(part for part in parts if part) + "\n"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


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


def _gate(gate: dict) -> str:
    said = "; ".join(filter(None, (gate.get("where"), gate.get("note"))))
    row = [
        status(gate["status"]),
        escape(gate["name"]),
        percent(gate.get("measured")),
        f"≥ {percent(gate['threshold'])}",
        percent(gate["chance"]),
        f"{gate['samples']:,}",
        escape(said),
    ]
    return table(["status", "gate", ">measured", ">required", ">chance", ">queries", "note"], [row])


def _figures(document: dict) -> list[str]:
    """A table a context and k."""
    parts, groups = [], {}
    for r in document["rows"]:
        groups.setdefault((r["context"], r["k"]), []).append(r)
    for (context, k), rows in groups.items():
        first = rows[0]
        what_if = "; what-if: the best k of the model's own scores" if first["what_if"] else ""
        parts.append(
            f"**{context:,} tokens, n_comp {first['n_comp']:,}, k = {k}**, {status(first['status'])}, "
            f"{first['queries']:,} queries a layer in {first['texts']} rows of text{what_if}"
        )
        cells = [[layer(r), *(percent(r[key]) for key, _ in COLUMNS), _scale(r)] for r in rows]
        parts.append(table(["layer", *(f">{heading}" for _, heading in COLUMNS), ">score scale"], cells))
    return parts


def _scale(row: dict) -> str:
    return "–" if row["score_scale"] is None else f"{row['score_scale']:.4g}"


def _distances(document: dict) -> str:
    cells = []
    for r in document["rows"]:
        for d in r["by_distance"] if r["layer"] is None else ():
            shares = (percent(d[key]) for key in ("recall_fp32", "attention_mass_share", "attention_mass_kept"))
            cells.append([f"{r['context']:,}", str(r["k"]), f"{d['from']:,}–{d['to']:,}", f"{d['wanted']:,}", *shares])
    return table(
        [
            ">context",
            ">k",
            ">distance (tokens)",
            ">picks of the oracle",
            ">recall of them",
            ">share of the attention mass",
            ">kept of it",
        ],
        cells,
    )


def _needles(needles: dict) -> str:
    rows = [
        [
            escape(r["haystack"]),
            f"{r['context']:,}",
            f"{r['hits']} of {r['trials']}",
            percent(r["share"]),
            percent(r["at_least"]),
        ]
        for r in needles["rows"]
    ]
    about = (
        f"Format: {needles['format']}. At least {needles['beyond']:,} tokens lie between needle and question: "
        "sliding "
        'windows alone reach no further, and "window only", with the compressed branches cut off, '
        "is the control. "
        f"Chance: {needles['chance']}."
    )
    return escape(about) + "\n\n" + table(["haystack", ">tokens", ">found", ">share", ">at least (97.5 %)"], rows)


def _provenance(document: dict) -> str:
    rows = words.flat({"text": document["text"], "settings": document["settings"]} | document["provenance"])
    return table(["", ""], [[escape(key), escape(value)] for key, value in rows if key != "command"])
