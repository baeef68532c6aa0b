"""`dsv4 audit`: the probes' part of the command line."""

from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from dsv4.commands.console import file, folder
from dsv4.commands.options import (
    BACKENDS,
    CACHES,
    INDEX_CACHES,
    NUMERICS,
    ByExpert,
    Kernels,
    TensorParallel,
    choice,
    joined,
    spread,
)
from dsv4.commands.terminal import errors
from dsv4.errors import InputError
from dsv4.runtime.starting import importing

say = errors.print


class RunByDefault(TyperGroup):
    """`dsv4 audit CHECKPOINT …` means `dsv4 audit run CHECKPOINT …`."""

    def parse_args(self, ctx, args):
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


CACHE = choice(CACHES, "Of ours: how window rows and entries are held.")
INDEX_CACHE = choice(INDEX_CACHES, "Of ours: how index keys are held.")
BACKEND = choice((*BACKENDS, "training"), "Implementation of ours. training: whole sequences, by a probe of their own.")
FAIL_ON = choice(("fail", "vacuous", "warn"), "The mildest status that makes exit code 1.")


def audit_commands() -> list[str]:
    """Names of the commands under `dsv4 audit`."""
    return [str(command.name) for command in audit_app.registered_commands]


audit_app = typer.Typer(cls=RunByDefault, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@audit_app.command("run")
def run_audit(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    subject: Annotated[
        str,
        typer.Option(
            help="ours: this project's model; files: the checkpoint alone; transformers: that "
            "implementation on the same weights; FILE.safetensors: a recorded "
            "run; PACKAGE.MODULE:FACTORY: what that function makes of the checkpoint's path."
        ),
    ] = "ours",
    numerics: Annotated[str, choice(NUMERICS, "Of ours and transformers.")] = "fp32",
    backend: Annotated[str, BACKEND] = "auto",
    kernel: Kernels = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    tensor_parallel_size: TensorParallel = 1,
    expert_parallel: ByExpert = False,
    cache: Annotated[str, CACHE] = "auto",
    index_cache: Annotated[str, INDEX_CACHE] = "auto",
    probe: Annotated[list[str] | None, typer.Option(help="Run this probe only; may be given several times.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time, e.g. 60s: probes that would begin later are VACUOUS.")
    ] = None,
    fail_on: Annotated[str, FAIL_ON] = "fail",
    baseline: Annotated[
        Path | None, typer.Option(help="JSON report of before: the summary says what differs from it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the report: summary, page, JSON, JUnit XML and SARIF.", callback=folder),
    ] = None,
):
    """Probe a checkpoint and an implementation of it. Exit code 0: no findings; 1: findings; 2: it could not run."""
    spread(tensor_parallel_size)
    with importing():
        from dsv4.probes import audit
        from dsv4.probes.report import json_report
        from dsv4.probes.result import Status
    from dsv4.runtime.user_kernels import kernels_named

    limit = None if budget is None else audit.seconds(budget)
    names, kernels = probe or [], kernels_named(kernel)
    device = joined(device, expert_parallel, unhurried=True)
    shown = audit.Shown(Status[fail_on.upper()], None if baseline is None else json_report.load(baseline), out)
    raise typer.Exit(
        audit.run(checkpoint, subject, numerics, backend, device, names, limit, shown, say, cache, index_cache, kernels)
    )


@audit_app.command("report")
def report_again(
    report: Annotated[Path, typer.Argument(help="JSON report of dsv4 audit.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for its other formats.", show_default=False, callback=folder)],
    fail_on: Annotated[str, FAIL_ON] = "fail",
    baseline: Annotated[
        Path | None, typer.Option(help="JSON report of before: the summary says what differs from it.")
    ] = None,
):
    """Write the summary, the page, JUnit XML and SARIF of a JSON report again. Nothing is measured; exit codes are
    those of an audit."""
    from dsv4.probes import audit
    from dsv4.probes.report import json_report
    from dsv4.probes.result import Status

    found = json_report.read(json_report.load(report))
    before = None if baseline is None else json_report.load(baseline)
    raise typer.Exit(audit.publish(found, audit.Shown(Status[fail_on.upper()], before, out), report.stem, say))


@audit_app.command("selftest")
def selftest_audit(
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the detection matrix: selftest.md and selftest.json.", callback=folder),
    ] = None,
    section: Annotated[str | None, typer.Option(help="Only this section of the list of known bugs, e.g. 1.3.")] = None,
    name: Annotated[str | None, typer.Option(help="Only mutations with this text in their name.")] = None,
    probe: Annotated[
        str | None, typer.Option(help="Only mutations that this probe should name, and no other probe is asked.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Only the first mutation of each section.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a processor.", show_default=False)
    ] = None,
    backend: Annotated[str, choice(("auto", "cpu", "triton"), "What the faults are planted in.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    journal: Annotated[
        Path | None, typer.Option(help="A file that keeps results: cut off and called again with it, it goes on.")
    ] = None,
):
    """Plant every known bug and see that the probes name it. Exit code 0: all caught, sound subjects green; 1: gaps; 2:
    it could not run."""
    from rich.progress import Progress

    from dsv4.loaders.stopping import stopped_by_signals
    from dsv4.probes.selftest import detection

    shown = Progress(console=errors, transient=True, redirect_stdout=False, redirect_stderr=False)
    with stopped_by_signals(), shown as bar:
        task = bar.add_task("planting")

        def done(result, of):
            bar.update(task, advance=1, total=of)
            if not bar.console.is_terminal:
                say(f"{int(bar.tasks[0].completed):4} of {of}  {detection.result_line(result)}")

        raise typer.Exit(detection.run(out, section, name, fast, jobs, backend, device, say, done, journal, probe))


@audit_app.command("bisect")
def bisect_audit(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    subject: Annotated[
        str, typer.Option(help="ours[:NUMERICS[:BACKEND]], transformers, or FILE.safetensors.")
    ] = "ours",
    reference: Annotated[
        str, typer.Option(help="oracle: float64 from the specification; or another subject.")
    ] = "oracle",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    cache: Annotated[str, CACHE] = "auto",
    index_cache: Annotated[str, INDEX_CACHE] = "auto",
    text: Annotated[Path | None, typer.Option(help="Run on this text instead of random tokens.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="How many tokens; default: enough for every kind of layer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random tokens.")] = 0,
    budget: Annotated[
        str | None, typer.Option(help="Time, e.g. 60s: layers that would begin later are VACUOUS.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the report, with the plot.", callback=folder)] = None,
):
    """Where a subject leaves the reference first, and proof of the cause. Exit code 0: nowhere; 1: found; 2: could not
    run."""
    from dsv4.probes import audit
    from dsv4.probes.blame import bisect_report
    from dsv4.probes.inputs import ids_for

    limit = None if budget is None else audit.seconds(budget)
    ids_of = lambda opened: ids_for(opened, checkpoint, text, tokens, seed)
    raise typer.Exit(
        bisect_report.run(checkpoint, subject, reference, device, ids_of, limit, out, say, cache, index_cache)
    )


@audit_app.command("record")
def record_audit(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file: NAME.safetensors.", show_default=False, callback=file)],
    subject: Annotated[
        str, typer.Option(help="ours[:NUMERICS[:BACKEND]], transformers, or PACKAGE.MODULE:FACTORY.")
    ] = "ours",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    tensor_parallel_size: TensorParallel = 1,
    expert_parallel: ByExpert = False,
    cache: Annotated[str, CACHE] = "auto",
    index_cache: Annotated[str, INDEX_CACHE] = "auto",
    text: Annotated[Path | None, typer.Option(help="Run on this text instead of random tokens.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="How many tokens; default: enough for every kind of layer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random tokens.")] = 0,
    point: Annotated[list[str] | None, typer.Option(help="Record this point only; may be given several times.")] = None,
):
    """Record one run, to be audited or bisected without what made it: `--subject NAME.safetensors`."""
    spread(tensor_parallel_size)
    from dsv4.probes.inputs import ids_for
    from dsv4.probes.subjects import record

    device = joined(device, expert_parallel, unhurried=True)
    ids_of = lambda opened: ids_for(opened, checkpoint, text, tokens, seed)
    raise typer.Exit(record.run(checkpoint, subject, device, ids_of, point or [], out, say, cache, index_cache))


@audit_app.command("conform")
def conform_audit(
    subject: Annotated[str, typer.Argument(help="PACKAGE.MODULE:FACTORY, or another --subject.", show_default=False)],
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    tokens: Annotated[
        int | None, typer.Option(help="How many tokens; default: enough for every kind of layer.")
    ] = None,
):
    """Which capture points and capabilities a subject has, which it lacks, and which probes those would unlock. Exit
    code 0: all that it gives is right; 1: something is not; 2: it could not run."""
    from dsv4.probes.subjects import conform

    raise typer.Exit(conform.run(checkpoint, subject, tokens, typer.echo))


@audit_app.command("import")
def import_audit(
    engine: Annotated[str, typer.Argument(help="Whose files: sglang or vllm.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Folder that the engine dumped one run to.", show_default=False)],
    config: Annotated[Path, typer.Option(help="Checkpoint directory, or its config.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file: NAME.safetensors.", show_default=False, callback=file)],
    ids: Annotated[
        Path | None, typer.Option(help="Token ids of the run, a JSON list; default: the last run of the dump.")
    ] = None,
    rename: Annotated[Path | None, typer.Option(help="TOML table of the engine's names and capture points.")] = None,
    numerics: Annotated[
        str | None, typer.Option(help="How its numbers are held, e.g. bf16, qat; default: by the dumped dtypes.")
    ] = None,
    account: Annotated[
        Path | None, typer.Option(help="Write what became of each file here, as JSON.", callback=file)
    ] = None,
):
    """Make a recorded run of an engine's dump: ranks are joined, steps put in a row, every file is accounted for."""
    from dsv4.probes.subjects.engine_dumps import command

    if engine not in command.ENGINES:
        raise InputError(f"engine {engine!r} is unknown; expected one of {', '.join(command.ENGINES)}")
    raise typer.Exit(command.run(engine, folder, config, ids, rename, out, numerics, account, say))


@audit_app.command("diff")
def diff_audits(
    old: Annotated[Path, typer.Argument(help="JSON report of before.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="JSON report of after.", show_default=False)],
    waivers: Annotated[Path | None, typer.Option(help="JSON list of {probe, name, where, reason, expires}.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the markdown here instead of to stdout.", callback=file)
    ] = None,
):
    """What changed between two audits. Exit code 1: regressions, vanished evidence or expired waivers."""
    from dsv4.probes.report import json_report
    from dsv4.probes.report.difference import difference
    from dsv4.probes.report.files import write_files
    from dsv4.probes.report.waivers import load_waivers

    found = difference(json_report.load(old), json_report.load(new), load_waivers(waivers), date.today())
    if out is None:
        print(found.to_markdown())
    else:
        write_files(out.parent, {out.name: found.to_markdown()})
    raise typer.Exit(found.exit_code)
