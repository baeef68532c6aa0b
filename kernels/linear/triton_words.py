"""Weights read as 32-bit words and turned into operands of a matrix product in registers.

A thread reads 16 bytes (4 words) of one row: S pairs of values, S = 16 (FP4), 8 (FP8), 4 (bf16) or 2 (fp32). The order
of the columns within those bytes does not matter to a product as long as both operands agree on it, so a pair is chosen
to be cheap to unpack: for codes, two codes of a word that are 16 bits apart. The assembly takes one word at a time,
because the compiler chooses which elements of a tensor are packed together.
"""

import triton
import triton.language as tl

from dsv4.kernels.quantize.triton_codes import decode_e2m1, decode_e4m3, decode_e8m0

# A product is written as a sum with −0, which is exact and keeps the signs of zeros; bf16 has no plain multiplication
# before sm_90.
_TIMES = "fma.rn.bf16x2 s, s, {by}, none;"
_MOVE = (
    "{left}.b32 s, {word}, {sign}; {right}.b32 e, {word}, {rest}; and.b32 s, s, 0x80008000; and.b32 e, e, {mask}; "
    "or.b32 s, s, e;"
)


def _pairs(bits: int, mask: str, big: str, scaled: bool) -> str:
    """A word → 16 / bits pairs: pair j is its codes j and j + 16 / bits, in outputs of the same numbers.

    Their sign and the bits below it are moved to those of a bf16: the code's value times a power of two (also of
    subnormal codes), which `big` takes back. The word comes after the outputs, and then its scale, if `scaled`.
    """
    each = 16 // bits
    word = f"${2 * each}"
    lines = [".reg .b32 s, e, big, none;", f"mov.b32 big, {big};", "mov.b32 none, 0x80008000;"]
    for j in range(each):
        # bits by which the code moves up
        sign, rest = 16 - bits - bits * j, (10 if bits == 4 else 12) - bits - bits * j
        lines.append(
            _MOVE.format(
                left="shl", word=word, sign=sign, mask=mask, right="shl" if rest >= 0 else "shr", rest=abs(rest)
            )
        )
        lines += [_TIMES.format(by=by) for by in ("big", f"${2 * each + 1}")[: 1 + scaled]]
        lines.append(f"mov.b32 {{${j}, ${each + j}}}, s;")
    return "{ " + " ".join(lines) + " }"


# s ee m → bits 15 and 8 … 6: the value · 2^−126
E2M1_PAIRS = tl.constexpr(_pairs(4, "0x01c001c0", "0x7e807e80", True))
# s eeee mmm → bits 15 and 10 … 4: the value · 2^−120
E4M3_PAIRS = tl.constexpr(_pairs(8, "0x07f007f0", "0x7b807b80", False))
E4M3_SCALED = tl.constexpr(_pairs(8, "0x07f007f0", "0x7b807b80", True))


# A word of E2M1 codes → pairs of fp16 as above, the value · 2^−14. In fp16 sign, exponent and mantissa lie within one
# byte, so four codes move at once: those in the high nibbles of the bytes, then those in the low ones.
_HALVES = (
    "and.b32 p, h, 0xff00ff00; mov.b32 {{${odd}, ${odd4}}}, p; prmt.b32 p, h, 0, 0x2404; mov.b32 {{${even}, "
    "${even4}}}, p;"
)
E2M1_HALVES = tl.constexpr(
    "{ .reg .b32 t, h, p; shr.b32 t, $8, 3; and.b32 t, t, 0x0e0e0e0e; lop3.b32 h, $8, 0x80808080, t, 0xea;"
    + _HALVES.format(odd=3, odd4=7, even=1, even4=5)
    + "shl.b32 h, $8, 4; shl.b32 t, $8, 1; and.b32 t, t, 0x0e0e0e0e; lop3.b32 h, h, 0x80808080, t, 0xea;"
    + _HALVES.format(odd=2, odd4=6, even=0, even4=4)
    + "}"
)
HALVES_DOWN = tl.constexpr(2.0**14)  # restores the 2^−14

# Four bytes ($2) → their values in the order of the columns, $0 $1.
_E4M3 = (
    "and.b32 s, {code}, 0x80008000; shr.b32 e, {code}, 4; and.b32 e, e, 0x07f007f0; or.b32 s, s, e; "
    "fma.rn.bf16x2 {out}, s, big, none;"
)
E4M3_BYTES = tl.constexpr(
    "{ .reg .b32 a, b, s, e, big, none; mov.b32 none, 0x80008000; mov.b32 big, 0x7b807b80; "
    "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
    + _E4M3.format(code="a", out="$0")
    + _E4M3.format(code="b", out="$1")
    + "}"
)

