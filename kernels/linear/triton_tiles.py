"""Products of many tokens: tiles of a weight, dequantised, times tiles of x.

Codes are read as words (`triton_words`), so that a thread's loads become its operands without a move between threads; x
has the resulting order of columns (`arrange`). FP8 whose rows or blocks are not whole words is read as bytes.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import next_power
from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.linear.triton_words import E4M3_BYTES, unpack
from dsv4.kernels.quantize.triton_codes import decode_e4m3, decode_e8m0, narrow, turn, widen

LANES = 128  # columns that are four lanes' 16 bytes of FP4, and twice those of FP8
ARRANGED_TILE = 1024  # columns that a program puts in order


def order(h: Held) -> int:
    """Codes of half a word. Their pairs give the order in which tiles of this weight take the columns of x; 0: the
    original order."""
    return 4 if h.format in ("mxfp4", "nvfp4") else 2 if h.format == "fp8" and h.streams else 0


def tile_words(h: Held) -> torch.Tensor:
    """The weight as tiles read it: words of codes, bytes of other FP8, or numbers."""
    if order(h):
        return (h.weight.clone() if h.weight.data_ptr() % 16 else h.weight).view(torch.int32)
    return h.weight.view(torch.uint8) if h.format == "fp8" else h.weight


def whole_lanes(K: int) -> int:
    return triton.cdiv(K, LANES) * LANES


def arrange(x: torch.Tensor, per: int) -> torch.Tensor:
    """x [N, K] in the order `per`, with zeros up to a multiple of 128 columns; unchanged for 0. Blocks of 128 keep
    their columns, so x may be quantised before or after."""
    if not per:
        return x
    (N, K), columns = x.shape, whole_lanes(x.shape[1])
    y, block = torch.empty(N, columns, dtype=x.dtype, device=x.device), min(ARRANGED_TILE, next_power(columns))
    _arrange[(N, triton.cdiv(columns, block))](x, x.stride(0), y, K, columns, block, per, num_warps=4)
    return y


@triton.jit
def _arrange(X, x_stride, Y, K: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr, PER: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(X + row * x_stride + i, mask=i < K, other=0.0)
    tl.store(Y + row * COLUMNS + i, in_order(x, B, PER), mask=i < COLUMNS)


@triton.jit
def in_order(v, B: tl.constexpr, PER: tl.constexpr):
    """[B] columns of x, a multiple of 128, in the order of the operands: pair s of lane q, place 8s + 2q, is pair s of
    those that `unpack` makes of the lane's 8 · PER columns."""
    return tl.reshape(tl.permute(tl.reshape(v, [B // (32 * PER), 4, 4, 2, PER]), (0, 2, 4, 1, 3)), [B])


@triton.jit
def tile_product(
    X,
    at,
    live,
    W,
    S,
    row,
    K: tl.constexpr,
    BO: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER: tl.constexpr = 0,
    NORM=None,
    eps=0.0,
    CIS=None,
    cis_at=None,
    HEAD: tl.constexpr = 1,
    TURNED: tl.constexpr = 0,
):
    """Σ over K: fp32 [BO, BT] of weight rows `row` int64 [BO] and tokens whose rows of x begin at int64 `at` [BT].

    W: words int32 of codes, E4M3 bytes uint8, bf16 or fp32, contiguous rows of K columns; S uint8 or fp32, FP8's of
    blocks ROWS × COLUMNS, where BK divides COLUMNS. Words take x as `arrange` leaves it, and BK a multiple of 128 (FP8:
    64). The global scale of NVFP4 is left to the caller.

    PER: x is as it was, and its tiles are put in that order here. NORM [K]: x is normalised, which is rounded once
    before the product and scales the sums. CIS fp32, cis_at int64 [BT]: the last TURNED columns of each head of HEAD
    are rotated; BK divides HEAD, and TURNED BK.
    """
    WORDS: tl.constexpr = W.dtype.element_ty == tl.int32
    WIDTH: tl.constexpr = (K + 127) // 128 * 128 if WORDS and PER == 0 else K  # columns of x
    acc = tl.zeros([BO, BT], tl.float32)
    squares, cos, sin = tl.zeros([BT, 16], tl.float32), 0.0, 0.0
    if TURNED > 0:
        cis = tl.load(CIS + cis_at[:, None] + tl.arange(0, TURNED)[None, :], mask=live[:, None], other=0.0)
        cos, sin = tl.split(tl.reshape(cis, [BT, 1, TURNED // 2, 2]))
    i = tl.arange(0, BK)
    for k in range(0, K, BK):
        if WIDTH % BK == 0:
            x = tl.load(X + at[:, None] + (k + i)[None, :], mask=live[:, None], other=0.0)
        else:
            x = tl.load(X + at[:, None] + (k + i)[None, :], mask=live[:, None] & (k + i < WIDTH)[None, :], other=0.0)
        if NORM is not None:
            wide = widen(x)
            squares += tl.sum(tl.reshape(wide * wide, [BT, 16, BK // 16]), 2)
            weight = widen(tl.load(NORM + (k + i), mask=k + i < K, other=0.0))
            x = narrow(wide * weight[None, :], X.dtype.element_ty)
        if TURNED > 0:
            if k % HEAD == HEAD - BK:
                x = _turned(x, cos, sin, BT, BK, TURNED)
        x = widen(x) if FP32 else x.to(tl.bfloat16)
        if PER > 0:
            x = tl.permute(tl.reshape(x, [BT, BK // (32 * PER), 4, 4, 2, PER]), (0, 1, 3, 5, 2, 4))
            x = tl.reshape(x, [BT, BK])
        if FORMAT == "mxfp4" or FORMAT == "nvfp4":
            w = _fp4_tile(W, S, row, k, K, BO, BK, FORMAT, FP32)
        elif WORDS:
            w = _fp8_tile(W, S, row, k, K, BO, BK, FP32, ROWS, COLUMNS)
        else:
            w = tl.load(W + row[:, None] * K + (k + i)[None, :], mask=(k + i < K)[None, :], other=0)
            if FORMAT == "fp8":
                if FP32:
                    w = decode_e4m3(w)
                else:
                    w = tl.inline_asm_elementwise(E4M3_BYTES, "=&r,=&r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
            elif FP32:
                w = widen(w)
        if FORMAT == "fp8" and not (WORDS and S.dtype.element_ty == tl.uint8):
            scale = tl.load(S + (row // ROWS) * ((K + COLUMNS - 1) // COLUMNS) + k // COLUMNS)
            if S.dtype.element_ty != tl.float32:
                scale = decode_e8m0(scale)
            acc += tl.dot(w, tl.trans(x), input_precision="ieee") * scale[:, None]
        else:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            if WORDS and not FP32:
                acc = finished(acc)
    if NORM is not None:
        acc *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]
    return acc


@triton.jit
def _turned(x, cos, sin, BT: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr):
    """Tile [BT, BK] of x with its last TURNED columns rotated by cos, sin fp32 [BT, 1, TURNED / 2]."""
    a, b = tl.split(tl.reshape(widen(x), [BT, BK // TURNED, TURNED // 2, 2]))
    last = (tl.arange(0, BK // TURNED) == BK // TURNED - 1)[None, :, None]
    u, v = turn(a, b, cos, sin)
    return narrow(tl.reshape(tl.join(tl.where(last, u, a), tl.where(last, v, b)), [BT, BK]), x.dtype)


@triton.jit
def finished(acc):
    """acc unchanged, after the products that add to it are done.

    Otherwise Triton (3.6, 3.7) lets three of them run into the next iteration, and tracks only their sums: while they
    still read the words of this iteration from registers, those of the next are unpacked into the same registers.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fp4_tile(
    W, S, row, k, K: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr
):
    """Columns k … k + BK of rows [BO], bf16 or fp32, in the order of `arrange`; zeros beyond K.

    A row's 128 columns are 16 bytes in each of four lanes, and the words become the lanes' operands in place.
    """
    GROUP: tl.constexpr = 32 if FORMAT == "mxfp4" else 16
    j = k // 8 + tl.arange(0, BK // 8)
    place = W + row[:, None] * (K // 8) + j[None, :]
    w = tl.load(place) if K % BK == 0 else tl.load(place, mask=(j < K // 8)[None, :], other=0)
    g = k // GROUP + tl.arange(0, BK // GROUP)  # 4 bytes a row or more, so that the load can be issued iterations ahead
    place = S + row[:, None] * (K // GROUP) + g[None, :]
    s = tl.load(place) if K % BK == 0 else tl.load(place, mask=(g < K // GROUP)[None, :], other=0)
    v = unpack(
        tl.reshape(w, [BO * BK // 32, 4]), tl.reshape(s.to(tl.int32), [BO * BK // 32, 32 // GROUP]), FORMAT, FP32
    )
    return tl.reshape(tl.permute(tl.reshape(v, [BO, BK // 128, 4, 16, 2]), (0, 1, 3, 2, 4)), [BO, BK])


@triton.jit
def _fp8_tile(
    W,
    S,
    row,
    k,
    K: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    FP32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`_fp4_tile` for FP8. E8M0 scales are included, exactly from 2^−124 on, so that sums need not be scaled tile by
    tile."""
    j = k // 4 + tl.arange(0, BK // 4)
    place = W + row[:, None] * (K // 4) + j[None, :]
    w = tl.load(place) if K % BK == 0 else tl.load(place, mask=(j < K // 4)[None, :], other=0)
    SCALED: tl.constexpr = S.dtype.element_ty == tl.uint8
    s = 0
    if SCALED:
        s = tl.load(S + (row // ROWS) * ((K + COLUMNS - 1) // COLUMNS) + k // COLUMNS).to(tl.int32)
        s = tl.reshape(tl.broadcast_to(s[:, None], [BO, BK // 16]), [BO * BK // 16, 1])
    v = unpack(tl.reshape(w, [BO * BK // 16, 4]), s, "fp8", FP32, False, SCALED)
    return tl.reshape(tl.permute(tl.reshape(v, [BO, BK // 64, 4, 8, 2]), (0, 1, 3, 2, 4)), [BO, BK])


@triton.jit
def swizzle(pid, columns, rows, GROUP: tl.constexpr):
    """(row, column) of a program: GROUP rows at a time, so that programs that run at the same time share both operands
    in L2."""
    group = pid // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    within = pid % (GROUP * columns)
    return group * GROUP + within % height, within // height
