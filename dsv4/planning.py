"""`dsv4 plan`: what fits where."""

from dataclasses import asdict
from pathlib import Path

from dsv4.config import ModelConfig
from dsv4.errors import InputError
from dsv4.load import resolve_device
from dsv4.memory import Plan, cache_rows, free_bytes, parse_count, weight_rows
from dsv4.numerics import numerics_named
from loaders.expected import official_tensors, preset
from loaders.load import Inventory


def plan(checkpoint: str, max_context: str, batch: int, max_rewind: int, numerics: str, device: str, cache: str = "auto",
         index_cache: str = "auto") -> dict:
    """Bytes of weights and caches, their formulas, and whether they fit, as JSON values.

    checkpoint: a directory, or 'flash' or 'pro' (the published configurations, official formats). Raises InputError
    when max_context exceeds the checkpoint's, never clamps it.
    """
    target, choice, context = resolve_device(device), numerics_named(numerics).with_caches(cache, index_cache), parse_count(max_context)
    official = preset(checkpoint) if not Path(checkpoint).is_dir() else None
    if official is not None:
        config = ModelConfig.from_official(official)
        mtp, tensors = True, official_tensors(config)
    else:
        inventory = Inventory.open(checkpoint)
        config = ModelConfig.from_official(inventory.config)
        mtp = bool(config.num_mtp_layers and inventory.mtp_blocks)
        tensors = {name: (source.dtype, source.shape) for name, source in inventory.sources.items()}
    if context > config.max_position_embeddings:
        raise InputError(f"max_context {context} exceeds the checkpoint's max_position_embeddings {config.max_position_embeddings}; "
                         "ask for at most that")
    if choice.dense:
        tensors = official_tensors(config, mtp, dense="F32", experts="F32")
    rows = [*weight_rows(tensors), *cache_rows(config, batch, context, max_rewind, choice, mtp)]
    sizes, free = Plan(tuple(rows)), free_bytes(target)
    return {"checkpoint": checkpoint, "max_context": context, "batch": batch, "max_rewind": max_rewind, "numerics": numerics,
            "cache": cache, "index_cache": index_cache, "device": device, "rows": [asdict(r) for r in rows], "weights_bytes": sizes.total("weights"),
            "cache_bytes": sizes.total("cache"), "total_bytes": sizes.total(), "free_bytes": free, "fits": sizes.total() <= free}
