"""Experts of many tokens: tiles of each expert's weights times tiles of its tokens, step by step."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.experts.triton_decode import swiglu
from dsv4.kernels.experts.triton_order import blocks_of, sort_pairs
from dsv4.kernels.experts.triton_stream import Routed
from dsv4.kernels.launch import dot_in_fp32, next_power
from dsv4.kernels.linear.reference import ACTIVATION_BLOCK
from dsv4.kernels.linear.triton import multiplies_codes, products, stages, tile_columns
from dsv4.kernels.linear.triton_fp8 import product, scales_of
from dsv4.kernels.linear.triton_tiles import arrange, in_order, order, tile_product, tile_words, whole_lanes
from dsv4.kernels.linear.triton_weights import Held, hold
from dsv4.kernels.quantize.triton import simulate_fp8_blocks
from dsv4.kernels.quantize.triton_codes import e4m3_blocks, narrow, widen
from dsv4.kernels.quantize.weights import PackedWeight

GATE_TILE = 1024


def tile_experts(name: str, x: torch.Tensor, routed: Routed, limit: float, simulate: bool) -> torch.Tensor:
    """Rows of the pairs [P, d] in x.dtype: sort, gate and up projection, SwiGLU, down projection, with the roundings of
    `simulate` between."""
    indices, routing, w13, w2 = routed
    (N, d), k, E, I = x.shape, indices.shape[1], w13.stack, w2.K
    P, fp32 = N * k, dot_in_fp32(x) or "fp32" in (w13.format, w2.format)
    bt = tile_tokens(P, E, 32 if fp32 else 64 if order(w13) == 4 else 128)
    x, ordered = arrange(x, order(w13)), order(w2)
    places, table, rounded = sort_pairs(indices, E, bt, x if simulate else None)
    new = lambda *shape: torch.empty(*shape, dtype=x.dtype, device=x.device)
    y, h = new(P, 2 * I), new(P, whole_lanes(I) if ordered else I)
    block = min(GATE_TILE, next_power(h.shape[1]))
    _product(name, rounded if simulate else x, w13, y, places, table, k, bt, fp32)
    grid = P, triton.cdiv(h.shape[1], block)
    _gate_pairs[grid](y, y[:, I:], 2 * I, routing, h, None, 0, float(limit), I, h.shape[1], block, ordered, num_warps=4)
    out = new(P, d)
    _product(name, simulate_fp8_blocks(h, ACTIVATION_BLOCK) if simulate else h, w2, out, places, table, 1, bt, fp32)
    return out


def tile_tokens(P: int, E: int, most: int) -> int:
    """Tokens of a tile: a third more than an expert has on average, so that most experts need one tile, and no tile is
    much too large."""
    return next(t for t in (16, 32, 64, 128) if t >= min(4 * P // (3 * E), most))


def tile_shape(name: str, w: Held, bt: int, fp32: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile with `bt` tokens.

    An FP4 tile spends its time on dequantising. 4 warps leave room for a second program on the multiprocessor, and
    their loads of scales are wide enough for prefetching. With 16 tokens a product has fewer rows, and loads take the
    time.
    """
    columns = tile_columns(name, w, fp32)
    if fp32:
        return 32, columns, 4
    if order(w) == 4:
        return (64, 2 * columns, 4) if bt == 16 else (128, columns, 4)
    return (128, columns, 8 if bt > 64 else 4) if bt >= 64 else (64, columns, 4)


def tile_shared(
    name: str,
    x: torch.Tensor,
    shared: tuple[PackedWeight, PackedWeight, PackedWeight],
    limit: float,
    simulate: bool,
) -> torch.Tensor:
    """The shared expert fp32 [N, d]: two products, SwiGLU, product. SwiGLU leaves codes where these are multiplied."""
    w1, w3, w2 = shared
    gate, up = products(name, x, None, 0.0, (w1, w3), (simulate, simulate), (x.dtype, x.dtype))
    (N, I), down = gate.shape, hold(name, w2)
    coded, block = simulate and multiplies_codes(gate, down, True), min(GATE_TILE, next_power(I))
    h = torch.empty(N, I, dtype=torch.uint8 if coded else gate.dtype, device=gate.device)
    scales = scales_of(h) if coded else None
    strided = (scales, 0 if scales is None else scales.stride(0))
    _gate_pairs[(N, triton.cdiv(I, block))](gate, up, I, None, h, *strided, float(limit), I, I, block, 0, num_warps=4)
    if not coded:
        return products(name, h, None, 0.0, (w2,), (simulate,), (torch.float32,))[0]
    out = torch.empty(N, down.O, dtype=torch.float32, device=h.device)
    product(h, scales, down, out)
    return out


