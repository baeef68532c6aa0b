"""Where parameters get their memory: on the device, or in pinned host memory what was asked to be there."""

from typing import Any

import torch
from torch import nn

from dsv4.cache.cache import DEFAULT_MAX_REWIND
from dsv4.errors import InputError
from dsv4.model import families
from dsv4.model.causal import CausalLM
from dsv4.model.expert_memory import LONGEST, NAMES, RESERVE, ExpertMemory, resident_experts
from dsv4.model.family import Asking
from dsv4.model.host_experts import new_tier, sizes_of
from dsv4.model.module import give_memory
from dsv4.model.moe import Experts
from dsv4.model.ranks import Ranks


def check_expert_memory(choice: ExpertMemory | None, ranks: Ranks, device_map: Any = None) -> None:
    """Raises InputError where experts in host memory are asked for with what they do not go with."""
    others = {"--tensor-parallel-size": ranks.size > 1, "--device-map": device_map is not None}
    for option in [name for name, given in others.items() if given and choice is not None]:
        raise InputError(
            f"--expert-memory host and {option} were given; slots of experts are on one device, which runs all layers: "
            "leave out one"
        )


def check_embedding_memory(where: str, config: Any, device_map: Any = None) -> None:
    """Raises InputError for an embedding in host memory with layers spread over devices, and for one that the head
    reads whole in every step; and for an unknown place."""
    if where not in NAMES:
        raise InputError(f"--embedding-memory {where!r} is unknown; expected {' or '.join(NAMES)}")
    if where == "host" and device_map is not None:
        raise InputError(
            "--embedding-memory host and --device-map were given; the embedding is read by one device, which runs all "
            "layers: leave out one"
        )
    if where == "host" and getattr(config, "tie_word_embeddings", False):
        raise InputError(
            "--embedding-memory host was given, and the head is tied to the embedding (tie_word_embeddings), which a "
            "step then reads whole; expected a head of its own: leave the option out"
        )


def place(model: CausalLM, home: torch.device, experts: ExpertMemory | None, embedding: str = "device") -> None:
    """Give a model on the meta device its memory: on `home`, except for what was asked to be in host memory.

    experts: of routed experts; their tier becomes `model.expert_tier`. Fill the parameters, then `start` it. embedding:
    'device' or 'host'. Raises as `resident_experts`, and PinnedMemoryError with the bytes if host memory is short.
    """
    model.device, placed = home, set[nn.Module]()
    if embedding == "host" and model.embed.part.size:  # a rank may have no part of a short vocabulary
        model.embed.to_host(home)
        placed.add(model.embed)
    if experts is not None:
        sizes = sizes_of(model, getattr(model.config, "num_experts_per_tok", 0))
        by_room = experts.resident is None and experts.budget is None
        slots = resident_experts(experts, sizes, expert_room(model, experts, home) if by_room else None)
        model.expert_tier = new_tier(model, home, slots, sizes)
        placed |= {matrix for m in model.modules() if isinstance(m, Experts) for matrix in (m.w13, m.w2)}
    for module in model.modules():
        if module not in placed:
            give_memory(module, home, recurse=False)


def expert_room(model: CausalLM, choice: ExpertMemory, device: torch.device) -> int | None:
    """Bytes of a GPU that a model on the meta device leaves for its routed experts, beside its other weights there, the
    caches that `choice` names and what a step takes; None on a host processor."""
    if device.type != "cuda":
        return None
    config = model.config
    context = choice.context or model.max_context or min(LONGEST, config.max_position_embeddings)
    given = config, model.inventory, model.numerics, choice.rows, context, DEFAULT_MAX_REWIND
    layers, shared = families.of(config).cache_streams(Asking(*given, None, model.kv_memory))
    caches = sum(s.nbytes for s in (*(s for x in layers for s in x.streams), *shared) if s.place != "pinned")
    others = model.nbytes - sizes_of(model, 0).host_bytes - model.embed.host_bytes
    return torch.cuda.mem_get_info(device)[0] - others - caches - RESERVE
