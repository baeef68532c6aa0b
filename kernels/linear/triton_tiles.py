"""Products of many tokens: tiles of a weight, dequantised, times tiles of x.

FP4 is read as words, as `triton_words` says, so that what a thread loads becomes its operands without a move between threads;
x comes in the order of columns that this gives (`arrange`).
"""

import torch
import triton
import triton.language as tl

from kernels.launch import next_power
from kernels.linear.triton_weights import Held
from kernels.linear.triton_words import E4M3_BYTES, unpack
from kernels.quantize.triton_codes import decode_e4m3, decode_e8m0, widen

LANES = 128           # columns that are the 16 bytes of each of four lanes
ARRANGED_TILE = 1024  # columns that a program puts in order


def tile_words(h: Held) -> torch.Tensor:
    """The weight as tiles read it: words of FP4, bytes of FP8, numbers."""
    match h.format:
        case "mxfp4" | "nvfp4":
            return (h.weight.clone() if h.weight.data_ptr() % 16 else h.weight).view(torch.int32)
        case "fp8":
            return h.weight.view(torch.uint8)
    return h.weight


def whole_lanes(K: int) -> int:
    return triton.cdiv(K, LANES) * LANES


def arrange(x: torch.Tensor) -> torch.Tensor:
    """x [N, K] in the order in which the tiles of FP4 take its columns, with zeros up to a multiple of 128. Blocks of 128 stay
    the columns that they were, so that x may be quantised before or after."""
    (N, K), columns = x.shape, whole_lanes(x.shape[1])
    y, block = torch.empty(N, columns, dtype=x.dtype, device=x.device), min(ARRANGED_TILE, next_power(columns))
    _arrange[(N, triton.cdiv(columns, block))](x, x.stride(0), y, K, columns, block, num_warps=4)
    return y


@triton.jit
def _arrange(X, x_stride, Y, K: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(X + row * x_stride + i, mask=i < K, other=0.0)
    tl.store(Y + row * COLUMNS + i, in_order(x, B), mask=i < COLUMNS)


@triton.jit
def in_order(v, B: tl.constexpr):
    """[B] columns of x, a multiple of 128, in the order of the operands: pair s of lane q, place 8s + 2q, is pair s of those
    that `unpack` makes of the lane's 32 columns."""
    return tl.reshape(tl.permute(tl.reshape(v, [B // 128, 4, 4, 2, 4]), (0, 2, 4, 1, 3)), [B])


@triton.jit
def tile_product(X, at, live, W, S, row, K: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 FORMAT: tl.constexpr, FP32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ over K: fp32 [BO, BT] of weight rows `row` int64 [BO] and tokens whose rows of x begin at int64 `at` [BT].

    W: words int32 of FP4, E4M3 bytes uint8, bf16 or fp32, contiguous rows of K columns; S uint8 or fp32, FP8's of blocks
    ROWS × COLUMNS, where BK divides COLUMNS. FP4 takes x as `arrange` leaves it, and BK a multiple
    of 128. The global scale of NVFP4 is left to the caller.
    """
    FP4: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "nvfp4"
    acc = tl.zeros([BO, BT], tl.float32)
    i = tl.arange(0, BK)
    for k in range(0, K, BK):
        if FP4 or K % BK == 0:
            x = tl.load(X + at[:, None] + (k + i)[None, :], mask=live[:, None], other=0.0)
        else:
            x = tl.load(X + at[:, None] + (k + i)[None, :], mask=live[:, None] & (k + i < K)[None, :], other=0.0)
        x = widen(x) if FP32 else x.to(tl.bfloat16)
        if FP4:
            w = _fp4_tile(W, S, row, k, K, BO, BK, FORMAT, FP32)
        else:
            w = tl.load(W + row[:, None] * K + (k + i)[None, :], mask=(k + i < K)[None, :], other=0)
            if FORMAT == "fp8":
                if FP32:
                    w = decode_e4m3(w)
                else:
                    w = tl.inline_asm_elementwise(E4M3_BYTES, "=&r,=&r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
            elif FP32:
                w = widen(w)
        if FORMAT == "fp8":
            scale = tl.load(S + (row // ROWS) * ((K + COLUMNS - 1) // COLUMNS) + k // COLUMNS)
            if S.dtype.element_ty != tl.float32:
                scale = decode_e8m0(scale)
            acc += tl.dot(w, tl.trans(x), input_precision="ieee") * scale[:, None]
        else:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def _fp4_tile(W, S, row, k, K: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr):
    """Columns k … k + BK of rows [BO], bf16 or fp32, in the order of `arrange`; zeros beyond K.

    A row's 128 columns are 16 bytes each of four lanes, whose words become the lanes' operands where they are.
    """
    GROUP: tl.constexpr = 32 if FORMAT == "mxfp4" else 16
    j = k // 8 + tl.arange(0, BK // 8)
    place = W + row[:, None] * (K // 8) + j[None, :]
    w = tl.load(place) if K % BK == 0 else tl.load(place, mask=(j < K // 8)[None, :], other=0)
    g = k // GROUP + tl.arange(0, BK // GROUP)  # 4 bytes a row or more, so that the load is begun iterations ahead
    place = S + row[:, None] * (K // GROUP) + g[None, :]
    s = tl.load(place) if K % BK == 0 else tl.load(place, mask=(g < K // GROUP)[None, :], other=0)
    v = unpack(tl.reshape(w, [BO * BK // 32, 4]), tl.reshape(s.to(tl.int32), [BO * BK // 32, 32 // GROUP]), FORMAT, FP32)
    return tl.reshape(tl.permute(tl.reshape(v, [BO, BK // 128, 4, 16, 2]), (0, 1, 3, 2, 4)), [BO, BK])


@triton.jit
def swizzle(pid, columns, rows, GROUP: tl.constexpr):
    """(row, column) of a program: GROUP rows at a time, so that programs side by side in time share both operands in L2."""
    group = pid // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    within = pid % (GROUP * columns)
    return group * GROUP + within % height, within // height