def _product(
    name: str,
    x: torch.Tensor,
    w: Held,
    y: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    each: int,
    bt: int,
    fp32: bool,
) -> None:
    """y [P, O]: row p of x (shared by `each` pairs) times its expert's matrix."""
    bo, bk, warps = tile_shape(name, w, bt, fp32)
    blocks = blocks_of(y.shape[0], w.stack, bt)
    weight = tile_words(w)
    scales = 1 if w.scale is None else w.scale.shape[-2] * w.scale.shape[-1]
    _expert_product[(triton.cdiv(w.O, bo), blocks)](
        x,
        x.stride(0),
        places,
        table,
        weight,
        w.scale,
        w.glob,
        y,
        blocks,
        each,
        w.O,
        w.K,
        bo,
        bt,
        bk,
        w.format,
        fp32,
        *w.block,
        weight.shape[-2] * weight.shape[-1],
        scales,
        w.parts,
        num_warps=warps,
        num_stages=1 if fp32 else stages(x.device),
    )


@triton.jit(do_not_specialize=["blocks"])
def _expert_product(
    X,
    x_stride,
    ORDER,
    TABLE,
    W,
    S,
    G,
    Y,
    blocks,
    EACH: tl.constexpr,
    O: tl.constexpr,
    K: tl.constexpr,
    BO: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Y [P, O]: row p of X (shared by EACH pairs) times its expert's matrix, of BYTES elements and SCALES scales."""
    b = tl.program_id(1)
    e = tl.load(TABLE + 1 + b)
    if (b < tl.load(TABLE)) & (e >= 0):
        t = tl.arange(0, BT)
        live = t < tl.load(TABLE + 1 + 2 * blocks + b)
        pair = tl.load(ORDER + tl.load(TABLE + 1 + blocks + b) + t, mask=live, other=0).to(tl.int64)
        o = tl.program_id(0) * BO + tl.arange(0, BO)
        row = tl.minimum(o, O - 1).to(tl.int64)
        s = S if S is None else S + e.to(tl.int64) * SCALES
        y = tile_product(
            X,
            pair // EACH * x_stride,
            live,
            W + e.to(tl.int64) * BYTES,
            s,
            row,
            K,
            BO,
            BT,
            BK,
            FORMAT,
            FP32,
            ROWS,
            COLUMNS,
        )
        if G is not None:
            y *= tl.load(G + e.to(tl.int64) * PARTS + row // (O // PARTS))[:, None]
        tl.store(
            Y + pair[None, :] * O + o[:, None], narrow(y, Y.dtype.element_ty), mask=(o[:, None] < O) & live[None, :]
        )


@triton.jit(do_not_specialize=["scales_stride"])
def _gate_pairs(
    GATE, UP, stride, ROUTING, H, SCALES, scales_stride, limit, I: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    """H [P, COLUMNS] = routing weight · swiglu of rows of GATE and UP, which begin `stride` apart, in order PER. With
    SCALES [I / 128, P] H gets the codes of its rounding to FP8: no routing, no order, I a multiple of 128."""
    p, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    gate = widen(tl.load(GATE + p * stride + i, mask=i < I, other=0.0))
    up = widen(tl.load(UP + p * stride + i, mask=i < I, other=0.0))
    h = swiglu(gate, up, limit)
    if ROUTING is not None:
        h *= tl.load(ROUTING + p)
    if SCALES is not None:
        codes, scales = e4m3_blocks(tl.reshape(widen(narrow(h, GATE.dtype.element_ty)), [B // 128, 128]))
        block = tl.program_id(1) * (B // 128) + tl.arange(0, B // 128)
        tl.store(SCALES + block * scales_stride + p, scales, mask=block < I // 128)
        h = tl.reshape(codes, [B])
    else:
        h = narrow(h, H.dtype.element_ty)
    tl.store(H + p * COLUMNS + i, in_order(h, B, PER) if PER else h, mask=i < COLUMNS)
