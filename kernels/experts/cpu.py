"""Experts for a few tokens on a host processor.

Decoding sends one token to k experts. Finding which experts have work, and looping over them,
costs more than their arithmetic, so the k matrices are gathered and multiplied as one batch.
"""

import torch
import torch.nn.functional as F

from dsv4.kernels.experts import reference
from dsv4.kernels.experts.reference import clamped_swiglu
from dsv4.kernels.linear.reference import ACTIVATION_BLOCK
from dsv4.kernels.quantize.kept import dequantised_stack
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat, expert

MAX_PAIRS = 16  # (token, expert) pairs
MAX_GATHERED = 1 << 24  # weights gathered at once


def experts(x, indices, routing, w13: PackedWeight, w2: PackedWeight, limit: float, simulate: bool) -> torch.Tensor:
    N, k = indices.shape
    I2, D = w13.out_features, x.shape[1]
    if N * k > MAX_PAIRS or N * k * I2 * D > MAX_GATHERED:
        return reference.experts(x, indices, routing, w13, w2, limit, simulate)
    # gathered all the same, so that shapes are static: local expert 0, with weight 0
    flat, routing = indices.flatten().clamp(min=0), routing.masked_fill(indices < 0, 0.0)
    inputs = simulate_fp8_blocks(x, ACTIVATION_BLOCK) if simulate else x
    if N == 1:  # one token: its k matrices are one tall matrix
        same = w13.format is WeightFormat.DENSE and w13.weight.dtype is x.dtype
        tall = w13.weight.index_select(0, flat) if same else dequantised_stack(w13, flat)
        y = F.linear(inputs if same else inputs.float(), tall.view(k * I2, D)).view(k, I2).to(x.dtype)
    else:
        y = _products(inputs.repeat_interleave(k, 0), w13, flat)
    h = clamped_swiglu(y[:, : I2 // 2], y[:, I2 // 2 :], limit).mul_(routing.view(-1, 1)).to(x.dtype)
    if simulate:
        h = simulate_fp8_blocks(h, ACTIVATION_BLOCK)
    if N == 1 and w2.weight.dtype is torch.float32 is x.dtype:
        # sums over the k experts
        return torch.addbmm(h[0, 0], w2.weight.index_select(0, flat), h.unsqueeze(-1), beta=0).view(1, D)
    return _products(h, w2, flat).float().view(N, k, D).sum(1)


experts.__doc__ = reference.experts.__doc__


def _products(x: torch.Tensor, w: PackedWeight, index: torch.Tensor) -> torch.Tensor:
    """x [M, K], one matrix of the stack each → [M, O] in x.dtype, accumulated in fp32."""
    if w.format is WeightFormat.DENSE and w.weight.dtype is x.dtype:
        return torch.bmm(expert(w, index).weight, x.unsqueeze(-1)).squeeze(-1)
    return torch.bmm(dequantised_stack(w, index), x.float().unsqueeze(-1)).squeeze(-1).to(x.dtype)
