"""From a checkpoint directory to a model that runs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.errors import ConfigError, InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.kernels.replacing import replacements_of
from dsv4.loaders.expected import check_extent
from dsv4.loaders.files import DTYPES, Progress
from dsv4.loaders.ledger import LoadLedger
from dsv4.loaders.load import Inventory
from dsv4.model.causal import CausalLM
from dsv4.model.config import ModelConfig
from dsv4.model.deepseek_v4 import Model
from dsv4.model.gqa import load as gqa
from dsv4.model.gqa.choice import NOT_GQA, Attention
from dsv4.model.linear import Storage
from dsv4.model.numerics import Numerics, numerics_named
from dsv4.model.pieces import pieces_of, write_parameters


def load_model(
    path: str | Path,
    numerics: str = "native",
    backend: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    mtp: bool | None = None,
    progress: Progress | None = None,
    device_map: str | None = None,
    max_memory: dict | None = None,
    cache: str = "auto",
    index_cache: str = "auto",
    attention: Attention | None = None,
    kv_memory: HostMemory | None = None,
    kernels: Mapping[str, Any] | None = None,
) -> CausalLM:
    """Load a checkpoint directory strictly: every tensor accounted for, every parameter written once.

    config.json says what it is: a DeepSeek-V4 model (`Model`), or one with grouped-query attention (`GQAModel`).

    numerics: 'fp32', 'native', 'qat' or 'qat:fp32' (see dsv4.model.numerics). backend: 'auto' (see `resolve_backend`),
    'reference', 'cpu', 'triton'. max_context: the default of `new_cache`. mtp: load the MTP block; None means if the
    checkpoint has one. progress(done bytes, total bytes).
    device_map='auto' spreads layers over GPUs, host memory and the checkpoint on disk within `max_memory`
    ({0: bytes, 'cpu': bytes}; see dsv4.model.offload). cache: 'auto' (as activations), 'bf16' or 'fp8', of window rows
    and entries;
    index_cache: 'auto', 'bf16', 'fp8' or 'fp4', of index keys (see `Numerics.with_caches`). attention: what a GQA model
    reads of its cache (None: all of it; may be set later as `model.attention`). kv_memory: what grows with the context
    is in pinned host memory (None: on the device; may be set later as `model.kv_memory`, and holds for caches that are
    made after that). kernels: operation → a function, or its spec as text, to run in its place (`dsv4.kernels.user`).

    The model carries `ledger` (LoadLedger) and `inventory`. Raises CheckpointError, ConfigError,
    InputError, BackendUnavailable or KernelError, each one line.
    """
    kernels = replacements_of(kernels)
    inventory = Inventory.open(path)
    target = resolve_device(device)
    choice = numerics_named(numerics)
    if inventory.family == "gqa":
        gqa.check_choices(choice, mtp, device_map is not None, cache, index_cache)
    elif attention is not None:
        raise InputError(NOT_GQA)
    if kv_memory is not None and device_map is not None:
        raise InputError(
            "--kv-memory host and --device-map were given; caches in host memory belong to layers on one "
            "device: leave out one"
        )
    ran_by = resolve_backend(backend, target, device_map is not None)
    model = plan_model(inventory, choice.with_caches(cache, index_cache), ran_by, mtp, kernels)
    model.ledger.check()
    if max_context is not None and not 0 < max_context <= model.config.max_position_embeddings:
        raise InputError(
            f"max_context {max_context} is not within 1 … {model.config.max_position_embeddings}, the checkpoint's "
            "max_position_embeddings"
        )
    model.max_context, model.kv_memory = max_context, kv_memory
    if attention is not None:
        model.attention = attention
    if device_map is not None:
        from dsv4.model.offload import spread  # accelerate is slow to import

        return spread(model, device_map, max_memory, target, progress)
    model.to_empty(device=target)
    model.device = target
    write_parameters(model, pieces_of(model), progress)
    if inventory.family == "gqa":
        gqa.check_copies(inventory)
    else:
        inventory.check_tied()
    return model


def plan_model(
    inventory: Inventory, numerics: Numerics, backend: str, mtp: bool | None, kernels: Mapping[str, Any] | None = None
) -> CausalLM:
    """The model on the meta device, its ledger held against the checkpoint's headers (not yet checked)."""
    if inventory.family == "gqa":
        return gqa.plan_model(inventory, numerics, backend, kernels)
    config = ModelConfig.from_official(inventory.config)
    check_extent(inventory.sources, config)
    if mtp is None:
        mtp = bool(config.num_mtp_layers and inventory.mtp_blocks)
    elif mtp and inventory.mtp_blocks < max(1, config.num_mtp_layers):
        raise ConfigError(
            f"MTP was asked for; the checkpoint holds {inventory.mtp_blocks} MTP blocks"
            + (" (its mtp.* tensors are DSpark draft stages, which this does not run)" if inventory.has_dspark else "")
        )
    _check_expert_dtype(inventory)
    try:
        with torch.device("meta"):
            store = lambda name: _storage(inventory, numerics, config, name)
            model = Model(config, numerics, backend, store, mtp, kernels)
    except RuntimeError as error:  # more bytes than 64 bits count
        if "overflow" not in str(error):
            raise
        raise ConfigError(
            f"config.json asks for a tensor that no machine holds ({str(error)[:120]}); correct a width"
        ) from None
    model.inventory, model.ledger = inventory, LoadLedger()
    model.ledger.account(
        pieces_of(model), inventory.sources, dict(model.named_parameters()), lambda name: _reason(name, mtp, inventory)
    )
    return model


