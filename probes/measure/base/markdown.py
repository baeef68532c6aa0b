"""A measurement as a page for people: its title, what its room writes, notes, and where it comes from."""

from collections.abc import Iterable, Mapping
from urllib.parse import quote

from dsv4.probes.measure.base.tables import Table
from dsv4.probes.report import words
from dsv4.probes.report.markdown import escape, fence, table


def page(document: dict, parts: Iterable[str]) -> str:
    """parts: paragraphs, headings and tables; empty ones are left out."""
    notes = "\n".join(f"- {escape(note)}" for note in document.get("notes", ()))
    read = "text" if "text" in document else "texts"
    rows = words.flat({key: document[key] for key in (read, "settings")} | document["provenance"])
    whole = [
        f"# {escape(document['title'])}",
        *parts,
        *(["## Notes", notes] if notes else []),
        "## Provenance",
        fence(document["provenance"]["command"]),
        table(["", ""], [[escape(key), escape(value)] for key, value in rows if key != "command"]),
    ]
    return "\n\n".join(part for part in whole if part) + "\n"


def section(title: str, rows: Table, *about: str) -> list[str]:
    """A heading, paragraphs, and a table."""
    return [f"## {title}", *about, table(*rows)]


def pictures(plots: Mapping[str, str]) -> list[str]:
    """plots: title → file name beside the report."""
    return [f"![{escape(title)}]({quote(file)})" for title, file in plots.items()]


def paragraph(text: str) -> str:
    """A text that the source breaks into lines, as one line."""
    return " ".join(text.split())
