"""Operands of the indexer's products: queries as they are, keys decoded in registers.

FP4 and FP8 codes become bf16 exactly, by moving their bits and one multiplication by a power of two.
"""

import triton
import triton.language as tl

from kernels.quantize.triton_codes import decode_e2m1, decode_e4m3, decode_e8m0, widen

PLAIN, FP8, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Four bytes of payload → four bf16, for `inline_asm_elementwise` with pack=4: $2 the bytes, $3 … $6 a scale each, as two equal
# halves. Which elements share a register is the compiler's choice, of one block or of several, so each takes its own scale,
# from u (the first two) and v. A bf16 with the three bits of an E2M1 magnitude below its exponent's third bit is 2^−126 times
# its value, the subnormal 0.5 included.
_LOW = "shl.b32 a, {0}, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, {0}, 4; lop3.b32 a, b, 0x80008000, a, 0xEA; " \
    "fma.rn.bf16x2 {1}, a, {2}, z; "
_HIGH = "shl.b32 a, {0}, 2; and.b32 a, a, 0x01C001C0; lop3.b32 a, {0}, 0x80008000, a, 0xEA; fma.rn.bf16x2 {1}, a, {2}, z; "
_PAIRS = "{{ .reg .b32 g, h, a, b, u, v, z; mov.b32 z, 0x80008000; prmt.b32 g, $2, 0, 0x1100; prmt.b32 h, $2, 0, 0x3322; " \
    "prmt.b32 u, $3, $4, 0x5410; prmt.b32 v, $5, $6, 0x5410; {} {} }}"
E2M1_LOW = tl.constexpr(_PAIRS.format(_LOW.format("g", "$0", "u"), _LOW.format("h", "$1", "v")))
E2M1_HIGH = tl.constexpr(_PAIRS.format(_HIGH.format("g", "$0", "u"), _HIGH.format("h", "$1", "v")))
# An E8M0 byte s → 2^(s − 65) as two equal bf16: 2^126 · 2^(s − 127), less 2^64 that the sum over heads gets back. Exact for
# keys of 2^−62 and more with scales up to 2^65; larger ones become infinite.
E8M0 = tl.constexpr("{ .reg .b32 a; min.u32 a, $1, 193; prmt.b32 a, a, 0, 0x0404; shr.b32 a, a, 1; add.u32 $0, a, 0x1F001F00;}")
# E4M3: magnitude to the lowest bits of the exponent and the mantissa, times 2^120. Its NaN code becomes 480.
_E4M3 = "shr.b32 a, {0}, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, {0}, 0x80008000, a, 0xEA; fma.rn.bf16x2 {1}, a, s, z; "
E4M3 = tl.constexpr("{ .reg .b32 g, h, a, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x7B807B80; prmt.b32 g, $2, 0, 0x1404; "
                    "prmt.b32 h, $2, 0, 0x3424; " + _E4M3.format("g", "$0") + _E4M3.format("h", "$1") + "}")


@triton.jit
def _fp4_order(x, R: tl.constexpr, BLOCKS: tl.constexpr):
    """[R, block, byte, nibble] → [R, 32·BLOCKS]: with four blocks, so that a thread's part of an operand is one block.

    Any order would do, if queries and keys have the same. With this one a thread reads 16 bytes at once and needs one scale.
    """
    x = tl.permute(tl.reshape(x, [R, BLOCKS, 8, 2, 2]), (0, 4, 2, 1, 3))
    return tl.reshape(x, [R, 32 * BLOCKS])


