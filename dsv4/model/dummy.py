"""A published geometry with random weights, made on the device: for kernels and timings without a checkpoint."""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.errors import InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.cuts import Cut
from dsv4.loaders.expected import preset
from dsv4.loaders.files import Progress
from dsv4.model import families, together
from dsv4.model.causal import CausalLM
from dsv4.model.config import ModelConfig
from dsv4.model.expert_memory import ExpertMemory
from dsv4.model.gqa.choice import NOT_GQA, Attention
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.dummy import config_of, planned
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.model.gqa.load import check_choices
from dsv4.model.linear import Matrix
from dsv4.model.load import resolve_backend, resolve_device
from dsv4.model.numerics import numerics_named
from dsv4.model.official import published_model
from dsv4.model.placement import check_embedding_memory, check_expert_memory, place
from dsv4.model.ranks import ALONE, Ranks, here

E4M3_RMS, E2M1_RMS = 0.5, 2.93  # of the random codes below
PIECE = 1 << 28  # bytes that are drawn by one generator, or one row if that is larger


def load_dummy(
    name: str,
    layers: int | None = None,
    numerics: str = "native",
    backend: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    cache: str = "auto",
    index_cache: str = "auto",
    seed: int = 0,
    mtp: bool = False,
    attention: Attention | None = None,
    kv_memory: HostMemory | None = None,
    kernels: Mapping | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    expert_memory: ExpertMemory | None = None,
    embedding_memory: str = "device",
) -> CausalLM:
    """A model of the published configuration 'flash' or 'pro' with its first `layers` layers and random weights; mtp:
    with its MTP block too.

    Or of a GQA geometry (`dsv4.model.gqa.geometries`), with `attention`. Formats are the official ones (FP8 matrices,
    MXFP4 experts); maps have gains near 1. ranks: as `load_model`; each rank holds its parts of the weights that the
    whole model of this seed has on such a device, bit for bit. Other arguments, kv_memory, kernels, expert_memory and
    embedding_memory too, as `load_model`. Raises InputError for a name or number of layers that does not exist, and for
    numbers that so many ranks cannot share.
    """
    ranks, target = here() if ranks is None else ranks, resolve_device(device)
    check_expert_memory(expert_memory, ranks)
    if expert_memory is not None and name in GEOMETRIES:
        raise InputError(f"experts in host memory were asked for, and {name} has no routed experts; leave it out")
    asked = name, layers, numerics, backend, max_context, cache, index_cache, seed, mtp
    model = plan_dummy(
        name, layers, numerics, resolve_backend(backend, target), cache, index_cache, mtp, attention, kernels, ranks
    )
    together.check_alike(ranks, None, "random weights", *asked)
    model.max_context, model.kv_memory = max_context, kv_memory
    check_embedding_memory(embedding_memory, model.config)
    place(model, target, expert_memory, embedding_memory)
    fill_weights(model, seed, together.telling(ranks, progress))
    if model.expert_tier is not None:
        model.expert_tier.start()
    if ranks.group is not None:  # none begins before all have their weights
        ranks.group.exchange("random weights", b"")
    if attention is not None:
        model.attention = attention
    return model


def plan_dummy(
    name: str,
    layers: int | None = None,
    numerics: str = "native",
    backend: str = "triton",
    cache: str = "auto",
    index_cache: str = "auto",
    mtp: bool = False,
    attention: Attention | None = None,
    kernels: Mapping | None = None,
    ranks: Ranks = ALONE,
) -> CausalLM:
    """The model of `load_dummy`, of one of `ranks`, on the device `meta`. Raises InputError as it does."""
    choice = numerics_named(numerics)
    if name in GEOMETRIES:
        check_choices(choice, mtp, cache, index_cache)
        return planned(config_of(name, layers), choice, backend, kernels, ranks)
    if attention is not None and preset(name) is not None:
        raise InputError(NOT_GQA)
    config, choice = _config(name, layers, mtp), choice.with_caches(cache, index_cache)
    return published_model(config, choice, backend, mtp, kernels, ranks)


def dummy_config(name: str, layers: int | None = None) -> ModelConfig | GQAConfig:
    """The configuration of `load_dummy`, without MTP. Raises InputError as it does."""
    return config_of(name, layers) if name in GEOMETRIES else _config(name, layers, False)


def _config(name: str, layers: int | None, mtp: bool) -> ModelConfig:
    """The first `layers` layers of a published configuration (None: all)."""
    raw = preset(name)
    if raw is None:
        raise InputError(f"dummy weights of {name!r} were asked for; expected flash or pro, {' or '.join(GEOMETRIES)}")
    return ModelConfig.from_official(first_layers(name, raw, layers, mtp))


def first_layers(name: str, raw: dict, layers: int | None, mtp: bool) -> dict:
    """The official config `raw`, called `name`, with its first `layers` layers (None: all); mtp: with its MTP blocks.
    Raises InputError for a number of layers that does not exist."""
    total = raw["num_hidden_layers"]
    layers = total if layers is None else layers
    if not 0 < layers <= total:
        raise InputError(f"{layers} layers of {name} were asked for; expected 1 … {total}")
    return raw | {
        "num_hidden_layers": layers,
        "compress_ratios": raw["compress_ratios"][:layers] + raw["compress_ratios"][total:] * mtp,
        "num_nextn_predict_layers": raw["num_nextn_predict_layers"] * mtp,
        "num_hash_layers": min(raw["num_hash_layers"], layers),
    }


