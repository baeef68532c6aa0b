"""What the measuring commands (`dsv4 recall`, `dsv4 fidelity`) share on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from dsv4.errors import InputError

errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def option(about: str, **more):
    return typer.Option(help=about, show_default=False, **more)


def refuse_idle(used: bool, given: dict, instead: str) -> None:
    """Raises InputError for options that would not be looked at: nothing is ignored silently. instead: what to do."""
    idle = [name for name, value in given.items() if value is not None]
    if idle and not used:
        raise InputError(f"{', '.join(idle)} would change nothing of this subject; {instead}")


def counts(name: str, text: str | None) -> list[int] | None:
    """'4096,16K' → [4096, 16384]. Raises InputError."""
    from dsv4.memory import parse_count
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
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=errors, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text), lambda tokens: bar.advance(task, tokens)