# A word of two bf16 ($1) to the nearest E4M3 of the scale 2^k, ties to even, clamped. In units of the scale, values
# from 2^−6 on keep 3 bits of mantissa, and those below are multiples of 2^−9, which adding 1.5·2^−2 ($2) leaves. $3 is
# 2^−6, $4 is 448.
ROUND_E4M3 = tl.constexpr("""{ .reg .b32 m, n, t, c, one, minus;
    and.b32 m, $1, 0x7fff7fff; min.NaN.bf16x2 m, m, $4;
    shr.b32 t, m, 4; and.b32 t, t, 0x00010001; add.u32 n, m, 0x00070007; add.u32 n, n, t; and.b32 n, n, 0xfff0fff0;
    mov.b32 one, 0x3f803f80; fma.rn.bf16x2 t, m, one, $2; xor.b32 minus, $2, 0x80008000; fma.rn.bf16x2 t, t, one, minus;
    or.b32 c, m, 0x80008000; sub.u32 c, c, $3; prmt.b32 c, c, c, 0xbb99;
    lop3.b32 n, c, n, t, 0xca;
    mov.b32 t, 0; fma.rn.bf16x2 n, m, t, n;
    lop3.b32 $0, $1, n, 0x80008000, 0xe4; }""")  # a NaN times 0 is NaN


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for earlier kernels; only weights may be read before."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents(EARLY: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_dependencies(EARLY: tl.constexpr):
    """Wait for earlier kernels; returns at once if they have been waited for."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def after_loads(w, FP32: tl.constexpr):
    """Words [M, 4] unchanged, but not before the loads above are issued.

    The compiler would otherwise wait for the words that are loading, use them, and load the next ones when registers
    become free. It moves no load past a barrier, and a barrier of one warp costs nothing.
    """
    if not FP32:
        w = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=&r,=&r,=&r,=&r,r,r,r,r,~{memory}",
            [w],
            dtype=tl.int32,
            is_pure=False,
            pack=4,
        )
    return w


@triton.jit
def loads_begun(FP32: tl.constexpr):
    """The loads above are issued before anything below; see `after_loads`."""
    if not FP32:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r,~{memory}", [0], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def larger_pair(a, b):
    """Larger of two words' bf16, half by half; NaN if either is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def pair(a, b):
    """Two bf16 tensors → words."""
    return tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpack(
    w, scale, FORMAT: tl.constexpr, FP32: tl.constexpr, HALVES: tl.constexpr = False, SCALED: tl.constexpr = False
):
    """Words int32 [M, 4] → values [M, S, 2], bf16 or fp32. Step s, pair element p is column (of those in the 16 bytes)

    FP4 8·(s // 4) + s % 4 + 4p; FP8 4·(s // 2) + s % 2 + 2p; bf16 and fp32 2s + p.

    scale int32 [M, 1 or 2] E8M0 or E4M3 bytes of FP4 (one for all 4 words, or one for 2). FP8 comes without its scale
    unless SCALED, by E8M0 [M, 1]. On the bf16 path E4M3's NaN code is 480. HALVES: MXFP4 as fp16, times 2^−14 and
    without its scale.
    """
    M: tl.constexpr = w.shape[0]
    if FORMAT == "fp32":
        v = tl.reshape(w.to(tl.float32, bitcast=True), [M, 2, 2])
    elif FP32:
        bits: tl.constexpr = 4 if FORMAT == "mxfp4" or FORMAT == "nvfp4" else 8 if FORMAT == "fp8" else 16
        j = tl.arange(0, 16 // bits)[None, None, :, None]
        p = tl.arange(0, 2)[None, None, None, :]
        code = (w[:, :, None, None] >> (bits * j + 16 * p)) & ((1 << bits) - 1)
        if FORMAT == "bf16":
            v = (code << 16).to(tl.float32, bitcast=True)
        elif FORMAT == "fp8":
            v = decode_e4m3(code)
            if SCALED:
                v *= decode_e8m0(scale)[:, :, None, None]
        else:
            s = decode_e8m0(scale) if FORMAT == "mxfp4" else decode_e4m3(scale)
            s = tl.reshape(tl.broadcast_to(s[:, :, None], [M, s.shape[1], 4 // s.shape[1]]), [M, 4])
            v = decode_e2m1(code) * s[:, :, None, None]
        v = tl.reshape(v, [M, 64 // bits, 2])
    elif FORMAT == "bf16":
        a, b = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [w], dtype=(tl.bfloat16,) * 2, is_pure=True, pack=1
        )
        v = tl.join(a, b)
    elif FORMAT == "fp8":
        if SCALED:
            s = tl.broadcast_to(bf16_twice(scale, "mxfp4"), [M, 4])
            a, c, b, d = tl.inline_asm_elementwise(
                E4M3_SCALED, "=&h,=&h,=&h,=&h,r,r", [w, s], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
            )
        else:
            a, c, b, d = tl.inline_asm_elementwise(
                E4M3_PAIRS, "=&h,=&h,=&h,=&h,r", [w], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
            )
        v = tl.reshape(tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 1, 3, 2)), [M, 8, 2])
    else:
        if HALVES:
            a, c, e, g, b, d, f, h = tl.inline_asm_elementwise(
                E2M1_HALVES, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r", [w], dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
        else:
            s = bf16_twice(scale, FORMAT)
            s = tl.reshape(tl.broadcast_to(s[:, :, None], [M, s.shape[1], 4 // s.shape[1]]), [M, 4])
            a, c, e, g, b, d, f, h = tl.inline_asm_elementwise(
                E2M1_PAIRS,
                "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
                [w, s],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        v = tl.join(tl.join(tl.join(a, b), tl.join(e, f)), tl.join(tl.join(c, d), tl.join(g, h)))
        v = tl.reshape(tl.permute(v, (0, 1, 3, 4, 2)), [M, 16, 2])  # from [M, 4, pair, step // 2, step % 2]
    return v


@triton.jit
def bf16_twice(scale, FORMAT: tl.constexpr):
    """Scale bytes int32 → the scale as bf16 in both halves of a word."""
    if FORMAT == "mxfp4":  # byte 0 is the subnormal 2^−127, 255 is NaN
        bits = tl.maximum(scale << 7, 0x40) | (((scale + 1) >> 2) & 0x40)
    else:
        bits = decode_e4m3(scale).to(tl.int32, bitcast=True) >> 16
        bits = bits & 0xFFFF
    return bits | (bits << 16)
