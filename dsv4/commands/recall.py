"""`dsv4 recall`: the command line of the measurement."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.console import Json, Number, Seed, Text, Word, counts, option, report_in
from dsv4.commands.measuring import measure
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
from dsv4.parallel.ranks_asked import asked
from dsv4.runtime.starting import importing


def recall(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    context: Annotated[
        Word, option("Contexts in tokens, e.g. 4096,16K; default: those with 8·k and 16·k entries.")
    ] = None,
    k: Annotated[
        Word,
        option(
            "Entries to select, e.g. 64,512; default: index_topk. Others are what-ifs: the best of the "
            "model's own scores."
        ),
    ] = None,
    text: Text = None,
    subject: Annotated[str, option("ours (default); transformers: that implementation on the same weights.")] = "ours",
    dump: Annotated[
        Path | None, option("A recorded run (dsv4.probes.subjects.dump), instead of running anything.")
    ] = None,
    numerics: Annotated[Word, choice(NUMERICS, "Of ours; default: native.", show_default=False)] = None,
    backend: Annotated[Word, choice(BACKENDS, "Of ours; default: auto.", show_default=False)] = None,
    kernel: Kernels = None,
    device: Annotated[Word, option("cpu (default), cuda or cuda:N.")] = None,
    tensor_parallel_size: TensorParallel = 1,
    expert_parallel: ByExpert = False,
    cache: Annotated[
        Word, choice(CACHES, "How window rows and entries are held (fp8: with qat); default: auto.", show_default=False)
    ] = None,
    index_cache: Annotated[
        Word,
        choice(INDEX_CACHES, "How index keys are held (fp8, fp4: with qat); default: auto.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of text.")] = 2,
    queries: Annotated[int, typer.Option(help="Last queries of each context that are measured, in each row.")] = 128,
    needles: Annotated[
        Number, option("Needles a haystack and length, 0 for none; default: 100 on a GPU, 20 on a CPU.")
    ] = None,
    seed: Seed = 0,
    vacuous: Annotated[
        bool, typer.Option("--vacuous", help="Measure below 8·k entries too; such rows are VACUOUS.")
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit code 1 if the classic gate fails, 2 if it is VACUOUS.")
    ] = False,
    out: Annotated[Path | None, report_in("recall")] = None,
    as_json: Json = False,
):
    """How much of what matters the indexer selects, layer by layer. Exit code 0: measured; 1: --gate failed; 2: could
    not."""
    spread(tensor_parallel_size)
    with importing():
        from dsv4.probes.measure.recall.measurement import Recall

    if asked() is not None:
        device = joined(device or "cpu", expert_parallel, unhurried=True)
    found = measure(
        Recall,
        checkpoint,
        out=out,
        as_json=as_json,
        dump=dump,
        kind=subject,
        kernel=kernel,
        choices=dict(numerics=numerics, backend=backend, device=device, cache=cache, index_cache=index_cache),
        text=text,
        contexts=counts("--context", context),
        ks=counts("--k", k),
        queries=queries,
        rows=rows,
        needles=needles,
        seed=seed,
        vacuous=vacuous,
    )
    raise typer.Exit({"FAIL": 1, "VACUOUS": 2}.get(found["gate"]["status"], 0) if gate else 0)
