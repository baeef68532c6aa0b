"""`dsv4 termination`: the command line of the measurement."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import (
    Backend,
    Checkpoint,
    Device,
    Json,
    Number,
    Numerics,
    Policies,
    Rows,
    Seed,
    Tasks,
    Text,
    Together,
    Word,
    budgets,
    counts,
    names,
    numbers,
    option,
    report_in,
    tasks,
)
from dsv4.commands.measuring import measure
from dsv4.runtime.starting import importing


def termination(
    checkpoint: Checkpoint,
    policy: Policies = None,
    budget: Annotated[
        Word,
        option(
            "GQA: tokens that a policy keeps, e.g. 1K,4K; default: 2K. Of snapkv, pyramidkv also a share of the prompt."
        ),
    ] = None,
    context: Annotated[Word, option("Contexts in tokens, e.g. 2K,16K; default: 2K.")] = None,
    rows: Rows = 1,
    queries: Annotated[int, typer.Option(help="Last queries of each context that are walked.")] = 16,
    needles: Annotated[int, typer.Option(help="Needles a policy, rule, haystack and context, 0 for none.")] = 0,
    needle_context: Annotated[Word, option("Contexts that needles are hidden in; default: those of --context.")] = None,
    asked_tasks: Tasks = None,
    needles_a_haystack: Together = 1,
    tau: Annotated[float, typer.Option(help="Of the rule: most that the probe may move.")] = 1e-5,
    phi: Annotated[float, typer.Option(help="Of the rule: most that it may turn, 1 − cos.")] = 1e-3,
    patience: Annotated[int, typer.Option(help="Of the rule: stable tiles in a row.")] = 5,
    tile: Annotated[
        Number,
        option("Tokens of a tile, a multiple of 64 (default 128); of DeepSeek-V4: rows of a tile (default 16)."),
    ] = None,
    looser: Annotated[Word, option("Further τ that needles are asked under, e.g. 1e-3,1e-2.")] = None,
    text: Text = None,
    numerics: Numerics = "native",
    backend: Backend = "auto",
    device: Device = "cpu",
    seed: Seed = 0,
    out: Annotated[Path | None, report_in("termination_NAME")] = None,
    as_json: Json = False,
):
    """When attention may stop reading: tiles skipped, at what error, probe against oracle; dense attention, newest
    first, beside the policies. Walks are in fp64; needles are asked by the backend as it decodes, on a GPU
    over its splits. Exit code 0: measured."""
    with importing():
        from dsv4.probes.measure.termination.measurement import Termination

    measure(
        Termination,
        checkpoint,
        (numerics, backend, device),
        out=out,
        as_json=as_json,
        reads=(names(policy), budgets(budget)),
        rule=(tau, phi, patience, tile),
        looser=numbers("--looser", looser),
        contexts=counts("--context", context),
        rows=rows,
        queries=queries,
        needles=needles,
        asked=counts("--needle-context", needle_context),
        tasks=tasks(asked_tasks),
        together=needles_a_haystack,
        text=text,
        seed=seed,
    )