@torch.no_grad()
def fill_weights(model: CausalLM, seed: int = 0, progress: Progress | None = None) -> None:
    """Random codes and numbers in every parameter. progress(done bytes, total bytes).

    Each parameter is drawn in pieces of whole rows (of a stack: whole experts) by generators of their own, seeded with
    `seed`, the parameter's name and the piece. A rank draws the pieces that it has a part of, so parts are those of the
    whole model, and what all ranks hold is equal. Pieces are drawn on the model's device, so experts in host memory
    have the bits that they would have there.
    """
    total, done = model.nbytes, 0
    for name, p in model.named_parameters():
        base, _, leaf = name.rpartition(".")
        module = model.get_submodule(base)
        part = partial(_draw, model.device, seed, name, *together.viewed(model, name, p))
        if isinstance(module, Matrix):
            _fill_matrix(module, leaf, p, part)
        elif leaf == "tid2eid":
            part(partial(draw_expert_ids, model.config.n_routed_experts))
        elif leaf == "weight" and p.dim() == 1:
            p.fill_(1.0)
        elif leaf in ("bias", "base", "attn_sink"):
            p.zero_()
        elif leaf == "scale":
            p.fill_(0.3)
        else:  # fn, ape and the weights of router and embedding
            part(partial(_normal, 1.0 if leaf == "ape" or module is model.embed else p.shape[-1] ** -0.5))
        done += p.nbytes
        if progress is not None:
            progress(done, total)


Draw = Callable[[torch.Tensor, torch.Generator], object]


def _fill_matrix(module: Matrix, leaf: str, p: torch.Tensor, part: Callable[[Draw], None]) -> None:
    """The weight of a matrix, or its scales, which give the map a gain near 1; or its bias."""
    form, cut = module.storage.format, module.cut
    K = cut.whole if cut and cut.axis else module.weight.shape[-1] * (2 if form is WeightFormat.MXFP4 else 1)
    if leaf == "bias":
        part(partial(_normal, 0.1))
    elif leaf == "scale":
        p.view(torch.uint8).fill_(scale_byte(K, form is WeightFormat.FP8))
    elif form is WeightFormat.DENSE:
        part(partial(_normal, K**-0.5))
    else:
        part(draw_e4m3 if form is WeightFormat.FP8 else lambda t, g: t.random_(0, 256, generator=g))


def _draw(device: torch.device, seed: int, name: str, p: torch.Tensor, cut: Cut | None, draw: Draw) -> None:
    """Fill p, the part `cut` of the parameter `name`: draw(piece, generator) fills each piece of the whole."""
    if not p.numel():
        return
    codes = p.view(torch.uint8) if p.element_size() == 1 else p
    cut = cut or Cut(0, 0, p.shape[0], p.shape[0])
    whole = cut.of(p.shape)
    first, last = (cut.start, cut.stop) if cut.axis == 0 else (0, whole[0])
    rows = max(1, PIECE // (math.prod(whole[1:]) * p.element_size()))
    for at in range(first // rows * rows, last, rows):
        piece = torch.empty(min(rows, whole[0] - at), *whole[1:], dtype=codes.dtype, device=device)
        draw(piece, generator_of(f"{seed} {name} {at}", device))
        low, high = max(at, first), min(at + len(piece), last)
        mine = piece[low - at : high - at]
        codes[low - first : high - first] = mine if cut.axis == 0 else mine.narrow(cut.axis, cut.start, cut.size)


def generator_of(text: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded with a text."""
    key = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little"))


def scale_byte(K: int, fp8: bool) -> int:
    """E8M0 byte of the scale that gives a map of K random codes, E4M3 or E2M1, a gain near 1."""
    return 127 + round(torch.log2(torch.tensor(K**-0.5 / (E4M3_RMS if fp8 else E2M1_RMS))).item())


def _normal(std: float, t: torch.Tensor, g: torch.Generator) -> None:
    t.normal_(0, std, generator=g)


def draw_e4m3(t: torch.Tensor, g: torch.Generator) -> None:
    """Codes into t uint8: sign, and magnitudes 2^-3 … 2^0: no NaN, no outliers."""
    t.random_(0, 256, generator=g)
    t.copy_((t & 0x80) | (0x20 + (t & 0x7F) % 24))


def draw_expert_ids(E: int, t: torch.Tensor, g: torch.Generator) -> None:
    """Different experts of each token into t [tokens, experts of one]."""
    first = torch.randint(E, (len(t), 1), generator=g, device=t.device)
    t.copy_((first + torch.arange(t.shape[1], device=t.device)) % E)


@torch.no_grad()
def fill_cache(cache: Any, length: int | list[int], seed: int = 0) -> None:
    """Plausible numbers in every buffer, as if each row held `length` tokens (row b length[b])."""
    lengths = [length] * cache.batch if isinstance(length, int) else list(length)
    if len(lengths) != cache.batch:
        raise InputError(f"lengths of {len(lengths)} rows were given for a cache of {cache.batch}")
    families.of(cache.made_for.config).fill_cache(cache, lengths, seed)
