"""Consoles and progress bars of the command line. Importing it imports no torch."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

UNBOUND = 100_000  # columns: wider than any table


class Terminal(Console):
    """A rich console that prints text unchanged, and leaves a closed pipe to the caller."""

    def __init__(self, stderr: bool = False, width: int | None = None):
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """rich would exit with code 1, which here means findings."""
        raise BrokenPipeError


errors = Terminal(stderr=True)


def wide(stderr: bool = False) -> Terminal:
    """A console for tables: as wide as the terminal, and without a limit for a pipe or a file."""
    stream = sys.stderr if stderr else sys.stdout
    return Terminal(stderr, None if stream.isatty() else UNBOUND)


class Bar:
    """A progress callback, bar(done, total), that draws until it is closed."""

    def __init__(self, progress: Progress | None, label: str):
        self.progress = progress
        self.task = None if progress is None else progress.add_task(label, total=1)

    def __call__(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=done, total=total)

    def close(self) -> None:
        """Clear the bar from the terminal. Text printed after it stays in place."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


@contextmanager
def progress_bar(label: str, unit: str = "bytes", shown: bool = True) -> Iterator[Bar]:
    """A Bar on stderr where that is a terminal that can redraw a line; elsewhere, or if not `shown`, it draws nothing.

    stdout and stderr are not redirected: rich would otherwise capture them and print line by line.
    """
    if not shown or not errors.is_interactive:
        yield Bar(None, label)
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} / {task.total:,.0f} " + unit),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar = Bar(progress, label)
    try:
        progress.start()  # within: Ctrl-C while it draws for the first time must not leave the cursor hidden
        yield bar
    finally:
        bar.close()


def show(text: str) -> None:
    """Text on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(document: dict) -> None:
    """One JSON document on stdout."""
    show(json.dumps(document, ensure_ascii=False, indent=1, default=str) + "\n")
