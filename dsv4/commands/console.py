"""Common parts of the measuring commands (`dsv4 recall`, `fidelity`, `termination`, `sparse-prefill`) on the command
line."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.commands.options import BACKENDS, NUMERICS, choice
from dsv4.commands.terminal import Terminal, errors
from dsv4.errors import InputError


def option(about: str, **more):
    return typer.Option(help=about, show_default=False, **more)


def folder(value: Path | None) -> Path | None:
    """Callback of --out: a folder that cannot be written is an error before anything is loaded."""
    from dsv4.outputs import writable

    return writable(value)


def file(value: Path | None) -> Path | None:
    """Callback of --out where it names a file."""
    from dsv4.outputs import writable

    return writable(value, file=True)


Word = str | None
Text = Annotated[Path | None, option("UTF-8 text to read and to hide needles in; default: Python's help topics.")]
Policies = Annotated[
    Word,
    option(
        "GQA: sink-window, page-bound, block-bound, block-mean, separated by commas; default: all, or of "
        "early ends the first three."
    ),
]
Rows = Annotated[int, typer.Option(help="Rows of each text.")]
Numerics = Annotated[str, choice(NUMERICS, "native or fp32; of DeepSeek-V4 qat and qat:fp32 too.")]
Backend = Annotated[str, choice(BACKENDS, "Implementation of the operations.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(help="Of needles, and of random ids.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def report_in(stem: str):
    """The option --out of a measurement whose files are called `stem`."""
    return option(f"Directory for {stem}.md, .json and plots.", callback=folder)


def wide(columns: int) -> Console:
    """stdout for tables: of what goes to a file, nothing is cut off at 80."""
    return Terminal(width=None if sys.stdout.isatty() else columns)


def show(found: dict, as_json: bool, tables: Callable[[dict, Console], None], columns: int) -> None:
    """A measurement on stdout: one JSON document, or its tables."""
    from dsv4.probes.report.json_report import dumped

    if as_json:
        sys.stdout.write(dumped(found))
    else:
        tables(found, wide(columns))


def tell(lines: Iterable[str]) -> None:
    """Lines on stderr."""
    for line in lines:
        errors.print(line)


def publish(
    out: Path | None,
    stem: str,
    draw: Callable[[], dict[str, str]],
    markdown: Callable[[dict[str, str]], str],
    document: Callable[[], str],
) -> None:
    """Write a measurement to `out`, if there is one, as `dsv4.probes.report.files.write_measurement` does, and say so.
    draw() gives the plots, where they can be drawn."""
    from dsv4.probes.measure.recall.plots import available
    from dsv4.probes.report.files import write_measurement

    if out is not None:
        for file in write_measurement(out, stem, draw() if available() else {}, markdown, document()):
            errors.print(f"wrote {file}")


def refuse_idle(used: bool, given: dict, instead: str) -> None:
    """Raises InputError for options without effect: nothing is ignored silently. instead: what to do."""
    idle = [name for name, value in given.items() if value is not None]
    if idle and not used:
        raise InputError(f"{', '.join(idle)} would change nothing of this subject; {instead}")


def counts(name: str, text: str | None) -> list[int] | None:
    """'4096,16K' → [4096, 16384]. Raises InputError."""
    from dsv4.units import parse_count

    if text is None:
        return None
    if not all(part.strip() for part in text.split(",")):
        raise InputError(f"{name} is {text!r}; expected numbers separated by commas, such as 4096,16K")
    return [parse_count(part.strip()) for part in text.split(",")]


@contextmanager
def progress(total: int) -> Iterator[tuple]:
    """(say, advance): a bar on a terminal, lines elsewhere; on stderr."""
    if not errors.is_terminal:
        yield errors.print, lambda tokens: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text), lambda tokens: bar.advance(task, tokens)