def _check_expert_dtype(inventory: Inventory) -> None:
    """Check the format of the routed experts' tensors, if config.json states one."""
    stated = inventory.config.get("expert_dtype")
    found = {inventory.formats[n] for n in inventory.formats if ".ffn.experts." in n}
    allowed = {"fp4": {WeightFormat.MXFP4, WeightFormat.NVFP4}, "fp8": {WeightFormat.FP8}}.get(stated or "")
    if stated is not None and allowed is None:
        raise ConfigError(f"config.json has expert_dtype {stated!r}; expected 'fp4' or 'fp8'")
    if allowed is not None and not found <= allowed:
        raise ConfigError(
            f"expert_dtype is {stated!r} in config.json, the experts in the file are "
            f"{', '.join(sorted(f.value for f in found))}; correct one of them"
        )


def _storage(inventory: Inventory, numerics: Numerics, config: ModelConfig, name: str) -> Storage:
    """The storage of the matrix or vector with this official name."""
    name = re.sub(r"\.experts\.w", ".experts.0.w", name)  # a stack has the format of its first expert
    form = inventory.formats.get(name)
    if form is None or numerics.dense:
        return Storage()  # the ledger reports absent tensors
    if form is WeightFormat.DENSE:
        return Storage(form, DTYPES[inventory.sources[f"{name}.weight"].dtype])
    scale = DTYPES[inventory.sources[f"{name}.scale"].dtype] if form is WeightFormat.FP8 else None
    return Storage(form, scale=scale, block=config.weight_block_size)


def _reason(name: str, mtp: bool, inventory: Inventory) -> str | None:
    """Why a tensor of the file may stay unused."""
    if re.fullmatch(r"mtp\.\d+\.(emb\.tok_emb|embed|head)\.weight", name):
        return "a copy of the main model's embedding or head, which MTP shares"
    if name.startswith("mtp.") and inventory.has_dspark:
        return "DSpark draft stage, which this does not run"
    if name.startswith("mtp.") and not mtp:
        return "MTP is off"
    if name.endswith(".input_scale"):
        return "static activation scale of NVFP4 products; activations here are quantised dynamically or not at all"
    return None


def resolve_device(device: str) -> torch.device:
    """A device that exists. Raises InputError otherwise."""
    try:
        target = torch.device(device)
    except RuntimeError:
        raise InputError(f"device {device!r} is unknown; expected 'cpu', 'cuda' or 'cuda:N'") from None
    if target.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= count:
            raise InputError(
                f"device {device!r} was asked for; this machine has {count} CUDA devices; use --device cpu"
            )
    elif target.type != "cpu":
        raise InputError(f"device {device!r} is not supported; expected 'cpu' or 'cuda'")
    return target


def resolve_backend(backend: str, device: torch.device, spread: bool = False) -> str:
    """The backend that 'auto' means on a device: 'cpu' on a CPU, 'triton' on one GPU of capability 8.0 or later, else
    'reference'.

    spread: whether layers are placed over devices (`device_map`); then steps are not captured. Raises InputError for
    'cpu' on a GPU and for 'triton' on spread layers.
    """
    if backend == "auto":
        if device.type == "cpu":
            return "cpu"
        return "reference" if spread or torch.cuda.get_device_capability(device) < (8, 0) else "triton"
    if backend == "cpu" and device.type != "cpu":
        raise InputError(f"backend 'cpu' was asked for on device {device}; it runs on host memory only")
    if backend == "triton" and spread:
        raise InputError(
            "backend 'triton' was asked for with layers spread over devices; it needs all of them on one GPU: leave "
            "out --device-map, or ask for reference"
        )
    return backend
