"""How a measuring command runs: settled, measured, shown on stdout, written to a folder."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.commands.terminal import Terminal, errors

if TYPE_CHECKING:
    from dsv4.probes.measure.base.measurement import Measurement


def measure(settled: Callable[..., "Measurement"], *given, out: Path | None, as_json: bool, **options) -> dict:
    """The document of one measurement, after it was shown and written.

    settled(say, *given, **options): the measurement. Raises what it raises, and KernelNotReached for kernels of the
    user's that did not run.
    """
    from dsv4.probes.measure.base import plots
    from dsv4.runtime import user_kernels
    from dsv4.runtime.threads import limited_threads

    work = settled(errors.print, *given, **options)
    with progress(work.tokens) as (say, advance):
        work.open(say)
        for line in user_kernels.before(work.subject.model) if work.kernels else ():
            errors.print(line)
        with limited_threads(work.subject.config.hidden_size):
            found = work.measured(sys.argv, say, advance)
    drawable = plots.available()
    if not drawable and "notes" in found:
        found["notes"].append(plots.MISSING)
    elif not drawable:
        errors.print(plots.MISSING)
    if as_json:
        sys.stdout.write(work.dumped(found))
    else:  # of what goes to a file, nothing is cut off at 80 columns
        work.show(found, Terminal(width=None if sys.stdout.isatty() else work.COLUMNS))
    if out is not None:
        write(work, found, out, work.draw(found) if drawable else {})
    if work.kernels:
        for line in user_kernels.after(work.subject.model):
            errors.print(line)
        user_kernels.check_reached(work.subject.model)
    return found


def write(work: "Measurement", found: dict, out: Path, drawn: dict[str, str]) -> None:
    """All files of a document or none (`dsv4.probes.report.files.write_measurement`), and their names on stderr."""
    from dsv4.probes.report.files import write_measurement

    render = lambda files: work.render(found, files)
    for file in write_measurement(out, work.stem, drawn, render, work.dumped(found)):
        errors.print(f"wrote {file}")


@contextmanager
def progress(total: int | None) -> Iterator[tuple]:
    """(say, advance): a bar on a terminal, lines elsewhere or where `total` is None; on stderr."""
    if total is None or not errors.is_terminal:
        yield errors.print, lambda tokens: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text), lambda tokens: bar.advance(task, tokens)
