"""Rotary frequencies of GQA models: default, linear, llama3 and YaRN.

Pair i of a head rotates by position · f_i; dims i and i + D/2 are a pair (`dsv4.kernels.rotary_rows`).
`dsv4.model.gqa.config` refuses variants that depend on the length of the text (dynamic NTK, LongRoPE): keys in the
cache would have to be rotated again as the text grows.
"""

import math
from dataclasses import dataclass

import torch

from dsv4.kernels.rope import inverse_frequencies

VARIANTS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """kind: one of VARIANTS. `original` is the context that the model was first trained for (llama3, yarn). attention:
    factor of cos and sin (yarn). The other fields are those of config.json; what a variant does not use stays at its
    default."""

    kind: str
    theta: float
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention: float = 1.0


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of cos and sin for a context `factor` times longer: 0.1 · weight · ln(factor) + 1 (Peng et al.
    2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2] in host memory."""
    f = inverse_frequencies(head_dim, rope.theta)  # θ^(−2i/D)
    match rope.kind:
        case "linear":  # positions are divided by the factor (kaiokendev 2023)
            return f / rope.factor
        case "llama3":
            return llama3(f, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original)
        case "yarn":
            return _yarn(f, rope, head_dim)
    return f


def llama3(f: torch.Tensor, factor: float, low: float, high: float, original: int) -> torch.Tensor:
    """Llama 3.1: wavelengths over original/low are stretched by the factor, those under original/high kept, between
    them a ramp."""
    wavelength = 2 * math.pi / f
    ramp = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * f / factor + ramp * f


def _yarn(f: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """YaRN (eq. 17-19): pairs that turn more than beta_fast times within the original context are kept, those that turn
    fewer than beta_slow times are stretched by the factor, between them a ramp over the pairs; truncate: it begins and
    ends at whole pairs."""

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(rope.original / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # a ramp of width 0 would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return f / rope.factor * ramp + f * (1 - ramp)
