"""The measurement as tables on a terminal."""

from rich.console import Console

from dsv4.probes.measure.base.tables import show_end, show_table, show_text
from dsv4.probes.measure.fidelity import markdown


def show(document: dict, console: Console) -> None:
    """Variants by context, continuations, all layers' findability, needles, notes."""
    console.print(document["title"])
    show_text(console, document["text"])
    console.print(document["prefill"])
    show_table(console, "agreement, KL, perplexity", *markdown.comparison(document))
    columns, cells = markdown.continuations(document)
    if cells:
        show_table(console, "greedy continuations", columns[:-1], [row[:-1] for row in cells])
    together = document | {"findability": [r for r in document["findability"] if r["layer"] is None]}
    if together["findability"]:
        show_table(
            console, "what the selector keeps of the dense attention, all layers", *markdown.findability(together)
        )
    if document["needles"]:
        show_table(console, "needles", *markdown.needles(document))
    show_end(console, document)
