"""SwiGLU experts with clamps."""

import torch
import torch.nn.functional as F

from dsv4.kernels.linear.reference import linear
from dsv4.kernels.quantize.weights import PackedWeight, expert


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) in fp32 (in place on fp32 inputs)."""
    return F.silu(gate.float().clamp_(max=limit)).mul_(up.float().clamp_(-limit, limit))


def shared_expert(
    x, w1: PackedWeight, w3: PackedWeight, w2: PackedWeight, limit: float, simulate: bool
) -> torch.Tensor:
    """w2·(silu(min(w1 x, limit))·clamp(w3 x, ±limit)): x [N, D] → fp32 [N, D], not rounded after w2, so that parts of
    the width add up to the whole. w1 gate, w3 up, w2 down."""
    h = clamped_swiglu(linear(x, w1, simulate), linear(x, w3, simulate), limit).to(x.dtype)
    return linear(h.float(), w2, simulate)


def experts(x, indices, routing, w13: PackedWeight, w2: PackedWeight, limit: float, simulate: bool) -> torch.Tensor:
    """Σ over a token's experts of w2·(routing weight · swiglu), summed in fp32.

    x [N, D]; indices int64 [N, k], −1 for an expert of another rank, which adds nothing and whose weights are not
    read (not in training); routing fp32 [N, k]; w13 [E, 2I, D] (gate rows, then up rows); w2 [E, D, I]. The routing
    weight multiplies before w2, where the result is rounded to x.dtype. simulate as in `linear`. A token's experts are
    added in the order of its list, so the sum does not depend on how experts are numbered. Returns fp32 [N, D].
    """
    out = torch.zeros(indices.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    flat, order = indices.flatten().sort(stable=True)
    token = order // indices.shape[1]
    weights = routing.flatten().index_select(0, order)
    found, counts = flat.unique_consecutive(return_counts=True)
    start = 0
    for e, count in zip(found.tolist(), counts.tolist()):
        mine = slice(start, start + count)
        start += count
        if e < 0:
            continue
        y = linear(x.index_select(0, token[mine]), expert(w13, e), simulate)
        gate, up = y.chunk(2, -1)
        h = clamped_swiglu(gate, up, limit).mul_(weights[mine].unsqueeze(-1)).to(x.dtype)
        out[order[mine]] = linear(h, expert(w2, e), simulate).float()
    return sum(out.view(*indices.shape, x.shape[1]).unbind(1), torch.zeros_like(x, dtype=torch.float32))
