"""Commands about a checkpoint that run no model: inspect, plan, convert. Data goes to stdout, all else to stderr."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.commands.options import (
    LAYOUTS,
    AsJson,
    Cache,
    Checkpoint,
    EmbeddingIn,
    ExpertBudget,
    ExpertsIn,
    IndexCache,
    KVMemory,
    Numerics,
    PlannedRanks,
    Reads,
    ReadTokens,
    Resident,
    Staged,
    choice,
)
from dsv4.commands.terminal import print_json, progress_bar, wide
from dsv4.errors import InputError
from dsv4.loaders.errors import CheckpointError


def inspect(
    checkpoint: Checkpoint,
    as_json: AsJson = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also read every tensor: NaN, table ranges, crc32.")] = False,
):
    """Print the load ledger and the config ledger, without running the model."""
    from dsv4.commands import inspection, tables

    with progress_bar("reading") as reading:
        document = inspection.inspect(checkpoint, verify, reading)
    if as_json:
        print_json(document)
    else:
        tables.inspection(document, wide())
    if problems := document["ledger"]["problems"]:
        raise CheckpointError(
            f"{checkpoint} has {len(problems)} problem{'s' if len(problems) > 1 else ''}, first: {problems[0]}"
        )


def convert(
    src: Checkpoint,
    dst: Annotated[Path, typer.Argument(help="Directory to create.", show_default=False)],
    to: Annotated[str, choice(LAYOUTS, "Layout to write.", show_default=False)],
    allow_rounding: Annotated[
        bool, typer.Option("--allow-rounding", help="Round values that the layout cannot hold, and count them.")
    ] = False,
    max_shard: Annotated[str, typer.Option(help="Largest shard.")] = "5G",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a conversion that was killed, with its verified shards.")
    ] = False,
    discard_partial: Annotated[
        bool, typer.Option("--discard-partial", help="Remove what a killed conversion left, and start anew.")
    ] = False,
    as_json: AsJson = False,
):
    """Write a checkpoint in another layout; nothing half-written stays after a failure."""
    from dsv4.commands import tables
    from dsv4.loaders.config_files import read_config
    from dsv4.loaders.convert import convert as run_convert
    from dsv4.loaders.stopping import stopped_by_signals
    from dsv4.model.config import ModelConfig
    from dsv4.units import count_named

    if resume and discard_partial:
        raise InputError("--resume and --discard-partial were given; one keeps what the other removes: leave out one")
    leftover = "resume" if resume else "discard" if discard_partial else None
    shard_bytes = count_named("--max-shard", max_shard)
    if shard_bytes < 1:
        raise InputError(f"--max-shard is {max_shard}; expected a positive size such as 5G")
    config = ModelConfig.from_official(read_config(src)[0])
    with progress_bar("converting") as progress, stopped_by_signals():
        summary = run_convert(src, dst, to, config, allow_rounding, progress, shard_bytes, leftover)
    document = {"source": str(src), "destination": str(dst), "to": to, **summary.document()}
    if as_json:
        print_json(document)
    else:
        tables.conversion(document, wide())


def plan(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Checkpoint directory, or flash, pro or a GQA geometry (llama-8b …).", show_default=False),
    ],
    max_context: Annotated[
        str | None,
        typer.Option(
            help="Tokens a row: 128K, 1M …; default: the model's max_position_embeddings, at most 1M.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows that run at once.")] = 1,
    max_rewind: Annotated[int, typer.Option(min=0, help="Tokens a row may be rewound.")] = 128,
    numerics: Numerics = "native",
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda or cuda:N of this machine (what is free now), a card by name (h100, h200, b200, a100, "
            "l40s, 4090 …; it need not be here), or a size (80GiB)."
        ),
    ] = "cpu",
    gpus: Annotated[
        int, typer.Option(min=1, max=1024, help="So many of that device; whole layers are spread as --device-map does.")
    ] = 1,
    tensor_parallel_size: PlannedRanks = 1,
    cache: Cache = "auto",
    index_cache: IndexCache = "auto",
    attention: Reads = None,
    attention_tokens: ReadTokens = None,
    kv_memory: KVMemory = "device",
    staged_blocks: Staged = None,
    expert_memory: ExpertsIn = "device",
    resident_experts: Resident = None,
    expert_budget: ExpertBudget = None,
    embedding_memory: EmbeddingIn = "device",
    as_json: AsJson = False,
):
    """Say whether a model fits a device. The first line answers; then come the bytes of the weights and of each cache
    stream, with formulas. Exit code 1 if it does not fit."""
    from dsv4.cache.host_tier.choice import memory_named
    from dsv4.commands import plan_tables
    from dsv4.model.expert_memory import expert_memory_named
    from dsv4.model.gqa.choice import attention_named
    from dsv4.runtime import planning

    reads = attention_named(attention, attention_tokens)
    document = planning.plan(
        checkpoint,
        max_context,
        batch,
        max_rewind,
        numerics,
        device,
        cache,
        index_cache,
        reads,
        memory_named(kv_memory, staged_blocks),
        gpus,
        tensor_parallel_size,
        expert_memory_named(expert_memory, resident_experts, expert_budget),
        embedding_memory,
    )
    if as_json:
        print_json(document)
    else:
        plan_tables.plan(document, wide())
    if not document["fits"]:
        raise typer.Exit(1)
