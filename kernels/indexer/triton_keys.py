"""Operands of the indexer's products: queries unchanged, keys decoded in registers.

FP4 and FP8 codes become bf16 exactly: their bits are moved, two values at a time, and multiplied by a power of two. The
threads that multiply the keys read them as words, 16 bytes a thread, so neither shared memory nor a barrier is needed.
Therefore the dims and the keys of a product have an order of their own (`_of_words`, `places`).
"""

import triton
import triton.language as tl

from dsv4.kernels.cache_rows.formats import PLAIN_FORM
from dsv4.kernels.quantize.triton_codes import decode_e2m1, decode_e4m3, decode_e8m0, widen

PLAIN = tl.constexpr(PLAIN_FORM)  # of FORMAT; of packed keys FORMAT % 16 is the bits of a code, FORMAT // 16 its block
WORDS = tl.constexpr(16)  # dims of a key in one product: the four threads of its row read 16 bytes each
WARPS = tl.constexpr(4)  # of a program

# Two bf16 times two bf16, a power of two each. (There is no multiplication before capability 9.0.)
TIMES = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
# Signs, magnitudes of E4M3, and both of E2M1 in two halves.
_SIGNS, _E4M3, _E2M1 = tl.constexpr(-2147450880), tl.constexpr(0x07F007F0), tl.constexpr(-2118090304)
_E4M3_SCALE = tl.constexpr(0x7B807B80)  # 2^120, twice


@triton.jit
def places(TILE: tl.constexpr):
    """The key of a tile that belongs to each row of a product: threads own other rows of the product than of the tile
    as read."""
    m = tl.arange(0, TILE)
    r, w, low = m // 8 % 2, m // 16 % WARPS, m % 8
    return m // (16 * WARPS) * (16 * WARPS) + r * (8 * WARPS) + w * 8 + low