@triton.jit
def _fp8_order(x, R: tl.constexpr, DIMS: tl.constexpr):
    """[R, DIMS] → the same in the order in which a thread's part of an operand is a quarter of a row."""
    return tl.reshape(tl.permute(tl.reshape(x, [R, 4, DIMS // 8, 2]), (0, 2, 1, 3)), [R, DIMS])


@triton.jit
def load_queries(Q, at, live, D: tl.constexpr, DIMS: tl.constexpr, FORMAT: tl.constexpr):
    """Rows of queries at [N]: bf16 [N, DIMS], or pairs as int32 [N, DIMS/2] for FP4."""
    if FORMAT == FP4:
        i = tl.arange(0, DIMS // 2)[None, :]
        q = tl.load(Q + at[:, None] + i, mask=live[:, None] & (i < D // 2), other=0)
    else:
        i = tl.arange(0, DIMS)[None, :]
        q = tl.load(Q + at[:, None] + i, mask=live[:, None] & (i < D), other=0.0)
    return q


@triton.jit
def operand_queries(q, DIMS: tl.constexpr, FORMAT: tl.constexpr, N: tl.constexpr):
    """What `load_queries` read → bf16 [DIMS, N] in the order of the decoded keys."""
    if FORMAT == FP4:
        even = tl.reshape((q & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True), [N, DIMS // 32, 16])
        odd = tl.reshape((q >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), [N, DIMS // 32, 16])
        q = _fp4_order(tl.join(even, odd), N, DIMS // 32)
    elif FORMAT == FP8:
        q = _fp8_order(q, N, DIMS)
    return tl.trans(q)


@triton.jit
def operand_keys(KEYS, at, scale_at, live, D: tl.constexpr, DIMS: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """bf16 keys [TILE, DIMS]: FP4 without a factor 2^64, FP8 without the scale of its row."""
    if FORMAT == FP4:
        BLOCKS: tl.constexpr = DIMS // 32
        i, j = tl.arange(0, DIMS // 2)[None, :], tl.arange(0, BLOCKS)[None, :]
        code = tl.load(KEYS + at[:, None] + i, mask=live[:, None] & (i < D // 2), other=0)
        scale = tl.load(KEYS + scale_at[:, None] + j, mask=live[:, None] & (j < D // 32), other=0)
        code = tl.reshape(code, [TILE, BLOCKS, 16])
        scale = tl.inline_asm_elementwise(E8M0, "=r,r", [scale.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        scale = tl.broadcast_to(scale[:, :, None], [TILE, BLOCKS, 16])
        low = tl.inline_asm_elementwise(E2M1_LOW, "=&r,=&r,r,r,r,r,r", [code, scale], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(E2M1_HIGH, "=&r,=&r,r,r,r,r,r", [code, scale], dtype=tl.bfloat16, is_pure=True, pack=4)
        k = _fp4_order(tl.join(low, high), TILE, BLOCKS)
    else:
        i = tl.arange(0, DIMS)[None, :]
        k = tl.load(KEYS + at[:, None] + i, mask=live[:, None] & (i < D), other=0)
        if FORMAT == FP8:
            k = _fp8_order(k, TILE, DIMS)
            k = tl.inline_asm_elementwise(E4M3, "=&r,=&r,r", [k], dtype=tl.bfloat16, is_pure=True, pack=4)
    return k


@triton.jit
def _own(x):
    """x. For tcgen05, Triton (3.6, 3.7) multiplies converted fp32 operands in TF32 whatever precision is asked for, unless it
    cannot see the conversion; it does not look behind a sum."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], 1]), 2)


@triton.jit
def dots_fp32(Q, q_at, q_live, KEYS, at, scale_at, live, D: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
              N: tl.constexpr):
    """q·k as fp32 [TILE, N], products and sums in fp32; FP8 without the scale of its row. 32 dims at a time."""
    dots = tl.zeros([TILE, N], tl.float32)
    for start in tl.static_range(0, D, 32):
        i = tl.arange(0, 32)[None, :] + start
        q = widen(tl.load(Q + q_at[:, None] + i, mask=q_live[:, None] & (i < D), other=0.0))
        if FORMAT == FP4:
            byte = tl.load(KEYS + at[:, None] + i // 2, mask=live[:, None], other=0).to(tl.int32)
            scale = tl.load(KEYS + scale_at + start // 32, mask=live, other=0)
            k = decode_e2m1((byte >> (i % 2 * 4)) & 15) * decode_e8m0(scale)[:, None]
        else:
            k = tl.load(KEYS + at[:, None] + i, mask=live[:, None] & (i < D), other=0)
            if FORMAT == FP8:
                k = decode_e4m3(k)
            else:
                k = widen(k)
        dots = tl.dot(_own(k), tl.trans(_own(q)), dots, input_precision="ieee")
    return dots
