"""Launches of `hopper`: MXFP4 experts of tokens rounded to FP8, for any number of tokens."""

import math

import torch

from dsv4.kernels.descriptors import TYPES, described
from dsv4.kernels.experts import hopper
from dsv4.kernels.experts.hopper_order import arrange
from dsv4.kernels.experts.triton_order import sort_pairs
from dsv4.kernels.experts.triton_stream import Routed
from dsv4.kernels.launch import capability, processors
from dsv4.kernels.linear.hopper_weights import Unfit, largest_scales
from dsv4.kernels.linear.triton_weights import Held

TOKENS = (8, 16, 32, 64, 128)  # of a tile, at most; sums of more do not fit in registers
STAGES = {8: 12, 16: 11, 32: 10, 64: 8, 128: 6}  # by tokens of a tile, as many as fit in shared memory
ALIGNED = 32  # fp32 that a copy at least has, because each begins at a multiple of 128 bytes of shared memory
DTYPES = (torch.bfloat16,)  # of x


def unfit(x: torch.Tensor, routed: Routed) -> Unfit | None:
    """Why these kernels do not multiply x with these weights on this device, or None if they do. They are for
    activations that are rounded to FP8. The first call for a weight reads all of it, and waits for the result."""
    if capability(x.device)[0] != 9:
        return Unfit("the device is not of capability 9")
    if x.dtype not in DTYPES:
        return Unfit(f"x is in {x.dtype}")
    tops = (largest_scales(routed.w13), largest_scales(routed.w2))
    return next((top for top in tops if isinstance(top, Unfit)), None)


def tile_tokens(P: int, E: int) -> int:
    """Tokens of a tile, of P pairs of E experts: as many as an expert has on average, and one standard deviation of
    pairs that are independent. (`scripts/tune_experts.py` on an H200: with 6 pairs an expert 16 are faster than 8, with
    24 pairs 32 than 64.)"""
    mean = P / E
    return next((t for t in TOKENS if t >= mean + math.sqrt(mean)), TOKENS[-1])


def multiply_codes(x: torch.Tensor, routed: Routed, limit: float) -> torch.Tensor:
    """Rows of the pairs [P, d] in x.dtype, as of `tile_experts` with `simulate`. Only if `unfit` finds no reason."""
    indices, routing, w13, w2 = routed
    P, I, E = indices.numel(), w2.K, w13.stack
    T, out = tile_tokens(P, E), torch.empty(P, x.shape[1], dtype=x.dtype, device=x.device)
    order, table, _ = (None, None, None) if len(x) == 1 else sort_pairs(indices, E, T)
    codes, scales, table = arrange(x, indices, order, table, T)
    inner = torch.empty(len(codes), I, dtype=torch.float8_e4m3fn, device=x.device)
    inner_scales = torch.empty(I // 128, len(codes), dtype=torch.float32, device=x.device)
    _product(codes, scales, w13, order, table, routing, inner.view(torch.uint8), inner_scales, limit, T, x.dtype)
    _product(inner, inner_scales, w2, order, table, None, out, None, 0.0, T, x.dtype)
    return out


def _product(
    x: torch.Tensor,
    scales: torch.Tensor,
    w: Held,
    order: torch.Tensor | None,
    table: torch.Tensor,
    routing: torch.Tensor | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    limit: float,
    T: int,
    dtype: torch.dtype,
) -> None:
    """With routing: gate and up projection, SwiGLU and rounding to FP8. Without: down projection."""
    rows = len(w.weight) * w.O
    hopper.product[(processors(x.device),)](
        described(w.weight.view(torch.int32).view(rows, -1), 128, 16),
        described(w.scale.view(torch.int32).view(rows, -1), 128, 4),
        described(x, T, 128),
        described(scales, 1, max(T, ALIGNED)),
        largest_scales(w),
        table,
        order,
        routing,
        out,
        out_scales,
        (table.numel() - 1) // 4,
        scales.shape[1],
        float(limit),
        w.O,
        w.K,
        T,
        STAGES[T],
        routing is not None,
        TYPES[dtype],
        num_warps=8,
        launch_pdl=True,
    )
