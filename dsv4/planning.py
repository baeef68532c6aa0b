"""`dsv4 plan`: what fits where."""

from dataclasses import asdict
from pathlib import Path

import torch

from dsv4.bill.step import FORMULAS, step_parts
from dsv4.config import ModelConfig
from dsv4.errors import InputError
from dsv4.gqa import cache as gqa_cache
from dsv4.gqa.choice import NOT_GQA, Attention
from dsv4.gqa.config import GQAConfig
from dsv4.gqa.load import check_choices
from dsv4.host_tier.choice import HostMemory
from dsv4.host_tier.planning import (
    brought_entries,
    brought_layers,
    check_entries,
    check_grouped,
    entries_plan,
    grouped_plan,
)
from dsv4.kernels.block_choice import dense
from dsv4.load import resolve_device
from dsv4.loaders.expected import official_tensors, preset
from dsv4.loaders.load import Inventory
from dsv4.memory import Plan, Row, cache_rows, free_bytes, parse_count, stream_rows, weight_rows
from dsv4.numerics import Numerics, numerics_named
from dsv4.streams import Stream, cache_streams

LONGEST = 1 << 20  # tokens a row that a plan is for unless told, where the model takes so many


def plan(
    checkpoint: str,
    max_context: str | None,
    batch: int,
    max_rewind: int,
    numerics: str,
    device: str,
    cache: str = "auto",
    index_cache: str = "auto",
    attention: Attention | None = None,
    kv_memory: HostMemory | None = None,
) -> dict:
    """Bytes of weights and caches, their formulas, and whether they fit; what a decode step reads at that context. As
    JSON values.

    checkpoint: a directory, or 'flash' or 'pro' (the published configurations, official formats). max_context: tokens a
    row ('128K'); None:
    what the model takes (max_position_embeddings), at most 1M, and the document says that this was the default.
    attention: of a GQA model, whose policy's summaries are counted. kv_memory: caches in host memory, whose pinned
    bytes are no part of the total on the device. Raises InputError when max_context exceeds the checkpoint's, never
    clamps it; CapacityError for fewer staged blocks than a step reads.
    """
    target, asked, per_token = resolve_device(device), None if max_context is None else parse_count(max_context), None
    inventory = Inventory.open(checkpoint) if Path(checkpoint).is_dir() or preset(checkpoint) is None else None
    grouped = inventory is not None and inventory.family == "gqa"
    if attention is not None and not grouped:
        raise InputError(NOT_GQA)
    config = (GQAConfig.from_dict if grouped else ModelConfig.from_official)(
        inventory.config if inventory else preset(checkpoint)
    )
    context = _context(asked, config)
    choice = numerics_named(numerics)
    if grouped:
        check_choices(choice, None, False, cache, index_cache)
        rows, per_token = _gqa_rows(config, inventory, choice, batch, context, attention, kv_memory)
    else:
        choice = choice.with_caches(cache, index_cache)
        rows = _rows(config, inventory, choice, batch, context, max_rewind, kv_memory)
    read = step_parts(
        config,
        choice,
        held_tensors(config, inventory, choice),
        batch,
        context,
        attention.policy if attention else dense(),
    )
    sizes, free = Plan(tuple(rows)), free_bytes(target)
    here = sizes.total() - sizes.total("pinned")
    return {
        "checkpoint": checkpoint,
        "max_context": context,
        "max_context_default": asked is None,
        "batch": batch,
        "max_rewind": max_rewind,
        "numerics": numerics,
        "cache": cache,
        "index_cache": index_cache,
        "device": device,
        "rows": [asdict(r) for r in rows],
        "weights_bytes": sizes.total("weights"),
        "cache_bytes": sizes.total("cache"),
        "staging_bytes": sizes.total("staging"),
        "total_bytes": here,
        "free_bytes": free,
        "fits": here <= free,
        "pinned_bytes": sizes.total("pinned"),
        "host_free_bytes": free_bytes(torch.device("cpu")),
        "cache_bytes_per_token": per_token,
        "attention": attention.document() if attention else None,
        "step": [
            {"name": name, "nbytes": nbytes, "formula": FORMULAS[name]} for name, nbytes in read.items() if nbytes
        ],
    }


def _rows(
    config: ModelConfig,
    inventory: Inventory | None,
    choice: Numerics,
    batch: int,
    context: int,
    max_rewind: int,
    kv_memory: HostMemory | None,
) -> list[Row]:
    """Of a DeepSeek-V4 checkpoint, or of a published configuration where there is none."""
    mtp = inventory is None or bool(config.num_mtp_layers and inventory.mtp_blocks)
    tensors = held_tensors(config, inventory, choice)
    if kv_memory is None:
        return [*weight_rows(tensors), *cache_rows(config, batch, context, max_rewind, choice, mtp)]
    layers = cache_streams(config, batch, context, max_rewind, choice, mtp)
    check_entries(layers)
    brought = brought_entries(layers)
    plan = entries_plan(layers, config.index_topk, kv_memory.staged)
    return [*weight_rows(tensors), *stream_rows(plan), _shared(brought)]


def _shared(stream: Stream) -> Row:
    """Of a buffer that all layers share."""
    return Row(stream.place, f"all layers: {stream.name}", stream.nbytes, stream.formula)


def _gqa_rows(
    config: GQAConfig,
    inventory: Inventory,
    choice: Numerics,
    batch: int,
    context: int,
    attention: Attention | None,
    kv_memory: HostMemory | None,
) -> tuple[list[Row], dict]:
    """Of a GQA checkpoint; also the bytes of one token's keys and values, with their formula."""
    tensors = held_tensors(config, inventory, choice)
    nbytes, formula = gqa_cache.token_bytes(config, choice)
    policy, rows = attention and attention.policy, weight_rows(tensors)
    if kv_memory is None:
        rows += stream_rows(gqa_cache.cache_streams(config, batch, context, choice, policy))
    else:
        check_grouped(config, policy, kv_memory)
        rows += stream_rows(grouped_plan(config, batch, context, choice, policy, kv_memory.staged))
        rows.append(_shared(brought_layers(config, batch, context, choice)))
    return rows, {"nbytes": nbytes, "formula": formula}


def held_tensors(
    config: ModelConfig | GQAConfig, inventory: Inventory | None, choice: Numerics
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Official name → (dtype, shape) of a checkpoint's tensors as `choice` holds them; without one, of the published
    formats."""
    if isinstance(config, GQAConfig):
        return {
            name: ("F32" if choice.dense else source.dtype, source.shape) for name, source in inventory.sources.items()
        }
    if choice.dense:
        mtp = inventory is None or bool(config.num_mtp_layers and inventory.mtp_blocks)
        return official_tensors(config, mtp, dense="F32", experts="F32")
    return (
        official_tensors(config, True)
        if inventory is None
        else {name: (s.dtype, s.shape) for name, s in inventory.sources.items()}
    )


def _context(asked: int | None, config: ModelConfig | GQAConfig) -> int:
    """Tokens a row: as asked, or what the model takes, at most `LONGEST`. Raises InputError for more than it takes."""
    longest = config.max_position_embeddings
    if asked is not None and asked > longest:
        raise InputError(
            f"max_context {asked} exceeds the checkpoint's max_position_embeddings {longest}; ask for at most that"
        )
    return min(LONGEST, longest) if asked is None else asked
