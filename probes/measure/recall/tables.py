"""The measurement as tables on a terminal."""

from rich.console import Console
from rich.table import Table

from dsv4.probes.measure.recall.markdown import layer, percent

COLUMNS = (
    ("chance", "chance"),
    ("recall_fp32", "recall"),
    ("recall_matched", "matched"),
    ("score_mass_kept", "score"),
    ("attention_mass_kept", "attn"),
    ("attention_mass_best", "best"),
    ("attention_mass_chance", "chance"),
    ("overlap", "overlap"),
)
HEADINGS = """recall: against the fp32 oracle; matched: against the quantisation-matched one; score, attn: mass of \
scores and of
attention kept, then the best possible attention mass and what chance keeps; overlap: with the next step; scale: of \
the scores,
1 is right; % but for the last"""


def show(document: dict, console: Console) -> None:
    """Settings, a table of layers for each context and k, the gate, needles, notes."""
    text, groups = document["text"], {}
    console.print(document["title"])
    console.print(f"text: {text['name']}, {text['tokens']:,} tokens, sha256 {text['sha256'] or '–'}")
    for r in document["rows"]:
        groups.setdefault((r["context"], r["k"]), []).append(r)
    for (context, k), rows in groups.items():
        first = rows[0]
        table = _table(
            f"\n{first['status']}  {context:,} tokens, n_comp {first['n_comp']:,}, k = {k}"
            f"{' (what-if)' if first['what_if'] else ''}, {first['queries']:,} queries a layer",
            "layer",
            *(f">{name}" for _, name in COLUMNS),
            ">scale",
        )
        for r in rows:
            scale = "–" if r["score_scale"] is None else f"{r['score_scale']:.3f}"
            table.add_row(layer(r), *(percent(r[key]).removesuffix(" %") for key, _ in COLUMNS), scale)
        console.print(table)
    console.print(" ".join(HEADINGS.split()))
    gate = document["gate"]
    required = f"required ≥ {percent(gate['threshold'])}, chance {percent(gate['chance'])}"
    console.print(
        f"\n{gate['status']}  {gate['name']}: {percent(gate.get('measured'))}, {required}; {gate.get('note', '')}"
    )
    if document["needles"]:
        _needles(document["needles"], console)
    for note in document["notes"]:
        console.print(f"note: {note}")
    console.print(f"{document['seconds']:.0f} s")


def _needles(needles: dict, console: Console) -> None:
    table = _table("\nneedles", "haystack", ">context", ">found", ">share", ">at least (97.5 %)")
    for r in needles["rows"]:
        table.add_row(
            r["haystack"],
            f"{r['context']:,}",
            f"{r['hits']} of {r['trials']}",
            percent(r["share"]),
            percent(r["at_least"]),
        )
    console.print(table)
    console.print(
        f"further back than {needles['beyond']:,} tokens, as far as windows alone reach; chance {needles['chance']}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=True)
    return table
