"""Converting a checkpoint between layouts, tensor by tensor.

No value changes silently. Bytes that already have the wanted format are copied; everything else goes to the wanted
format exactly, or not at all. With `allow_rounding` values are rounded in the official way, and counted.
"""

import hashlib
import json
from pathlib import Path

from dsv4.loaders.config_files import nvfp4_quantization, official_quantization, to_transformers
from dsv4.loaders.converter import Converter, Summary
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import Progress
from dsv4.loaders.load import Inventory
from dsv4.loaders.partial import check_destination
from dsv4.loaders.write import MAX_SHARD_BYTES, write_checkpoint

TARGETS = ("official", "nvfp4", "transformers", "bf16")
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    config,
    allow_rounding: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    leftover: str | None = None,
) -> Summary:
    """Write checkpoint `src` to `dst` in another layout.

    to: 'official' (FP8 + MXFP4), 'nvfp4' (official with NVFP4 backbone experts), 'transformers' (its in-memory names,
    dense bf16), 'bf16' (official names, dense). config: ModelConfig of the source. allow_rounding: round what the
    target cannot hold, and count it. leftover: 'resume' or 'discard' what a killed run left; None refuses. Raises
    CheckpointError or WriteError; nothing half-written stays. The destination, names, shapes and dtypes are checked
    before anything is written.
    """
    if to not in TARGETS:
        raise CheckpointError(f"target layout {to!r} is unknown; expected one of {', '.join(TARGETS)}")
    check_destination(Path(dst), leftover)
    inventory = Inventory.open(src)
    converter = Converter(inventory, config, to, allow_rounding)
    copies = [inventory.path / name for name in COMPANIONS if (inventory.path / name).is_file()]
    write_checkpoint(
        dst,
        converter.planned,
        converter.transformers_value if to == "transformers" else converter.value,
        _documents(inventory.config, config, to),
        copies,
        max_shard_bytes,
        progress,
        leftover,
        _identity(inventory, to, allow_rounding),
        converter.summary,
    )
    return converter.summary


def _identity(inventory: Inventory, to: str, allow_rounding: bool) -> str:
    """What makes two conversions the same: target, choice, and the source's config and files (size and time)."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in inventory.files.shards]
    config = hashlib.sha256(json.dumps(inventory.config, sort_keys=True, default=str).encode()).hexdigest()
    return json.dumps([str(inventory.path.resolve()), to, allow_rounding, config, files])


def _documents(official: dict, config, to: str) -> dict[str, dict]:
    official = official | {"compress_ratios": [*config.compress_ratios, *config.mtp_compress_ratios]}
    plain = {k: v for k, v in official.items() if k not in ("quantization_config", "expert_dtype")}
    if to == "transformers":
        return {"config.json": to_transformers(official)}
    if to == "bf16":
        return {"config.json": plain | {"torch_dtype": "bfloat16"}}
    base = plain | {
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": official_quantization(official),
    }
    if to == "official":
        return {"config.json": base}
    quantization, exporter = nvfp4_quantization(official)
    return {"config.json": base | {"quantization_config": quantization}, "hf_quant_config.json": exporter}


def written_config(official: dict, config, to: str) -> dict:
    """The config.json that `convert` writes for layout `to`, of an official dictionary and its ModelConfig."""
    return _documents(official, config, to)["config.json"]
