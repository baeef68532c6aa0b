"""A published geometry with random weights, made on the device: for kernels and timings without a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.errors import InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.expected import official_tensors, preset
from dsv4.loaders.files import DTYPES
from dsv4.model import families
from dsv4.model.causal import CausalLM
from dsv4.model.config import ModelConfig
from dsv4.model.deepseek_v4 import Model
from dsv4.model.gqa.choice import NOT_GQA, Attention
from dsv4.model.gqa.dummy import load_gqa_dummy
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.model.gqa.load import check_choices
from dsv4.model.linear import Matrix, Storage
from dsv4.model.load import resolve_backend, resolve_device
from dsv4.model.numerics import numerics_named

E4M3_RMS, E2M1_RMS = 0.5, 2.93  # of the random codes below
BYTES_AT_ONCE = 1 << 28


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
) -> CausalLM:
    """A model of the published configuration 'flash' or 'pro' with its first `layers` layers and random weights; mtp:
    with its MTP block too.

    Or of a GQA geometry (`dsv4.model.gqa.geometries`), with `attention`. Formats are the official ones (FP8 matrices,
    MXFP4 experts); maps have gains near 1. Other arguments, kv_memory and kernels too, as `load_model`. Raises
    InputError for a name or number of layers that does not exist.
    """
    if name in GEOMETRIES:
        check_choices(numerics_named(numerics), mtp, cache, index_cache)
        model = load_gqa_dummy(
            name,
            layers,
            numerics_named(numerics),
            resolve_backend(backend, resolve_device(device)),
            resolve_device(device),
            max_context,
            seed,
            attention,
            kernels,
        )
        model.kv_memory = kv_memory
        return model
    raw = preset(name)
    if raw is None:
        raise InputError(f"dummy weights of {name!r} were asked for; expected flash or pro, {' or '.join(GEOMETRIES)}")
    if attention is not None:
        raise InputError(NOT_GQA)
    total = raw["num_hidden_layers"]
    layers = total if layers is None else layers
    if not 0 < layers <= total:
        raise InputError(f"{layers} layers of {name} were asked for; expected 1 … {total}")
    config = ModelConfig.from_official(
        raw
        | {
            "num_hidden_layers": layers,
            "compress_ratios": raw["compress_ratios"][:layers] + raw["compress_ratios"][total:] * mtp,
            "num_nextn_predict_layers": raw["num_nextn_predict_layers"] * mtp,
            "num_hash_layers": min(raw["num_hash_layers"], layers),
        }
    )
    target, choice = resolve_device(device), numerics_named(numerics).with_caches(cache, index_cache)
    tensors = official_tensors(config)
    with torch.device("meta"):
        model = Model(
            config, choice, resolve_backend(backend, target), lambda n: _storage(tensors, choice.dense, n), mtp, kernels
        )
    model.to_empty(device=target)
    model.device, model.max_context, model.kv_memory = target, max_context, kv_memory
    fill_weights(model, seed)
    return model


def _storage(tensors, dense: bool, name: str) -> Storage:
    name = name.replace(".experts.w", ".experts.0.w")
    dtype, _ = tensors[f"{name}.weight"]
    form = {"F8_E4M3": WeightFormat.FP8, "I8": WeightFormat.MXFP4}.get(dtype, WeightFormat.DENSE)
    if dense:
        return Storage()
    return Storage(form, DTYPES[dtype]) if form is WeightFormat.DENSE else Storage(form, scale=torch.float8_e8m0fnu)


@torch.no_grad()
def fill_weights(model: Model, seed: int = 0) -> None:
    """Random codes and numbers in every parameter, from one generator of the device."""
    g = torch.Generator(model.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Matrix):
            _fill_matrix(module, g)
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "tid2eid":
            E = model.config.n_routed_experts
            p.copy_(
                (
                    torch.randint(E, (p.shape[0], 1), generator=g, device=p.device)
                    + torch.arange(p.shape[1], device=p.device)
                )
                % E
            )
        elif leaf == "weight" and p.dim() == 1:
            p.fill_(1.0)
        elif leaf in ("bias", "base", "attn_sink"):
            p.zero_()
        elif leaf == "scale" and p.dim() == 1:
            p.fill_(0.3)
        elif leaf in ("fn", "ape") or name.endswith(("embed.weight", "gate.weight")):
            p.normal_(0, 1.0 if leaf == "ape" or "embed" in name else p.shape[-1] ** -0.5, generator=g)


def _fill_matrix(module: Matrix, g: torch.Generator) -> None:
    weight, form = module.weight, module.storage.format
    K = weight.shape[-1] * (2 if form is WeightFormat.MXFP4 else 1)
    if form is WeightFormat.DENSE:
        weight.normal_(0, K**-0.5, generator=g)
        return
    codes = weight.view(torch.uint8).flatten()
    for part in codes.split(BYTES_AT_ONCE):
        part.random_(0, 256, generator=g)
        if form is WeightFormat.FP8:  # sign, and magnitudes 2^-3 … 2^0: no NaN, no outliers
            part.copy_((part & 0x80) | (0x20 + (part & 0x7F) % 24))
    rms = E4M3_RMS if form is WeightFormat.FP8 else E2M1_RMS
    module.scale.view(torch.uint8).fill_(127 + round(torch.log2(torch.tensor(K**-0.5 / rms)).item()))


@torch.no_grad()
def fill_cache(cache: Any, length: int | list[int], seed: int = 0) -> None:
    """Plausible numbers in every buffer, as if each row held `length` tokens (row b length[b])."""
    lengths = [length] * cache.batch if isinstance(length, int) else list(length)
    if len(lengths) != cache.batch:
        raise InputError(f"lengths of {len(lengths)} rows were given for a cache of {cache.batch}")
    families.of(cache.made_for.config).fill_cache(cache, lengths, seed)
