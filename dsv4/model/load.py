"""From a checkpoint directory to a model that runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.errors import InputError
from dsv4.kernels.replacing import replacements_of
from dsv4.loaders.files import Progress
from dsv4.loaders.load import Inventory
from dsv4.model import families, together
from dsv4.model.causal import CausalLM
from dsv4.model.expert_memory import ExpertMemory
from dsv4.model.families import pieces_of as pieces_of  # old places of these names, until 0.4
from dsv4.model.families import plan_model as plan_model
from dsv4.model.gqa.choice import NOT_GQA, Attention
from dsv4.model.numerics import numerics_named
from dsv4.model.parameters import write_parameters
from dsv4.model.placement import check_embedding_memory, check_expert_memory, place
from dsv4.model.ranks import Ranks, here


def load_model(
    path: str | Path | Inventory,
    numerics: str = "native",
    backend: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    mtp: bool | None = None,
    progress: Progress | None = None,
    device_map: str | Mapping | None = None,
    max_memory: dict | None = None,
    cache: str = "auto",
    index_cache: str = "auto",
    attention: Attention | None = None,
    kv_memory: HostMemory | None = None,
    kernels: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
    expert_memory: ExpertMemory | None = None,
    embedding_memory: str = "device",
) -> CausalLM:
    """Load a checkpoint directory strictly: every tensor accounted for, every parameter written once.

    path: of the directory, or what it was found to hold. config.json says what it is: a DeepSeek-V4 model (`Model`),
    or one with grouped-query attention (`GQAModel`).

    numerics: 'fp32', 'native', 'qat' or 'qat:fp32' (see dsv4.model.numerics). backend: 'auto' (see `resolve_backend`),
    'reference', 'cpu', 'triton'. max_context: the default of `new_cache`. mtp: load the MTP block; None means if the
    checkpoint has one. progress(done bytes, total bytes).
    device_map='auto' spreads layers over GPUs, host memory and the checkpoint on disk within `max_memory`
    ({0: bytes, 'cpu': bytes}; see dsv4.model.offload). cache: 'auto' (as activations), 'bf16' or 'fp8', of window rows
    and entries;
    index_cache: 'auto' or a format's name, of index keys (see `Numerics.with_caches`). attention: what a GQA model
    reads of its cache (None: all of it; may be set later as `model.attention`). kv_memory: what grows with the context
    is in pinned host memory (None: on the device; may be set later as `model.kv_memory`, and holds for caches that are
    made after that). kernels: operation → a function, or its spec as text, to run in its place (`dsv4.kernels.user`).
    ranks: which of several processes this is that hold the model together; each reads its part of every tensor. None:
    what this process is (`dsv4.parallel`). expert_memory: routed experts are in pinned host memory (None: on the
    device). embedding_memory: 'device' or 'host', where the token embedding is; the output is the same.

    The model carries `ledger` (LoadLedger) and `inventory`. Raises CheckpointError, ConfigError,
    InputError, BackendUnavailable or KernelError, each one line.
    """
    kernels, ranks = replacements_of(kernels), here() if ranks is None else ranks
    inventory = path if isinstance(path, Inventory) else Inventory.open(path)
    target = resolve_device(device)
    choice = numerics_named(numerics)
    together.check_alike(ranks, inventory, numerics, backend, cache, index_cache, max_context)
    family = families.of(inventory)
    family.check_choices(choice, mtp, cache, index_cache)
    if attention is not None and not family.takes_attention:
        raise InputError(NOT_GQA)
    if ranks.size > 1 and device_map is not None:
        raise InputError("several ranks and --device-map were given; each rank has one device: leave out one")
    if kv_memory is not None and device_map is not None:
        raise InputError(
            "--kv-memory host and --device-map were given; caches in host memory belong to layers on one "
            "device: leave out one"
        )
    check_expert_memory(expert_memory, ranks, device_map)
    ran_by = resolve_backend(backend, target, device_map is not None)
    model = family.plan(inventory, choice.with_caches(cache, index_cache), ran_by, mtp, kernels, ranks)
    model.ledger.check()
    check_embedding_memory(embedding_memory, model.config, device_map)
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

        spread(model, device_map, max_memory, target, progress)
    else:
        place(model, target, expert_memory, embedding_memory)
        write_parameters(model, family.pieces(model, ""), together.telling(ranks, progress))
        if model.expert_tier is not None:
            model.expert_tier.start()
    family.check_copies(inventory)
    together.check_whole(ranks, model)
    return model


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