@triton.jit
def _of_words(pairs, TILE: tl.constexpr, PART: tl.constexpr, PAIRS: tl.constexpr):
    """bf16 [TILE, PART, PAIRS, half] → [TILE, PART·PAIRS·2] in the order of a product's rows and dims.

    A thread's dims of a product are two neighbours of every eight: those become the halves of its words.
    """
    x = tl.reshape(pairs, [TILE // (16 * WARPS), 2, WARPS, 8, 4, PART // 4, PAIRS, 2])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 5, 6, 4, 7)), [TILE, PART * PAIRS * 2])


@triton.jit
def operand_queries(
    Q, at, live, part, D: tl.constexpr, DIMS: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr
):
    """Rows of queries at [N] → bf16 [DIMS/PARTS, N], one part of their dims in the order of the decoded keys."""
    K: tl.constexpr = DIMS // PARTS
    i = tl.arange(0, K)[None, :] + part * K
    q = tl.load(Q + at[:, None] + i, mask=live[:, None] & (i < D), other=0.0)
    if FORMAT != PLAIN:  # chunk, word, half, pair
        HELD: tl.constexpr = 32 // (FORMAT % 16)  # dims of a word
        q = tl.reshape(tl.permute(tl.reshape(q, [N, 4, K // (4 * HELD), 2, HELD // 2]), (0, 2, 4, 1, 3)), [N, K])
    return tl.trans(q)


@triton.jit
def read_keys(
    KEYS,
    SCALES,
    at,
    scale_at,
    live,
    scale_live,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows of keys at [TILE] in their stored form, and their scales: a tuple for `operand_keys`. Scales of whole rows
    have places of their own, `scale_at` where `scale_live`."""
    if FORMAT == PLAIN:
        i = tl.arange(0, DIMS)[None, :]
        raw = (tl.load(KEYS + at[:, None] + i, mask=live[:, None] & (i < D), other=0.0),)
    else:
        HELD: tl.constexpr = 32 // (FORMAT % 16)  # dims of a word
        BLOCK: tl.constexpr = FORMAT // 16
        PART: tl.constexpr = DIMS // HELD // PARTS
        raw = ()
        for part in tl.static_range(PARTS):
            i = tl.arange(0, PART)[None, :] + part * PART
            raw = raw + (tl.load(KEYS + at[:, None] + i, mask=live[:, None] & (i < D // HELD), other=0),)
        if BLOCK == 0:
            raw = raw + (tl.load(SCALES + scale_at, mask=scale_live, other=0.0),)
        elif D == 128:  # one word holds the scales of a row
            raw = raw + (tl.load(SCALES + scale_at, mask=live, other=0),)
        else:
            for part in tl.static_range(PARTS):
                i = ((tl.arange(0, 4) + part * 4) * (PART // 4) // (BLOCK // HELD))[None, :]
                raw = raw + (tl.load(SCALES + scale_at[:, None] + i, mask=live[:, None] & (i < D // BLOCK), other=0),)
    return raw


@triton.jit
def _halves(word):
    """int32 → its halves as bf16, along a new last axis."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def _times(two, factor):
    return tl.inline_asm_elementwise(TIMES, "=r,r,r", [two, factor], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _block_scales(raw, part: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr):
    """E8M0 bytes s of a chunk each, int32 [TILE, 4] → 2^(s − 65) of E2M1, 2^(s − 71) of E4M3, as two equal bf16.

    That is 2^126 (2^120) · 2^(s − 127), less a factor of 2^64 that the sum over heads restores. Exact for keys of 2^−62
    and more with scales up to 2^65; larger ones become infinite.
    """
    if D == 128:  # four scales; of E4M3 a part has half of them, each for two chunks
        c = tl.arange(0, 4) if BITS == 4 else part * 2 + tl.arange(0, 4) // 2
        s = (raw[PARTS][:, None] >> (c * 8)[None, :]) & 255
    else:
        s = raw[PARTS + part].to(tl.int32)
    if BITS == 4:
        factor = tl.minimum(s, 193) * 0x00800080 + 0x1F001F00
    else:
        factor = tl.minimum(s, 199) * 0x00800080 + 0x1C001C00
    return factor


@triton.jit
def operand_keys(
    raw,
    part: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One part of the result of `read_keys` → bf16 [TILE, DIMS/PARTS]: less a factor of 2^64 where blocks have scales,
    without the scale of the row where it has one.

    A bf16 with the magnitude of an E2M1 (E4M3) code at the end of its exponent is 2^−126 (2^−120) times its value,
    subnormals included. FP8's NaN becomes 480.
    """
    if FORMAT == PLAIN:
        k = raw[0]
        x = tl.reshape(k, [TILE // (16 * WARPS), 2, WARPS, 8, DIMS])
        k = tl.reshape(tl.permute(x, (0, 2, 1, 3, 4)), [TILE, DIMS])
    elif FORMAT % 16 == 4:
        PART: tl.constexpr = DIMS // 8 // PARTS
        factor = tl.broadcast_to(_block_scales(raw, part, D, PARTS, 4)[:, :, None], [TILE, 4, PART // 4])
        w = tl.reshape(raw[part], [TILE, 4, PART // 4])  # pair i: nibbles i and i + 4
        a = _times(((w & 0x000F000F) * 0x1040) & _E2M1, factor)  # one multiplication moves sign and magnitude
        b = _times(((w & 0x00F000F0) * 0x0104) & _E2M1, factor)
        w = w >> 8
        c = _times(((w & 0x000F000F) * 0x1040) & _E2M1, factor)
        d = _times(((w & 0x00F000F0) * 0x0104) & _E2M1, factor)
        k = _of_words(_halves(tl.join(tl.join(a, c), tl.join(b, d))), TILE, PART, 4)
    else:
        PART: tl.constexpr = DIMS // 4 // PARTS
        w = raw[part]  # pair i: bytes i and i + 2
        if FORMAT // 16 == 0:
            factor = tl.full([TILE, PART], _E4M3_SCALE, tl.int32)
        else:
            factor = tl.broadcast_to(_block_scales(raw, part, D, PARTS, 8)[:, :, None], [TILE, 4, PART // 4])
            factor = tl.reshape(factor, [TILE, PART])
        a = _times(((w << 4) & _E4M3) | ((w << 8) & _SIGNS), factor)
        b = _times(((w >> 4) & _E4M3) | (w & _SIGNS), factor)
        k = _of_words(_halves(tl.join(a, b)), TILE, PART, 2)
    return k


@triton.jit
def _own(x):
    """Returns x. For tcgen05, Triton (3.6, 3.7) multiplies converted fp32 operands in TF32 whatever precision is
    requested, unless it cannot see the conversion; a sum hides the conversion."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], 1]), 2)


@triton.jit
def dots_fp32(
    Q,
    q_at,
    q_live,
    KEYS,
    at,
    scale_at,
    live,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    N: tl.constexpr,
):
    """q·k as fp32 [TILE, N], products and sums in fp32; without the scale of a whole row. 32 dims at a time."""
    dots = tl.zeros([TILE, N], tl.float32)
    for start in tl.static_range(0, D, 32):
        i = tl.arange(0, 32)[None, :] + start
        q = widen(tl.load(Q + q_at[:, None] + i, mask=q_live[:, None] & (i < D), other=0.0))
        if FORMAT % 16 == 4:
            byte = tl.load(KEYS + at[:, None] + i // 2, mask=live[:, None], other=0).to(tl.int32)
            k = decode_e2m1((byte >> (i % 2 * 4)) & 15)
        else:
            k = tl.load(KEYS + at[:, None] + i, mask=live[:, None] & (i < D), other=0)
            if FORMAT == PLAIN:
                k = widen(k)
            else:
                k = decode_e4m3(k)
        if FORMAT // 16 != 0:  # blocks of 32, as the steps here
            k *= decode_e8m0(tl.load(KEYS + scale_at + start // 32, mask=live, other=0))[:, None]
        dots = tl.dot(_own(k), tl.trans(_own(q)), dots, input_precision="ieee")
    return dots
