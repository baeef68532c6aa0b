"""Tables of figures: made once of a document's rows, drawn in markdown and on a terminal."""

import re
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table as Drawn

from dsv4.probes.report.markdown import escape

Table = tuple[list[str], list[list[str]]]  # headings, '>' before those of a column to the right; rows of escaped cells


def grouped(rows: Iterable[dict], key: Callable[[dict], object]) -> dict:
    """Rows by a key, in the order of its first row."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def table_of(rows: Iterable[dict], *columns: str | tuple) -> Table:
    """columns: (heading, key of a row or function of it, format or function of what that gives), without the last for
    text; a key alone is its own heading. A format shows None as '–'."""
    columns = tuple((column, column) if isinstance(column, str) else column for column in columns)
    return [heading for heading, *_ in columns], [[_cell(row, *how) for _, *how in columns] for row in rows]


def _cell(row: dict, of, how=escape) -> str:
    value = of(row) if callable(of) else row[of]
    return shown(value, how) if isinstance(how, str) else how(value)


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


CONTEXT = (">context", "context", ",")
LAYER = ("layer", "layer", lambda layer: "all" if layer is None else str(layer))
FOUND = (
    (">found", lambda r: f"{r['hits']} of {r['trials']}"),
    (">share", "share", percent),
    (">at least (97.5 %)", "at_least", percent),
)
BOUNDED = (*FOUND, (">at most (97.5 %)", "at_most", percent))
CHANCE = (">chance", "chance", ".1e")
SOLVED = {True: "yes", False: "no: says nothing about the rule", None: "not run"}


def task_columns(rows: Iterable[dict]) -> tuple[tuple, ...]:
    """Columns of rows of `dsv4.probes.measure.base.needles.found` beside what was read: of tasks, what was generated
    comes first."""
    if not any("task" in row for row in rows):
        return BOUNDED
    return (
        (">recall, generated", "recall", percent),
        (">by chance", "chance", ".1e"),
        (">by full attention", "recall_full", percent),
        ("solved by it", "solved", SOLVED.get),
        (">answers found", lambda r: f"{r['answers_found']:,} of {r['answers']:,}"),
        (">whole answers, teacher forced", lambda r: f"{r['hits']} of {r['trials']}"),
        *BOUNDED[1:],
    )


def task_name(rows: Iterable[dict]) -> tuple[str, ...]:
    """The column of the task, if rows have any."""
    return ("task",) if any("task" in row for row in rows) else ()


def together_in_one(settings: dict) -> str:
    """A sentence on single needles that share one context, after another one; empty where each has its own."""
    number = min(settings.get("needles_a_haystack", 1), settings["needles"])
    if number <= 1:
        return ""
    return (
        f" {number} single needles stand in one context and each is asked for by itself, so the others distract from "
        "it. Their trials share that context and are not independent, so the bounds are too narrow."
    )


def needle_lines(rows: Iterable[dict], said: Callable[[dict], str]) -> list[str]:
    """A line of a list a task, haystack and context: what every way of reading found. said: a row of single needles in
    words; of other tasks the recall is."""
    lines = []
    for (task, haystack, context), group in grouped(
        rows, lambda r: (r.get("task"), r["haystack"], r["context"])
    ).items():
        each = "; ".join(f"{escape(r['variant'])}: {said(r) if task is None else percent(r['recall'])}" for r in group)
        what = "needles" if task is None else task
        of = f"of {group[0]['trials']} found" if task is None else f"recall of {group[0]['answers']} answers"
        lines.append(f"- {context:,} tokens, {what} in {escape(haystack)}, {of}: {each}.")
    return lines


def show_table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Drawn(title=f"\n{title}", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=len(rows) > 0
        )
    for row in rows:
        table.add_row(*(re.sub(r"\\(.)", r"\1", cell) for cell in row))  # cells are escaped for markdown
    console.print(table)


def show_text(console: Console, text: dict) -> None:
    console.print(f"text: {text['name']}, {text['tokens']:,} tokens, sha256 {text['sha256'] or '–'}")


def show_end(console: Console, document: dict) -> None:
    for note in document["notes"]:
        console.print(f"note: {note}")
    console.print(f"{document['seconds']:.0f} s")
