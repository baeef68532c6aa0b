"""Products of training: dense weights, differentiable."""

import torch
import torch.nn.functional as F

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.linear import reference
from dsv4.kernels.quantize.training import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat


def linear(x: torch.Tensor, w: PackedWeight, simulate: bool = False) -> torch.Tensor:
    """y = x Wᵀ in the weight's dtype, result in x.dtype. simulate: x goes through FP8 first (also for a dense weight:
    in training a weight is dense, and already rounded to its stored format)."""
    if w.format is not WeightFormat.DENSE:
        raise UnsupportedInput(f"training takes dense weights; found {w.format.value}")
    if simulate:
        x = simulate_fp8_blocks(x, reference.ACTIVATION_BLOCK)
    return F.linear(x.to(w.weight.dtype), w.weight).to(x.dtype)


def grouped_linear(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    N, G, K = x.shape
    weight = w.weight.to(x.dtype).view(G, -1, K)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


grouped_linear.__doc__ = reference.grouped_linear.__doc__
