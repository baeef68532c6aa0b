"""The measurement as tables on a terminal."""

from rich.console import Console

from dsv4.probes.measure.base.tables import grouped, percent, show_end, show_table, show_text, table_of
from dsv4.probes.measure.recall.markdown import layer, needles

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
    console.print(document["title"])
    show_text(console, document["text"])
    share = lambda value: percent(value).removesuffix(" %")
    shares = [(f">{name}", key, share) for key, name in COLUMNS]
    for (context, k), rows in grouped(document["rows"], lambda r: (r["context"], r["k"])).items():
        first = rows[0]
        title = (
            f"{first['status']}  {context:,} tokens, n_comp {first['n_comp']:,}, k = {k}"
            f"{' (what-if)' if first['what_if'] else ''}, {first['queries']:,} queries a layer"
        )
        cells = table_of(rows, ("layer", layer), *shares, (">scale", "score_scale", ".3f"))
        show_table(console, title, *cells)
    console.print(" ".join(HEADINGS.split()))
    console.print()
    for gate in (document["gate"], document["gate_exact"]):
        required = f"required ≥ {percent(gate['threshold'])}, chance {percent(gate['chance'])}"
        console.print(
            f"{gate['status']}  {gate['name']}: {percent(gate.get('measured'))}, {required}; {gate.get('note', '')}"
        )
    if found := document["needles"]:
        show_table(console, "needles", *needles(found, "context"))
        console.print(
            f"further back than {found['beyond']:,} tokens, as far as windows alone reach; chance {found['chance']}"
        )
    show_end(console, document)
