"""Products of many tokens: tiles of a weight, dequantised, times tiles of x."""

import triton
import triton.language as tl

from kernels.linear.triton_words import E2M1_BYTES, E4M3_BYTES, bf16_twice
from kernels.quantize.triton_codes import decode_e2m1, decode_e4m3, decode_e8m0, widen


@triton.jit
def tile_product(X, at, live, W, S, row, K: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 FORMAT: tl.constexpr, FP32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ over K: fp32 [BO, BT] of weight rows `row` int64 [BO] and tokens whose rows of x begin at int64 `at` [BT].

    W: uint8 pairs of FP4, E4M3 bytes uint8, bf16 or fp32, contiguous rows of K columns; S uint8 or fp32, FP8's of blocks
    ROWS × COLUMNS, where BK divides COLUMNS. The global scale of NVFP4 is left to the caller.
    """
    acc = tl.zeros([BO, BT], tl.float32)
    i = tl.arange(0, BK)
    for k in range(0, K, BK):
        x = tl.load(X + at[:, None] + (k + i)[None, :], mask=live[:, None] & (k + i < K)[None, :], other=0.0)
        x = widen(x) if FP32 else x.to(tl.bfloat16)
        if FORMAT == "mxfp4" or FORMAT == "nvfp4":
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
    """Columns k … k + BK of rows [BO], bf16 or fp32; zeros beyond K."""
    GROUP: tl.constexpr = 32 if FORMAT == "mxfp4" else 16
    j, g = k // 2 + tl.arange(0, BK // 2), k // GROUP + tl.arange(0, BK // GROUP)
    b = tl.load(W + row[:, None] * (K // 2) + j[None, :], mask=(j < K // 2)[None, :], other=0)
    s = tl.load(S + row[:, None] * (K // GROUP) + g[None, :], mask=(g < K // GROUP)[None, :], other=0).to(tl.int32)
    if FP32:
        s = decode_e8m0(s) if FORMAT == "mxfp4" else decode_e4m3(s)
        s = tl.reshape(tl.broadcast_to(s[:, :, None], [BO, BK // GROUP, GROUP // 2]), [BO, BK // 2])
        low, high = decode_e2m1(b & 15) * s, decode_e2m1(b >> 4) * s
    else:
        s = tl.reshape(tl.broadcast_to(bf16_twice(s, FORMAT)[:, :, None], [BO, BK // GROUP, GROUP // 2]), [BO, BK // 2])
        low, high = tl.inline_asm_elementwise(E2M1_BYTES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [b, s], dtype=(tl.bfloat16, tl.bfloat16),
                                              is_pure=True, pack=4)
    return tl.reshape(tl.join(low, high), [BO, BK])


@triton.jit
def swizzle(pid, columns, rows, GROUP: tl.constexpr):
    """(row, column) of a program: GROUP rows at a time, so that programs side by side in time share both operands in L2."""
    group = pid // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    within = pid % (GROUP * columns)
    return group * GROUP + within % height, within // height
