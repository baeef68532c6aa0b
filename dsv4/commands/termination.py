"""`dsv4 termination`: the command line of the measurement."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4.commands.console import (
    Backend,
    Device,
    Json,
    Numerics,
    Policies,
    Rows,
    Seed,
    Text,
    Word,
    counts,
    errors,
    option,
    publish,
    report_in,
    show,
)
from dsv4.commands.fidelity import names
from dsv4.errors import InputError


def termination(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint directory: DeepSeek-V4 or a GQA model.", show_default=False)
    ],
    policy: Policies = None,
    budget: Annotated[Word, option("GQA: tokens that a policy keeps, e.g. 1K,4K; default: 2K.")] = None,
    context: Annotated[Word, option("Contexts in tokens, e.g. 2K,16K; default: 2K.")] = None,
    rows: Rows = 1,
    queries: Annotated[int, typer.Option(help="Last queries of each context that are walked.")] = 16,
    needles: Annotated[int, typer.Option(help="Needles a policy, rule, haystack and context, 0 for none.")] = 0,
    needle_context: Annotated[Word, option("Contexts that needles are hidden in; default: those of --context.")] = None,
    tau: Annotated[float, typer.Option(help="Of the rule: most that the probe may move.")] = 1e-5,
    phi: Annotated[float, typer.Option(help="Of the rule: most that it may turn, 1 − cos.")] = 1e-3,
    patience: Annotated[int, typer.Option(help="Of the rule: stable tiles in a row.")] = 5,
    tile: Annotated[
        int | None,
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
    first, beside the policies. Walks are fp64 on the host; needles are asked by the backend as it decodes, on a GPU
    over its splits. Exit code 0: measured."""
    from dsv4.probes.measure.fidelity.document import ModelSubject
    from dsv4.probes.measure.recall.plots import MISSING, available
    from dsv4.probes.measure.recall.text import read_text
    from dsv4.probes.measure.termination import document, markdown, plots
    from dsv4.probes.measure.termination.settings import orders_of, rule_of, settle
    from dsv4.probes.report.document import slug
    from dsv4.probes.report.json_report import dumped
    from dsv4.runtime.threads import limited_threads

    contexts, budgets, further = counts("--context", context), counts("--budget", budget), _numbers(looser)
    errors.print(f"loading {checkpoint.name}")
    subject = ModelSubject(checkpoint, numerics, backend, device)
    model = subject.model
    rule = rule_of(model, tau, phi, patience, tile)
    policies = orders_of(model, names(policy), budgets)
    settings = settle(
        model, contexts, rows, queries, needles, rule, further, counts("--needle-context", needle_context), seed
    )
    material = read_text(
        text, checkpoint, subject.config.vocab_size, settings.rows * max(settings.contexts + settings.asked), seed
    )
    if needles and material.tokenizer is None:
        raise InputError("--needles: the checkpoint has no tokenizer, and needles are sentences; pass --needles 0")
    with limited_threads(subject.config.hidden_size):
        found = document.measured(subject, policies, settings, material, sys.argv, errors.print)
    if not available():
        errors.print(MISSING)
    show(found, as_json, _tables, 160)
    publish(
        out,
        f"termination_{slug(checkpoint.resolve().name)}",
        lambda: plots.draw(found),
        lambda files: markdown.render(found, files),
        lambda: dumped(found),
    )


def _numbers(text: str | None) -> list[float]:
    """'1e-3,1e-2' → [0.001, 0.01]. Raises InputError."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--looser is {text!r}; expected numbers separated by commas, such as 1e-3,1e-2") from None


def _tables(found: dict, console: Console) -> None:
    from dsv4.probes.measure.fidelity.tables import show_table
    from dsv4.probes.measure.termination import markdown

    console.print(found["title"])
    for title, of in (
        ("by order and context", markdown.together),
        ("the bound", markdown.bound),
        ("ablations", markdown.ablations),
    ):
        show_table(console, title, *of(found))
    if found["geometries"]:
        show_table(console, "published keep-sets", *markdown.geometries(found))
    if found["needles"]:
        show_table(console, "needles", *markdown.needles(found))
