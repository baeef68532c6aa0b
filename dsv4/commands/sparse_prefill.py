"""`dsv4 sparse-prefill`: the command line of the measurement."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import (
    Backend,
    Device,
    Json,
    Numerics,
    Rows,
    Seed,
    Word,
    counts,
    errors,
    option,
    publish,
    report_in,
)


def sparse_prefill(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory of a GQA model.", show_default=False)],
    context: Annotated[
        Word, option("Contexts in tokens, e.g. 4K,16K; default: 4K,8K,16K as far as the checkpoint goes.")
    ] = None,
    cuts: Annotated[
        Word,
        option("CHUNK,LOCAL,HEAVY, separated by spaces, e.g. '512,64,192 1024,128,384'; default: a grid of twelve."),
    ] = None,
    text: Annotated[
        Path | None, option("UTF-8 text; default: Python's help topics, and this project's own sources.")
    ] = None,
    rows: Rows = 1,
    tail: Annotated[
        int, typer.Option(help="Last tokens of each context that are decoded, reading the whole cache.")
    ] = 256,
    needles: Annotated[int, typer.Option(help="Needles of a context, 0 for none.")] = 20,
    asked_context: Annotated[
        Word, option("Contexts that needles and facts are asked in; default: the first and the last.")
    ] = None,
    in_prompt: Annotated[
        int, typer.Option(help="Needles that are asked in the prompt too, which is read sparsely.")
    ] = 6,
    every: Annotated[int, typer.Option(help="One query in so many has its dense attention looked at.")] = 16,
    numerics: Numerics = "fp32",
    backend: Backend = "auto",
    device: Device = "cpu",
    seed: Seed = 0,
    out: Annotated[Path | None, report_in("sparse_prefill_NAME")] = None,
    as_json: Json = False,
):
    """What reading prompts in chunks and a memory (--prefill-chunks) costs: perplexity, attention mass, needles. Exit
    code 0: measured."""
    from dsv4.probes.measure.fidelity.document import ModelSubject
    from dsv4.probes.measure.recall.plots import MISSING, available
    from dsv4.probes.measure.sparse_prefill import document, markdown, plots
    from dsv4.probes.measure.sparse_prefill.settings import settle, texts
    from dsv4.probes.report.document import slug
    from dsv4.runtime.threads import limited_threads

    contexts, asked = (counts(*pair) for pair in (("--context", context), ("--asked-context", asked_context)))
    errors.print(f"loading {checkpoint.name}")
    subject = ModelSubject(checkpoint, numerics, backend, device)
    settings = settle(subject.model, contexts, cuts, rows, tail, needles, asked, in_prompt, every, seed)
    material = texts(text, checkpoint, subject.config.vocab_size, settings.rows * settings.contexts[-1], seed)
    with limited_threads(subject.config.hidden_size):
        found, maps = document.measured(subject, settings, material, sys.argv, errors.print)
    if not available():
        found["notes"].append(MISSING)
    sys.stdout.write(document.render(found) if as_json else markdown.terminal(found))
    publish(
        out,
        f"sparse_prefill_{slug(checkpoint.resolve().name)}",
        lambda: plots.draw(found, maps),
        lambda files: markdown.render(found, files),
        lambda: document.render(found),
    )
