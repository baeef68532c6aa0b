"""The measurement as tables on a terminal."""

import re

from rich.console import Console
from rich.table import Table

from dsv4.probes.measure.fidelity import markdown


def show(document: dict, console: Console) -> None:
    """Variants by context, continuations, all layers' findability, needles, notes."""
    console.print(document["title"])
    console.print(
        f"text: {document['text']['name']}, {document['text']['tokens']:,} tokens, sha256 "
        f"{document['text']['sha256'] or '–'}"
    )
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
    for note in document["notes"]:
        console.print(f"note: {note}")
    console.print(f"{document['seconds']:.0f} s")


def show_table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=len(rows) > 0
        )
    for row in rows:
        table.add_row(*(re.sub(r"\\(.)", r"\1", cell) for cell in row))  # cells are escaped for markdown
    console.print(table)
