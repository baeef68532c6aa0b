"""`dsv4 plan`: what fits where."""

from dataclasses import asdict
from pathlib import Path

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cost_model.step import FORMULAS, step_parts
from dsv4.errors import InputError
from dsv4.kernels.block_choice import dense
from dsv4.loaders.expected import preset
from dsv4.loaders.load import Inventory
from dsv4.loaders.write import tensor_bytes
from dsv4.model import families
from dsv4.model.causal import CHUNK
from dsv4.model.config import ModelConfig
from dsv4.model.expert_memory import LONGEST, RESERVE, ExpertMemory, ExpertSizes, resident_experts
from dsv4.model.family import Asking
from dsv4.model.gqa.choice import NOT_GQA, Attention
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.dummy import config_of
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.model.load import resolve_device
from dsv4.model.numerics import Numerics, numerics_named
from dsv4.model.placement import check_embedding_memory
from dsv4.model.ranks import Ranks
from dsv4.runtime.beside import cache_beside
from dsv4.runtime.gpus import Unit, answer, enough, max_memory, memory_limits, named_bytes, shares, split, units
from dsv4.runtime.memory import Plan, Row, free_bytes, stream_rows, weight_rows
from dsv4.runtime.rank_plan import rank_plans, summed
from dsv4.units import count_named, format_bytes

HERE = ("cpu", "cuda")  # devices of this machine; every other name is a card or a size
COUNTED = "counted: weights and caches; not counted: activations of a step and captured graphs"
COUNTED_OF_RANKS = "counted: weights and caches, and an estimate of a step; not counted: captured graphs"
SET_ASIDE_NOTE = "; of a named card 1.25 GiB are set aside for the driver, the CUDA context and kernels, as measured"


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
    gpus: int = 1,
    ranks: int = 1,
    expert_memory: ExpertMemory | None = None,
    embedding_memory: str = "device",
) -> dict:
    """Bytes of weights and caches, their formulas, and whether they fit; what a decode step reads at that context; the
    cache of DeepSeek-V3.2 beside a DeepSeek-V4 model's. As JSON values.

    checkpoint: a directory, or 'flash' or 'pro' (the published configurations, official formats). max_context: tokens a
    row ('128K'); None: what the model takes (max_position_embeddings), at most 1M, and the document says that this was
    the default. attention: of a GQA model, whose policy's summaries are counted. kv_memory: caches in host memory,
    whose pinned bytes are no part of the total on the device. expert_memory: routed experts there, with so many of each
    layer on the device as fit it by default. embedding_memory: 'host' for a token embedding there. device: as
    `capacities_of` takes it.

    gpus: so many of it, over which whole layers are spread. ranks: so many processes with one of it each (host memory
    they share), which hold a part of every layer. "rows" are then of all of them together, "ranks" has each one's, with
    an estimate of what a step allocates, and "step" is rank 0's.

    Raises InputError when max_context exceeds the checkpoint's, never clamps it, and for numbers that so many ranks
    cannot share; CapacityError for fewer staged blocks than a step reads.
    """
    asked = None if max_context is None else count_named("--max-context", max_context)
    if gpus > 1 and ranks > 1:
        raise InputError(
            f"--gpus {gpus} and --tensor-parallel-size {ranks} were given; one spreads whole layers, the other parts "
            "of every layer: leave out one"
        )
    capacities = capacities_of(device, gpus, ranks)
    inventory, config = _asked(checkpoint)
    family = families.of(config)
    if attention is not None and not family.takes_attention:
        raise InputError(NOT_GQA)
    if expert_memory is not None and max(gpus, ranks) > 1:
        raise InputError(
            f"--expert-memory host and {'--gpus' if gpus > 1 else '--tensor-parallel-size'} {max(gpus, ranks)} were "
            "given; slots of experts are on one device, which runs all layers: leave out one"
        )
    check_embedding_memory(embedding_memory, config)
    if gpus > 1 and embedding_memory == "host":
        raise InputError(
            f"--embedding-memory host and --gpus {gpus} were given; the embedding is read by one device, which runs "
            "all layers: leave out one, or ask for --tensor-parallel-size"
        )
    if gpus > 1 and kv_memory is not None:
        raise InputError(
            f"--gpus {gpus} was given; a cache in host memory runs on one device (--device-map does not spread it): "
            "leave it out"
        )
    context = _context(asked, config)
    choice = numerics_named(numerics)
    family.check_choices(choice, None, cache, index_cache)
    choice = choice.with_caches(cache, index_cache)
    asked_of = config, inventory, choice, batch, context, max_rewind, attention, kv_memory
    asking = Asking(*asked_of, embedding_memory=embedding_memory)
    caches, tensors = _cache_rows(asking), held_tensors(config, inventory, choice)
    experts: dict | None = None
    shared = rank_plans(asking, ranks, _cache_rows, CHUNK if device == "cpu" else None) if ranks > 1 else []
    if shared:
        rows, tensors = summed(shared), shared[0].tensors
    elif expert_memory is not None:
        kept, tier = _split_experts(tensors)
        here = device == "cpu"
        set_aside = [] if here else [Row("step", "set aside for a step and captured graphs", RESERVE, f"{RESERVE} B")]
        rows = [*weight_rows(kept, embedding_memory), *caches, *set_aside]
        left = capacities[0] - sum(row.nbytes for row in rows if row.group != "pinned")
        slots = resident_experts(expert_memory, sized := _expert_sizes(tier, config), None if here else left)
        rows += [Row(s.place, s.name, s.nbytes, s.formula) for s in sized.streams(slots)]
        experts = {"resident": slots, "of": sized.experts, "layers": len(sized.each), "expert_bytes": max(sized.each)}
    else:
        rows = [*weight_rows(tensors, embedding_memory), *caches]
    part = family.part_config(config, Ranks(0, ranks))
    read = step_parts(part, choice, tensors, batch, context, attention.policy if attention else dense())
    sizes, of_one = Plan(tuple(rows)), Plan(tuple(caches))
    if shared:
        found = [Unit(f"rank {p.rank}", p.total("weights"), p.total("cache", "staging", "step")) for p in shared]
        parts = [[unit] for unit in found] if len(capacities) > 1 else [found]
    else:
        found = _units(asking)
        if sizes.total("pinned"):
            found = [Unit("everything", sizes.total("weights"), sum(map(sizes.total, ("cache", "staging", "step"))))]
        parts = split(found, capacities)
    return {
        "checkpoint": checkpoint,
        "max_context": context,
        "max_context_default": asked is None,
        "batch": batch,
        "max_rewind": max_rewind,
        "numerics": numerics,
        "cache": cache,
        "index_cache": index_cache,
        "rows": [asdict(r) for r in rows],
        "weights_bytes": sizes.total("weights"),
        "cache_bytes": sizes.total("cache"),
        "staging_bytes": sizes.total("staging"),
        "step_bytes": sizes.total("step"),
        **_verdict(device, capacities, parts, sizes, bool(shared)),
        "experts": experts,
        "tensor_parallel_size": ranks,
        "ranks": [p.document() for p in shared],
        "cache_bytes_per_token": family.token_bytes(config, choice),
        "cache_beside": cache_beside(of_one.total("cache") + of_one.total("pinned"), batch, context)
        if family.succeeds_v32
        else [],
        "attention": attention.document() if attention else None,
        "step": [
            {"name": name, "nbytes": nbytes, "formula": FORMULAS[name]} for name, nbytes in read.items() if nbytes
        ],
    }


