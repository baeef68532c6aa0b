"""GQA models of well-known widths with random weights, made on the device: for kernels and timings without a
checkpoint.

Contexts are extended to 1M tokens, so that decode at any length can be timed; the output of random weights means
nothing anyway.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

from dsv4.errors import InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.model.gqa.cache import GroupedCache
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.model.gqa.model import GQAModel
from dsv4.model.linear import Storage
from dsv4.model.numerics import Numerics, numerics_named
from dsv4.model.ranks import ALONE, Ranks

LONGEST = 1 << 20


def config_of(name: str, layers: int | None = None) -> GQAConfig:
    """The configuration of the first `layers` layers of a geometry (None: all), with contexts of 1M tokens. Raises
    InputError for a number of layers that it does not have."""
    raw = GEOMETRIES[name]
    total = raw["num_hidden_layers"]
    layers = total if layers is None else layers
    if not 0 < layers <= total:
        raise InputError(f"{layers} layers of {name} were asked for; expected 1 … {total}")
    return GQAConfig.from_dict(raw | {"num_hidden_layers": layers, "max_position_embeddings": LONGEST})


def planned(
    config: GQAConfig, numerics: Numerics, backend: str, kernels: Mapping | None = None, ranks: Ranks = ALONE
) -> GQAModel:
    """The model of one of `ranks` on the meta device: shapes and dtypes without memory, in bf16 (fp32 in numerics of
    that name)."""
    storage = Storage() if numerics.dense else Storage(WeightFormat.DENSE, torch.bfloat16)
    with torch.device("meta"):
        return GQAModel(config, numerics, backend, lambda leaf: storage, kernels, ranks)


@cache
def tensors_of_geometry(name: str, layers: int | None = None) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype as in safetensors, shape) of the weights of the first `layers` layers of a geometry (None: all), as
    `dsv4.model.dummy.load_dummy` makes them in native numerics."""
    return MappingProxyType(tensors_held(planned(config_of(name, layers), numerics_named("native"), "reference")))


def tensors_held(model: GQAModel) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → (dtype as in safetensors, shape) of a model's weights."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    return {name: (names[p.dtype], tuple(p.shape)) for name, p in model.named_parameters()}


@torch.no_grad()
def fill_grouped(cache: GroupedCache, lengths: list[int], seed: int = 0) -> None:
    """Keys and values of unit variance in every slot, as if row b held lengths[b] tokens; summaries, if any, are
    computed from them, and a policy that chooses once does it by random queries."""
    for i, layer in enumerate(cache.layers):
        for held in (layer.keys, layer.values):
            held.normal_(generator=torch.Generator(held.device).manual_seed(seed + i))
    cache.reset()
    cache._main.now, cache._main.high = list(lengths), list(lengths)
    cache.summarise_again()
    for i, layer in enumerate(cache.layers):
        if layer.selection is not None:
            layer.selection.draw(layer.keys, lengths, torch.Generator(layer.keys.device).manual_seed(seed + i))
