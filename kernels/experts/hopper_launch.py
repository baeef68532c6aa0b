"""Launches of `hopper`: MXFP4 experts of tokens rounded to FP8, for any number of tokens."""

import math
from typing import NamedTuple

import torch

from dsv4.kernels.descriptors import TYPES, described
from dsv4.kernels.experts import hopper
from dsv4.kernels.experts.hopper_order import sort_and_arrange
from dsv4.kernels.experts.triton_stream import Routed, Shared
from dsv4.kernels.launch import capability, processors
from dsv4.kernels.linear.hopper_weights import COLUMNS, Unfit, largest_scales
from dsv4.kernels.linear.triton_fp8 import BLOCK, blocked
from dsv4.kernels.linear.triton_weights import Held

TOKENS = (8, 16, 32, 64, 128)  # of a tile, at most; sums of more do not fit in registers
MOST = hopper.MOST.value  # of a tile beside those of a shared expert: tokens of a group
# By tokens of a tile, as many as fit in shared memory; up to MOST tokens a multiple of four, and eight at least.
STAGES = {8: 12, 16: 8, 32: 8, 64: 8, 128: 6}
ALIGNED = 32  # fp32 that a copy at least has, because each begins at a multiple of 128 bytes of shared memory
DTYPES = (torch.bfloat16,)  # of x
# Tokens up to which the shared expert's tiles are in the launches of the routed ones. Its weights are read again for
# each tile of tokens, so more tokens are better served by products of their own.
BESIDE = 64


def unfit(x: torch.Tensor, routed: Routed) -> Unfit | None:
    """Why these kernels do not multiply x with these weights on this device, or None if they do. They are for
    activations that are rounded to FP8. The first call for a weight reads all of it, and waits for the result."""
    if capability(x.device)[0] != 9:
        return Unfit("the device is not of capability 9")
    if x.dtype not in DTYPES:
        return Unfit(f"x is in {x.dtype}")
    tops = (largest_scales(routed.w13), largest_scales(routed.w2))
    return next((top for top in tops if isinstance(top, Unfit)), None)


def joins(x: torch.Tensor, shared: Shared) -> bool:
    """Whether `multiply_codes` takes this shared expert beside routed ones that it takes."""
    return len(x) <= BESIDE and all(blocked(h) and not h.K % COLUMNS and not h.exact_sums for h in shared)


def tile_tokens(P: int, E: int) -> int:
    """Tokens of a tile, of P pairs of E experts: as many as an expert has on average, and one standard deviation of
    pairs that are independent. (`scripts/tune_experts.py` on an H200: with 6 pairs an expert 16 are faster than 8, with
    24 pairs 32 than 64.)"""
    mean = P / E
    return next((t for t in TOKENS if t >= mean + math.sqrt(mean)), TOKENS[-1])


def multiply_codes(
    x: torch.Tensor, routed: Routed, limit: float, shared: Shared | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of the pairs [P, d] in x.dtype, as of `tile_experts` with `simulate`, and of the shared expert fp32 [N, d].
    Only if `unfit` finds no reason, and with a shared expert that `joins`.

    Tokens have the same bits in any number of tokens; the shared expert's, in any that it joins.
    """
    indices, routing, w13, w2 = routed
    (N, d), P, E = x.shape, indices.numel(), w13.stack
    T = tile_tokens(P, E) if shared is None else min(tile_tokens(P, E), MOST)
    order, codes, scales, table, base = sort_and_arrange(x, indices, E, T, shared is not None)
    width = w2.K if shared is None else max(w2.K, shared.w2.K)
    inner = torch.empty(len(codes), width, dtype=torch.float8_e4m3fn, device=x.device)
    inner_scales = torch.empty(width // BLOCK, len(codes), dtype=torch.float32, device=x.device)
    out, ys = torch.empty(P, d, dtype=x.dtype, device=x.device), None
    first = second = None
    if shared is not None:
        ys = torch.empty(N, d, dtype=torch.float32, device=x.device)
        first, second = Beside(shared.w1, shared.w3, None, N, base), Beside(shared.w2, None, ys, N, base)
    to = inner.view(torch.uint8), inner_scales
    _product(codes, scales, w13, order, table, routing, to, first, float(limit), T, x.dtype)
    _product(inner, inner_scales, w2, order, table, None, (out, None), second, 0.0, T, x.dtype)
    return out, ys


class Beside(NamedTuple):
    """The shared expert's part of a launch: gate and up projection, or down projection with fp32 [N, d] for its
    results; and the first row of its tokens in x."""

    first: Held
    second: Held | None
    out: torch.Tensor | None
    tokens: int
    row: int

    @property
    def given(self) -> tuple:
        weights = [h and described(h.weight, BLOCK, BLOCK) for h in (self.first, self.second)]
        return *weights, self.first.scale, self.second and self.second.scale, *self[2:]


def _product(
    x: torch.Tensor,
    scales: torch.Tensor,
    w: Held,
    order: torch.Tensor | None,
    table: torch.Tensor,
    routing: torch.Tensor | None,
    to: tuple[torch.Tensor, torch.Tensor | None],
    beside: Beside | None,
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
        *to,
        *(beside.given if beside else (None, None, None, None, None, 0, 0)),
        (table.numel() - 1) // 4,
        scales.shape[1],
        limit,
        w.O,
        w.K,
        *((beside.first.O, beside.first.K) if beside else (BLOCK, BLOCK)),
        to[0].shape[1],
        T,
        STAGES[T],
        routing is not None,
        TYPES[dtype],
        num_warps=8,
        launch_pdl=True,
    )
