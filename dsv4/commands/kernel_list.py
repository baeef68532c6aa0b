"""`dsv4 kernel list`, `show` and `export`: operations with their contracts, on the screen and as trace files.

`dsv4.commands.kernel` registers the commands.
"""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import Json, folder
from dsv4.commands.options import choice
from dsv4.commands.terminal import errors, print_json, wide
from dsv4.errors import InputError

SHAPES = ("small", "flash", "pro")
DIALECTS = ("fib", "sol", "flashinfer")
Shapes = Annotated[str, choice(SHAPES, "Widths of the model.")]


def list_kernels(as_json: Json = False):
    """Every operation that a model runs, its contract, and the kernels that are known for it."""
    from dsv4.probes.kernel_audit.catalogue import operations

    rows = operations()
    if as_json:
        print_json({"operations": rows})
        return
    table = _table("", "operation", "contract", "accuracy classes", "ours", "published")
    for row in rows:
        found = [a["name"] + ("" if a["installed"] else " (not here)") for a in row["published"]]
        contract = "yes" if row["contract"] else "no"
        table.add_row(row["operation"], contract, ", ".join(row["accuracy"]), ", ".join(row["ours"]), ", ".join(found))
    _print(table)


def show(
    operation: Annotated[str, typer.Argument(help="Operation, as `dsv4 kernel list` names it.", show_default=False)],
    format: Annotated[
        str | None, choice(DIALECTS, "Definitions of FlashInfer-Trace in this dialect, as JSON.", show_default=False)
    ] = None,
    shapes: Shapes = "small",
    as_json: Json = False,
):
    """The contract of an operation: inputs, outputs, edges and accuracy; or its definitions of FlashInfer-Trace."""
    from dsv4.probes.kernel_audit import catalogue

    if format is not None:
        definitions, why = catalogue.definitions(operation, shapes, format)
        if not definitions:
            raise InputError(f"{operation} cannot be exported: {next(iter(why), 'it has no case')}")
        for reason, count in why.items():
            errors.print(f"not exported: {count} cases of {operation}: {reason}")
        print_json(definitions)
        return
    found = catalogue.contract(operation, shapes)
    if as_json:
        print_json(found)
    else:
        _contract(found)


def export(
    operations: Annotated[
        list[str] | None, typer.Argument(help="Operations; default: all with a contract.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to create.", show_default=False, callback=folder)] = ...,
    format: Annotated[str, choice(("fib", "sol"), "fib: flashinfer-bench. sol: SOL-ExecBench.")] = "fib",
    shapes: Shapes = "small",
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="JSON report of dsv4 kernel audit with the same shapes and seed: its findings as traces."),
    ] = None,
    as_json: Json = False,
):
    """Write contracts as a data set of FlashInfer-Trace: definitions, every case as a workload, our references as
    Solutions."""
    from dsv4.kernels.widths import WIDTHS
    from dsv4.probes.kernel_audit import catalogue
    from dsv4.probes.kernel_audit.trace.dataset import write_dataset
    from dsv4.probes.kernel_audit.trace.traces import load_reports

    if report and format != "fib":
        raise InputError("--report needs --format fib; SOL-ExecBench has no place for traces")
    chosen = [catalogue.contract_named(name) for name in operations or catalogue.with_contract()]
    reports = load_reports(report or [], shapes, seed)
    made = write_dataset(out, chosen, WIDTHS[shapes], format, seed, errors.print, reports)
    if as_json:
        print_json({"definitions": made.definitions, "not_exported": made.skipped, "traces": made.traces})
        return
    table = _table("", "definition", ">workloads")
    for name, count in made.definitions.items():
        table.add_row(name, str(count))
    _print(table)
    for operation, why in made.skipped.items():
        for reason, count in why.items():
            print(f"not exported: {count} cases of {operation}: {reason}")
    if reports:
        print(f"{made.traces} findings of {len(reports)} reports are traces")


def _contract(found: dict) -> None:
    """The contract as text and tables."""
    print(f"{found['operation']}: {found['about']}")
    if not found["contract"]:
        print(f"It has no contract, so that it cannot be audited or exported. Ours: {', '.join(found['ours'])}.")
        return
    for title in ("inputs", "outputs"):
        table = _table(f"\n{title}, {found['shapes']} shapes", "name", "shape", "dtype", "what")
        for row in found[title]:
            table.add_row(row["name"], _shape(row), row["dtype"], row["about"])
        _print(table)
    print("\nedges")
    for line in found["edges"] or ("none",):
        print(f"  {line}")
    print(f"accuracy: {', '.join(found['accuracy'])}; activations: {', '.join(found['activations'])}")
    print(f"formats: {', '.join(found['formats'])}")
    print(f"work: {found['work']}")
    print(f"ours: {', '.join(found['ours'])}")
    for kernel in found["published"]:
        print(f"published: {kernel['name']}, {'here' if kernel['installed'] else 'not here'}: {kernel['about']}")


def _shape(row: dict) -> str:
    if row["shape"] is None:
        return "a number"
    return "[" + ", ".join(f"{axis} {size}" if size else axis for axis, size in row["shape"]) + "]"


def _table(title: str, *columns: str):
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def _print(table) -> None:
    """A table; where no terminal shows it, without the blanks that fill its last column."""
    console = wide()
    with console.capture() as drawn:
        console.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))