def _split_experts(tensors: dict) -> tuple[dict, dict]:
    """Tensors that are no routed experts', and those that are and that a model holds."""
    experts = {name: held for name, held in tensors.items() if ".ffn.experts." in name}
    kept = {name: held for name, held in tensors.items() if name not in experts}
    return kept, {name: held for name, held in experts.items() if not name.endswith(".input_scale")}


def _expert_sizes(tensors: dict, config: ModelConfig | GQAConfig) -> ExpertSizes:
    """Sizes of the routed experts of the file's tensors."""
    layers: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        layer = name.partition(".ffn.experts.")[0]
        layers[layer] = layers.get(layer, 0) + tensor_bytes(dtype, shape)
    E, k = (getattr(config, name, 0) for name in ("n_routed_experts", "num_experts_per_tok"))
    return ExpertSizes(tuple(n // E for n in layers.values()), E, k)


def capacities_of(device: str, gpus: int, ranks: int = 1) -> list[int]:
    """Usable bytes of each of so many devices: what is free now on 'cpu', 'cuda' or 'cuda:N' of this machine, what a
    named card has ('h100'; it need not be here), or a size ('80GiB'). Ranks have one each, or host memory together.
    Raises InputError."""
    if device == "cpu" and gpus > 1:
        raise InputError(f"--gpus {gpus} was given with --device cpu; name the GPUs, for example --device h100")
    count = max(gpus, ranks)
    if device.partition(":")[0] not in HERE:
        return [named_bytes(device)] * count
    if count == 1 or device == "cpu":
        return [free_bytes(resolve_device(device))]
    if device != "cuda":
        option = f"--gpus {gpus}" if gpus > 1 else f"--tensor-parallel-size {ranks}"
        raise InputError(f"{option} was given with --device {device}; expected --device cuda, or a card's name")
    return [free_bytes(resolve_device(f"cuda:{i}")) for i in range(count)]


def _verdict(device: str, capacities: list[int], parts: list[list[Unit]], sizes: Plan, shared: bool) -> dict:
    """Whether it fits, and what each GPU holds: `parts`. Pinned bytes of host memory count if the device is one of this
    machine. shared: by ranks, whose parts are not spread otherwise."""
    found, pinned = [unit for part in parts for unit in part], sizes.total("pinned")
    total, spread = sizes.total() - pinned, len(capacities) > 1 and not shared
    held, here = shares(parts, capacities), device.partition(":")[0] in HERE
    fits, free = all(gpu["left_bytes"] >= 0 for gpu in held), free_bytes(torch.device("cpu"))
    label = f"this machine's {device}" if here else f"{len(capacities)} × {device}"
    more = None if fits or here or shared or len(found) == 1 else enough(found, capacities[0])
    hint = f"; {more} × {device} would hold it" if more else ""
    if shared:
        hint = f"; {format_bytes(sizes.total('step'))} of all are an estimate of a step"
    said = answer(total, held, capacities, label, hint)
    if fits and here and pinned > free:
        fits, said = (
            False,
            f"does not fit: {format_bytes(pinned)} are to be pinned in host memory, which has "
            + (f"{format_bytes(free)} free, {format_bytes(pinned - free)} short"),
        )
    elif pinned:
        said += f"; and {format_bytes(pinned)} pinned in host memory"
    return {
        "answer": said,
        "fits": fits,
        "device": device,
        "total_bytes": total,
        "free_bytes": min(capacities),
        "gpus": held,
        "max_memory": max_memory(memory_limits(parts, capacities)) if fits and spread else None,
        "capacity_note": (COUNTED_OF_RANKS if shared else COUNTED) + ("" if here else SET_ASIDE_NOTE),
        "pinned_bytes": pinned,
        "host_free_bytes": free,
    }


def _asked(checkpoint: str) -> tuple[Inventory | None, ModelConfig | GQAConfig]:
    """A checkpoint and its configuration; of a published one, and of a GQA geometry, the configuration alone."""
    published = None if Path(checkpoint).is_dir() else preset(checkpoint)
    if published is not None:
        return None, ModelConfig.from_official(published)
    if checkpoint in GEOMETRIES and not Path(checkpoint).is_dir():
        return None, config_of(checkpoint)
    inventory = Inventory.open(checkpoint)
    return inventory, families.of(inventory).read_config(inventory.config)


def _units(asking: Asking) -> list[Unit]:
    """Modules of a model that are placed whole, with the caches of their layers."""
    held = held_tensors(asking.config, asking.inventory, asking.numerics)
    layers, _ = families.of(asking.config).cache_streams(asking)
    return units(
        {name: tensor_bytes(dtype, shape) for name, (dtype, shape) in held.items()},
        {layer.label: sum(stream.nbytes for stream in layer.streams) for layer in layers},
    )


def _cache_rows(asking: Asking) -> list[Row]:
    """Rows of caches, of a published configuration without a checkpoint too."""
    layers, shared = families.of(asking.config).cache_streams(asking)
    return [
        *stream_rows(layers),
        *(Row(stream.place, f"all layers: {stream.name}", stream.nbytes, stream.formula) for stream in shared),
    ]


def held_tensors(
    config: ModelConfig | GQAConfig, inventory: Inventory | None, choice: Numerics
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Official name → (dtype, shape) of a checkpoint's tensors as `choice` holds them; without one, of the published
    formats."""
    return families.of(config).held_tensors(config, inventory, choice)


def _context(asked: int | None, config: ModelConfig | GQAConfig) -> int:
    """Tokens a row: as requested, or what the model takes, at most `LONGEST`. Raises InputError for more than it
    takes."""
    longest = config.max_position_embeddings
    if asked is not None and asked < 1:
        raise InputError(f"--max-context is {asked}; expected at least 1")
    if asked is not None and asked > longest:
        raise InputError(
            f"max_context {asked} exceeds the checkpoint's max_position_embeddings {longest}; ask for at most that"
        )
    return min(LONGEST, longest) if asked is None else asked
