"""`dsv4 sparse-prefill`: the command line of the measurement."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import Backend, Device, Json, Numerics, Rows, Seed, Word, counts, option, report_in
from dsv4.commands.measuring import measure
from dsv4.runtime.starting import importing


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
    with importing():
        from dsv4.probes.measure.sparse_prefill.measurement import SparsePrefill

    measure(
        SparsePrefill,
        checkpoint,
        (numerics, backend, device),
        out=out,
        as_json=as_json,
        text=text,
        contexts=counts("--context", context),
        cuts=cuts,
        rows=rows,
        tail=tail,
        needles=needles,
        asked_contexts=counts("--asked-context", asked_context),
        in_prompt=in_prompt,
        every=every,
        seed=seed,
    )
