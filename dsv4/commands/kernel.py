"""`dsv4 kernel`: one operation, anybody's kernel."""

import random
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import Json, folder
from dsv4.commands.kernel_list import export, list_kernels, show
from dsv4.commands.kernel_replay import replay
from dsv4.commands.options import choice
from dsv4.commands.terminal import errors, print_json, wide
from dsv4.errors import InputError

SHAPES = ("small", "flash", "pro")
CLAUSE_NAMES = (
    *("gate", "poison", "written", "guard", "inputs", "layout", "empty", "batch", "repeats", "state", "calls"),
    *("streams", "capture", "addresses", "processors", "shared", "sanitizer", "integrity"),
)

kernel_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

for name, function in {"list": list_kernels, "show": show, "export": export, "replay": replay}.items():
    kernel_app.command(name)(function)

Operation = Annotated[str, typer.Argument(help="Operation, as `dsv4 kernel list` names it.", show_default=False)]
Shapes = Annotated[str, choice(SHAPES, "Widths of the model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Seed = Annotated[int | None, typer.Option(help="Of the cases; default: drawn, and printed.", show_default=False)]


Waivers = Annotated[
    Path | None, typer.Option(help="JSON list of {probe, name, where, reason, expires}; probe is a clause.")
]


@kernel_app.command("audit")
def audit(
    operation: Operation,
    kernel: Annotated[
        str,
        typer.Option(
            help="file.py:function, package.module:function, a FlashInfer-Trace Solution (.json), ours, reference, "
            "or an adapter (flash_mla, deep_gemm, sglang, vllm, flashinfer, marlin, humming)."
        ),
    ],
    convention: Annotated[
        str, typer.Option(help="How the kernel takes its arguments: dsv4, or that of an adapter.")
    ] = "dsv4",
    device: Device = "cpu",
    shapes: Shapes = "small",
    accuracy: Annotated[str, typer.Option(help="Accuracy class of the contract; default: its first.")] = "",
    out_arguments: Annotated[
        bool, typer.Option("--out-arguments", help="Results are passed behind the arguments, and written.")
    ] = False,
    clause: Annotated[list[str] | None, choice(CLAUSE_NAMES, "Only this clause, behind the gate.")] = None,
    case: Annotated[str, typer.Option(help="Only cases with this text in their name.", show_default=False)] = "",
    repeats: Annotated[
        int | None, typer.Option(min=2, help="Calls that must give the same bits; default: 1000 on CUDA, 20 elsewhere.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time, e.g. 120s: clauses that would begin later are not run.")
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one answer before the process is ended.")] = 60.0,
    waivers: Waivers = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for audit.md, .json, .xml (JUnit) and .sarif.", callback=folder, show_default=False
        ),
    ] = None,
    as_json: Json = False,
):
    """Ask whether a kernel is right where it matters, and robust. Exit code 0: no finding, 1: findings, 2: it could not
    run."""
    from dsv4.probes.audit import seconds
    from dsv4.probes.kernel_audit.audit import audit_kernel
    from dsv4.probes.kernel_audit.clauses import ORDER
    from dsv4.probes.kernel_audit.document import document, files, finding_line
    from dsv4.probes.kernel_audit.subject import SubjectSpec
    from dsv4.probes.report.files import write_files
    from dsv4.probes.report.provenance import called, command_line, date
    from dsv4.probes.report.waivers import holding

    _available(device)
    spec = SubjectSpec(operation, kernel, device, out_arguments, convention, accuracy)
    only = ORDER if not clause else tuple(n for n in ORDER if n in ("gate", *clause))
    seed, started = random.SystemRandom().randrange(1 << 31) if seed is None else seed, time.time()
    with _progress(len(only)) as said:
        found = audit_kernel(
            *(spec, shapes, seed, seconds(budget) if budget else float("inf"), None, only, None, repeats, said, limit),
            waivers=holding(waivers, errors.print),
            case=case,
        )
    report = document(found, command_line(called(sys.argv)), date(started))
    if out is not None:
        write_files(out, files(found, report))
    if as_json:
        print_json(report)
    else:
        _print(report, [finding_line(c) for c in found.findings])
    raise typer.Exit(_code(found))


def _code(found) -> int:
    """2 where no case ran at all; else 1 with a finding, a vacuous gate among them."""
    gate = [c for c in found.checks if c.part == "gate"]
    if gate and all(c.status.value in ("ERROR", "WARN") for c in gate):
        return 2
    return 0 if found.verdict.startswith("PASS") else 1


def _available(device: str) -> None:
    """Raises InputError for a device that is not there."""
    import torch

    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"--device is {device!r}; expected cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("--device cuda was asked for, and torch sees no CUDA device; use --device cpu")


def _progress(count: int):
    """A context: said(clause) draws where stderr is a terminal, and shows nothing elsewhere."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def shown():
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        how = dict(transient=True, redirect_stdout=False, redirect_stderr=False, disable=not errors.is_terminal)
        with Progress(*columns, console=errors, **how) as bar:
            task = bar.add_task("loading", total=count)
            begun = 0

            def said(name: str) -> None:
                nonlocal begun
                bar.update(task, completed=begun, description=name)
                begun += 1

            yield said

    return shown()


def _print(report: dict, findings: list[str]) -> None:
    """Headline, findings, one row a clause that was asked, one line a reason why others were not."""
    from rich import box
    from rich.table import Table

    from dsv4.probes.kernel_audit.document import MOST, headline, likeness

    console = wide()
    console.print(headline(report))
    if report["looks_like"]:
        console.print(likeness(report))
    for line in findings[:MOST]:
        console.print(f"  {line}")
    if len(findings) > MOST:
        console.print(f"  and {len(findings) - MOST} more, in --out or --json")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("clause", "checks", "findings", "worst, × limit", "weakest canary"):
        table.add_column(name, justify="left" if name == "clause" else "right")
    number, reasons = lambda x: "" if x is None else f"{x:.3g}", {}
    for row in report["clauses"]:
        if row["checks"]:
            cells = row["clause"], str(row["checks"]), str(row["findings"] or ""), number(row["worst"])
            table.add_row(*cells, number(row["power"]))
        else:
            reasons.setdefault(row["not_run"], []).append(row["clause"])
    console.print(table)
    for why, clauses in reasons.items():
        console.print(f"NOT RUN: {', '.join(clauses)}: {why}")
    skipped = set(report["skipped"].values())
    if skipped:
        console.print(f"{len(report['skipped'])} cases not asked for: {'; '.join(sorted(skipped))}")
    console.print(f"seed {report['seed']}")


@kernel_app.command("bench")
def bench(
    operation: Operation,
    kernel: Annotated[
        list[str], typer.Option(help="Kernels, as `dsv4 kernel audit` takes them; the first is the base.")
    ],
    device: Device = "cuda",
    shapes: Shapes = "flash",
    replays: Annotated[int, typer.Option(min=5, help="Replays of each kernel on each row, cold and hot.")] = 30,
    waivers: Waivers = None,
    seed: Seed = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for bench.md and bench.json.", callback=folder, show_default=False)
    ] = None,
    as_json: Json = False,
):
    """Time kernels of one operation beside each other, each only after it was right. Exit code 0: every time is to be
    believed, 1: some are not or a kernel has none, 2: it could not run."""
    from dsv4.probes.kernel_audit.bench import bench_kernels
    from dsv4.probes.kernel_audit.bench_document import document, lines, markdown
    from dsv4.probes.report.files import write_files
    from dsv4.probes.report.provenance import called, command_line, date
    from dsv4.probes.report.waivers import holding

    _available(device)
    seed, started = random.SystemRandom().randrange(1 << 31) if seed is None else seed, time.time()
    with _progress(2 * len(kernel)) as said:
        about = operation, kernel, shapes, device, seed, replays, said
        rows, found, verdicts = bench_kernels(*about, waivers=holding(waivers, errors.print))
    about = command_line(called(sys.argv)), date(started), seed, device
    report = document(operation, shapes, rows, found, verdicts, *about)
    if out is not None:
        from json import dumps

        write_files(
            out, {"bench.md": markdown(report), "bench.json": dumps(report, indent=1, ensure_ascii=False) + "\n"}
        )
    if as_json:
        print_json(report)
    else:
        for line in lines(report):
            wide().print(line)
    raise typer.Exit(0 if all(t.verdict == "right" for row in rows for t in row.times) else 1)


@kernel_app.command("selftest")
def selftest(
    operation: Annotated[str | None, typer.Option(help="Only plants and controls of this operation.")] = None,
    name: Annotated[str | None, typer.Option(help="Only those with this text in their name.")] = None,
    clause: Annotated[str | None, choice(CLAUSE_NAMES, "Only plants that this clause must find.")] = None,
    without: Annotated[
        list[str] | None, choice(CLAUSE_NAMES, "Switch this clause off: its plants go unnoticed.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Audits at once.")] = 1,
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for kernel_selftest.md and .json.", callback=folder, show_default=False),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="A file that keeps results: cut off and called again with it, it goes on."),
    ] = None,
):
    """Plant every known fault of kernels and see that its own clause finds it. Exit code 0: all caught, honest kernels
    green; 1: gaps; 2: it could not run."""
    import json

    from rich.progress import Progress

    from dsv4.probes.journal import Kept
    from dsv4.probes.kernel_audit import selftest as tests
    from dsv4.probes.report.files import write_files
    from dsv4.probes.report.provenance import called, command_line, commit, date

    _available(device)
    of = {"commit": commit()["commit"], "device": device, "without": sorted(without or ())}
    kept = Kept(journal, of)
    what, outcomes, started = tests.chosen(operation, name, clause, device), [], time.time()
    if not what:
        raise InputError("no plant and no control has that operation, name and clause; see: dsv4 kernel list")
    with Progress(console=errors, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("planting", total=len(what))
        kernel = "ours" if device.startswith("cuda") else "reference"
        for outcome in tests.run(what, device, jobs, tuple(without or ()), kernel=kernel, journal=kept):
            outcomes.append(outcome)
            bar.update(task, advance=1)
            if not bar.console.is_terminal:
                told = f"{len(outcomes):4} of {len(what)}  {outcome.verdict:8} {outcome.seconds:5.1f} s"
                errors.print(f"{told}  {outcome.operation}: {outcome.name}")
    found = tests.document(outcomes)
    if out is not None:
        found = {"about": tests.about(command_line(called(sys.argv)), date(started), device)} | found
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        write_files(out, {"kernel_selftest.md": tests.markdown(found), "kernel_selftest.json": text})
    console = wide()
    for row in found["clauses"]:
        if row["plants"]:
            console.print(
                f"{row['clause']:10} {row['caught']} of {row['plants']} plants, {row['by it alone']} by it alone"
            )
    green = sum(o.verdict == "green" for o in outcomes)
    console.print(f"{green} of {found['controls']} controls green")
    for gap in found["gaps"]:
        console.print(gap)
    raise typer.Exit(1 if found["gaps"] else 0)
