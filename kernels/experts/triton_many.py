"""Experts of many tokens: tiles of each expert's weights times tiles of its tokens, step by step."""

import triton
import triton.language as tl

from kernels.experts.triton_few import swiglu
from kernels.linear.triton_tiles import tile_product
from kernels.quantize.triton_codes import narrow, widen


@triton.jit
def expert_product(X, x_stride, ORDER, TABLE, W, S, G, Y, BLOCKS: tl.constexpr, EACH: tl.constexpr, O: tl.constexpr, K: tl.constexpr,
                   BO: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, BYTES: tl.constexpr, SCALES: tl.constexpr, PARTS: tl.constexpr):
    """Y [P, O]: row p of X (shared by EACH pairs) times its expert's matrix, of BYTES elements and SCALES scales."""
    b = tl.program_id(1)
    e = tl.load(TABLE + 1 + b)
    if (b < tl.load(TABLE)) & (e >= 0):
        t = tl.arange(0, BT)
        live = t < tl.load(TABLE + 1 + 2 * BLOCKS + b)
        pair = tl.load(ORDER + tl.load(TABLE + 1 + BLOCKS + b) + t, mask=live, other=0).to(tl.int64)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        row = tl.minimum(o, O - 1).to(tl.int64)
        s = S if S is None else S + e.to(tl.int64) * SCALES
        y = tile_product(X, pair // EACH * x_stride, live, W + e.to(tl.int64) * BYTES, s, row, K, BO, BT, BK, FORMAT, FP32, ROWS, COLUMNS)
        if G is not None:
            y *= tl.load(G + e.to(tl.int64) * PARTS + row // (O // PARTS))[:, None]
        tl.store(Y + pair[None, :] * O + o[:, None], narrow(y, Y.dtype.element_ty), mask=(o[:, None] < O) & live[None, :])


@triton.jit
def gate_pairs(GATE, UP, stride, ROUTING, H, limit, I: tl.constexpr, B: tl.constexpr):
    """H [P, I] = routing weight · swiglu of rows of GATE and UP, which begin `stride` apart."""
    p, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    gate = widen(tl.load(GATE + p * stride + i, mask=i < I, other=0.0))
    up = widen(tl.load(UP + p * stride + i, mask=i < I, other=0.0))
    h = swiglu(gate, up, limit)
    if ROUTING is not None:
        h *= tl.load(ROUTING + p)
    tl.store(H + p * I + i, narrow(h, H.dtype.element_ty), mask=i < I)
