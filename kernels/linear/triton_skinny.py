"""Products of a few tokens (at most 8 · NH) with many rows of a weight. Each byte of the weight is read once, and these
reads take the time.

A warp owns one slice of 128 columns at a time, for all rows and tokens of its program; the slices of KS warps are
summed at the end. Lane 4r + q of a warp reads 16 bytes of weight row r and, for token r, the same columns of x. An
m16n8k16 product of tensor cores needs its operands in these lanes, so nothing passes through shared memory and no warp
waits for another.

One or two tokens leave columns of the product unused. With MXFP4 decoding then costs more than the reads, so these
columns are used (APART): column 2g + t is token t, and only lane q = g of four holds values of it. So each of the four
blocks of 32 columns of a slice has its own sum, which its scale multiplies in lane g, which has exactly that scale.
Codes then need no scale and fit fp16; x is scaled into its range by a power of two.
"""

import triton
import triton.language as tl

from dsv4.kernels.linear.triton_words import (
    HALVES_DOWN,
    ROUND_E4M3,
    after_loads,
    larger_pair,
    launch_dependents,
    loads_begun,
    pair,
    unpack,
    wait_for_dependencies,
)
from dsv4.kernels.quantize.triton_codes import (
    INTERPRETED,
    decode_e8m0,
    e4m3_exponent,
    magnitude,
    narrow,
    power_of_two,
    round_e4m3,
    turn,
    widen,
)

RANGE = tl.constexpr(2048)  # columns of two tokens that are scanned together before the products


@triton.jit
def lanes(KS: tl.constexpr, REPEATS: tl.constexpr):
    """(q, r, slice, repeat) of each thread's REPEATS vectors, int32 [32·KS·REPEATS]."""
    m = tl.arange(0, 32 * KS * REPEATS)
    return m & 3, (m >> 2) & 7, (m // 32) & (KS - 1), m // (32 * KS)


@triton.jit
def tokens(KS: tl.constexpr, NH: tl.constexpr, APART: tl.constexpr):
    """(token of each of a thread's vectors of x, whether it has columns of it), int32 and int1 [32·KS·4·NH]."""
    q, r, s, repeat = lanes(KS, 4 * NH)
    if APART:
        token, mine = r & 1, q == r >> 1
    else:
        token, mine = r + 8 * (repeat >> 2), q >= 0
    return token, mine


@triton.jit
def _columns(k, live, K: tl.constexpr, KS: tl.constexpr, NH: tl.constexpr, FORMAT: tl.constexpr):
    """(columns of x [32·KS·4·NH, 8] in the order of `unpack`, whether they are there)."""
    q, r, s, repeat = lanes(KS, 4 * NH)
    piece = repeat & 3
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        column = 32 * q + 8 * piece
    elif FORMAT == "fp8":
        column = 64 * (piece >> 1) + 16 * q + 8 * (piece & 1)
    else:
        column = 32 * piece + 8 * q
    column = k + 128 * s + column
    i = tl.arange(0, 8)[None, :]
    if K % (128 * KS) == 0:
        there = live[:, None]
    elif K % 8 == 0:
        there = (live & (column < K))[:, None]
    else:
        there = live[:, None] & (column[:, None] + i < K)
    return column[:, None] + i, there


@triton.jit
def fetch(
    X,
    at,
    live,
    k,
    K: tl.constexpr,
    KS: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM,
    CIS,
    cis_at,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
):
    """The values that `inputs` works on, [32·KS·4·NH, 8]: columns k + 128·slice … of x, of NORM [K] and of CIS.

    at, cis_at int64 [32·KS·4·NH]: offset of the token's row; live: whether there is such a token.
    """
    column, there = _columns(k, live, K, KS, NH, FORMAT)
    v = tl.load(X + at[:, None] + column, mask=there, other=0.0)
    weight, cis = v, v
    if NORM is not None:
        weight = tl.load(NORM + column, mask=there, other=0.0)
    if TURNED > 0:
        c = column % HEAD - (HEAD - TURNED)
        cis = tl.load(CIS + cis_at[:, None] + c, mask=there & (c >= 0), other=0.0)
    return v, weight, cis


@triton.jit
def inputs(
    v,
    weight,
    cis,
    live,
    k,
    K: tl.constexpr,
    KS: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    NORM,
    inverse,
    SIMULATE: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    up,
    APART: tl.constexpr,
):
    """Operand [KS, 128, 8·NH] from the result of `fetch`, in the column order of `unpack`.

    NORM and inverse fp32 [32·KS·4·NH]: x is first normalised to x · inverse · NORM. TURNED: the last columns of each
    head of HEAD are rotated by CIS. APART: fp16, times up fp32 (as inverse).
    """
    DTYPE: tl.constexpr = v.dtype
    if NORM is not None:
        # y = x32 * r; y = y * weight; y.to(x.dtype)
        v = narrow(widen(v) * inverse[:, None] * widen(weight), DTYPE)
    if TURNED > 0:
        v = _turned(v, cis, _columns(k, live, K, KS, NH, FORMAT)[0] % HEAD >= HEAD - TURNED)
    if SIMULATE:
        v = _through_e4m3(v, KS, NH, FP32, APART)
    if APART:
        v = _halved(v, up)
    elif FP32:
        v = widen(v)
    v = tl.reshape(v, [NH, 4, KS, 8, 4, 2, 2, 2])
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        v = tl.permute(v, (2, 1, 6, 4, 7, 5, 0, 3))
    elif FORMAT == "fp8":
        v = tl.permute(v, (2, 1, 5, 4, 7, 6, 0, 3))
    else:
        v = tl.permute(v, (2, 1, 5, 4, 6, 7, 0, 3))
    return tl.reshape(v, [KS, 128, 8 * NH])


@triton.jit
def _turned(v, cis, last):
    """Columns [M, 8] of v unchanged or, where `last`, pairs times cis."""
    # pairs * cis, stored back in x.dtype
    M: tl.constexpr = v.shape[0]
    a, b = tl.split(tl.reshape(widen(v), [M, 4, 2]))
    cos, sin = tl.split(tl.reshape(cis, [M, 4, 2]))
    a, b = turn(a, b, cos, sin)
    return tl.where(last, narrow(tl.reshape(tl.join(a, b), [M, 8]), v.dtype), v)


@triton.jit
def _halved(v, up):
    """v [M, 8] times up fp32 [M], powers of two, as fp16; on a GPU bf16 is multiplied two at a time, which is also
    exact."""
    if INTERPRETED:
        v = widen(v) * up[:, None]
    else:
        v = (v * up.to(v.dtype)[:, None]).to(tl.float32)
    return v.to(tl.float16)


@triton.jit
def _through_e4m3(v, KS: tl.constexpr, NH: tl.constexpr, FP32: tl.constexpr, APART: tl.constexpr):
    """Each token's 128 columns rounded to E4M3 by their own scale, as `simulate_fp8_blocks` does, and back.

    APART (not with FP32): a token's columns lie in four of the eight places, 32 in each; they share one scale.
    """
    M: tl.constexpr = 32 * KS * 4 * NH
    if FP32:
        x = tl.reshape(widen(v), [NH, 4, KS, 8, 4, 8])
        k = e4m3_exponent(tl.max(tl.max(tl.max(magnitude(x), 5), 4), 1))[:, None, :, :, None, None]
        y = narrow(tl.reshape(round_e4m3(x * power_of_two(-k)) * power_of_two(k), [M, 8]), v.dtype)
    else:
        even, odd = tl.split(tl.reshape(v, [M, 4, 2]))
        w = pair(even, odd)
        m = tl.reshape(w & 0x7FFF7FFF, [NH, 4, KS, 8, 4, 4])
        m = tl.reduce(tl.reduce(m, 5, larger_pair), 1, larger_pair)
        most = tl.max(tl.maximum(m & 0x7FFF0000, m << 16), 3)
        if APART:
            whole = tl.max(tl.reshape(most, [NH, KS, 4, 2]), 2, keep_dims=True)
            most = tl.reshape(tl.broadcast_to(whole, [NH, KS, 4, 2]), [NH, KS, 8])
        k = e4m3_exponent(most)[:, None, :, :, None, None]
        k = tl.reshape(tl.broadcast_to((k + 127) * 0x00800080, [NH, 4, KS, 8, 4, 4]), [M, 4])
        w = tl.inline_asm_elementwise(
            ROUND_E4M3,
            "=&r,r,r,r,r",
            [w, k - 0x00C000C0, k - 0x03000300, k + 0x04600460],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        y = tl.reshape(unpack(w, 0, "bf16", False), [M, 8])
    return y


@triton.jit
def _inverse_rms(X, row_at, count, K: tl.constexpr, KS: tl.constexpr, NH: tl.constexpr, eps):
    """(mean(x²) + eps)^−½ of each lane's token, fp32 [32·KS·4·NH]. row_at int64 [T]: where a token's row begins."""
    T: tl.constexpr = row_at.shape[0]
    i, t = tl.arange(0, RANGE // 2)[None, :], tl.arange(0, T)[:, None]
    total = tl.zeros([T, RANGE // 2], tl.float32)
    for k in range(0, K, RANGE // 2):
        x = widen(tl.load(X + row_at[:, None] + (k + i), mask=(t < count) & (k + i < K), other=0.0))
        total += x * x
    inverse = 1 / tl.sqrt(tl.sum(total, 1) / K + eps)
    inverse = tl.reshape(inverse, [NH, 1, 1, T // NH, 1])  # one or two tokens: the row is read again for each
    return tl.reshape(tl.broadcast_to(inverse, [NH, 4 * KS, 8 * NH // T, T // NH, 4]), [32 * KS * 4 * NH])


@triton.jit
def _range(X, row_at, count, K: tl.constexpr, KS: tl.constexpr):
    """Powers of two that bring two tokens, whose rows begin at row_at int64 [2], into the middle of fp16: (up fp32
    [32·KS·4] as lanes of x take it, down fp32 [2] that takes it back). Values that become 0 are below 2^−37 of the
    token's largest value."""
    i, t = tl.arange(0, RANGE)[None, :], tl.arange(0, 2)[:, None]
    most = tl.zeros([2, RANGE], tl.int32)
    for k in tl.static_range(0, K, RANGE):
        x = tl.load(X + row_at[:, None] + (k + i), mask=(t < count) & (k + i < K), other=0.0)
        most = tl.maximum(most, magnitude(widen(x)))
    e = tl.minimum(tl.maximum(267 - (tl.max(most, 1) >> 23), 1), 253)  # the largest becomes 2^13 … 2^14
    up, down = (e << 23).to(tl.float32, bitcast=True), ((254 - e) << 23).to(tl.float32, bitcast=True)
    up = tl.broadcast_to(tl.reshape(up, [1, 1, 2, 1]), [4 * KS, 4, 2, 4])
    return tl.reshape(up, [32 * KS * 4]), down


@triton.jit
def _words(W, W_UP, k, end, first, rows, K: tl.constexpr, KS: tl.constexpr, RH: tl.constexpr, FORMAT: tl.constexpr):
    """Words int32 [M, 4] of columns k + 128·slice …; zeros from column `end` or K on."""
    C: tl.constexpr = (
        1 if FORMAT == "mxfp4" or FORMAT == "nvfp4" else 2 if FORMAT == "fp8" else 4 if FORMAT == "bf16" else 8
    )
    PER: tl.constexpr = 8 // C  # columns of a word
    q, r, s, repeat = lanes(KS, RH * C)
    rh, piece = repeat & (RH - 1), repeat // RH
    place = 32 * (piece >> 1) + 8 * q + 4 * (piece & 1) if FORMAT == "fp32" else 16 * piece + 4 * q
    word = k // PER + (128 // PER) * s + place
    there = (q >= 0) & (k < end) if K % (128 * KS) == 0 else (word < K // PER) & (k < end)
    if W_UP is None:
        row = tl.minimum(first + rh * 8 + r, rows - 1).to(tl.int64)
    else:  # 8 rows of the gate, 8 rows up
        row = tl.minimum(first + (rh >> 1) * 8 + r, rows - 1).to(tl.int64)
        W = tl.where((rh & 1) == 0, W, W_UP)
    place = W + (row * (K // PER) + word)
    return tl.load(
        place[:, None] + tl.arange(0, 4)[None, :], mask=there[:, None], other=0, eviction_policy="evict_first"
    )


@triton.jit
def _scales(
    S,
    S_UP,
    k,
    end,
    first,
    rows,
    K: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    FORMAT: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """Scales of what `_words` loads: bytes int32 [M, 1] (MXFP4) or [M, 2] (NVFP4), or fp32 [M] of FP8's blocks."""
    FP8: tl.constexpr = FORMAT == "fp8"
    EACH: tl.constexpr = 2 if FORMAT == "nvfp4" else 1
    COLUMNS: tl.constexpr = BK if FP8 else 32 // EACH
    q, r, s, rh = lanes(KS, RH)
    block = (k + 128 * s + (0 if FP8 else 32 * q)) // COLUMNS
    there = (q >= 0) & (k < end) if K % (128 * KS) == 0 else (block * COLUMNS < K) & (k < end)
    if S_UP is None:
        row = tl.minimum(first + rh * 8 + r, rows - 1).to(tl.int64)
    else:
        row = tl.minimum(first + (rh >> 1) * 8 + r, rows - 1).to(tl.int64)
        S = tl.where((rh & 1) == 0, S, S_UP)
    place = S + ((row // BO) * ((K + BK - 1) // BK) + block if FP8 else row * (K // COLUMNS) + block)
    scale = tl.load(place, mask=there, other=0)
    if FP8:
        if S.dtype.element_ty != tl.float32:
            scale = decode_e8m0(scale)
    elif EACH == 1:
        scale = scale.to(tl.int32)[:, None]
    else:
        scale = tl.join(scale, tl.load(place + 1, mask=there, other=0)).to(tl.int32)
    return scale


@triton.jit
def skinny(
    X,
    at,
    live,
    W,
    S,
    first,
    rows,
    K: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    SIMULATE: tl.constexpr = False,
    W_UP=None,
    S_UP=None,
    NORM=None,
    eps=0.0,
    CIS=None,
    cis_at=None,
    HEAD: tl.constexpr = 1,
    TURNED: tl.constexpr = 0,
    begin=0,
    SPAN: tl.constexpr = 0,
    APART: tl.constexpr = False,
    row_at=None,
    count=0,
    EARLY: tl.constexpr = 0,
    THEN: tl.constexpr = False,
):
    """x (tokens `at`) times weight rows from `first` on: fp32 [8·RH, 8·NH], or [8·RH, 2] if APART.

    at, live: as `fetch` takes them, of the tokens that `tokens` names. W int32: words of the weight, `rows` contiguous
    rows of K columns; S its scales, uint8 (E8M0 or E4M3) or fp32 (of blocks BO × BK). W_UP, S_UP: 8 rows of W and 8
    rows of W_UP in turn. The global scale of NVFP4 is left to the caller. X, SIMULATE and NORM to TURNED: see `inputs`.
    SPAN, a multiple of 128·KS: only columns begin … begin + SPAN. APART: MXFP4 and up to two tokens; not with NORM.
    APART and NORM read whole rows first: row_at int64 [8·NH] or, for one or two tokens, [2], of which the first `count`
    are tokens. EARLY: the wait for earlier kernels is here, after the first EARLY − 1 (at most two) steps of the weight
    are issued; X, CIS, at and row_at must not depend on those kernels. THEN: the next kernel may start after that.
    """
    C: tl.constexpr = (
        1 if FORMAT == "mxfp4" or FORMAT == "nvfp4" else 2 if FORMAT == "fp8" else 4 if FORMAT == "bf16" else 8
    )
    SCALED: tl.constexpr = FORMAT != "bf16" and FORMAT != "fp32"
    STEP: tl.constexpr = 128 * KS
    end = begin + (SPAN if SPAN else (K + STEP - 1) // STEP * STEP)
    acc = tl.zeros([KS, 8 * RH, 8 * NH], tl.float32)
    if EARLY == 1:
        wait_for_dependencies(True)
    w = _words(W, W_UP, begin, end, first, rows, K, KS, RH, FORMAT)
    scale = _scales(S, S_UP, begin, end, first, rows, K, KS, RH, FORMAT, BO, BK) if SCALED else 0
    if EARLY == 2:
        loads_begun(FP32)
        wait_for_dependencies(True)
    w_next = _words(W, W_UP, begin + STEP, end, first, rows, K, KS, RH, FORMAT)
    scale_next = _scales(S, S_UP, begin + STEP, end, first, rows, K, KS, RH, FORMAT, BO, BK) if SCALED else 0
    loads_begun(FP32)
    if EARLY > 2:
        wait_for_dependencies(True)
    launch_dependents(THEN)
    # while the first words are loaded
    inverse = None if NORM is None else _inverse_rms(X, row_at, count, K, KS, NH, eps)
    up, down = _range(X, row_at, count, K, KS) if APART else (None, None)
    for k in tl.range(begin, end, STEP, loop_unroll_factor=2):  # w and w_next change roles without moves
        x, weight, cis = fetch(X, at, live, k, K, KS, NH, FORMAT, NORM, CIS, cis_at, HEAD, TURNED)
        w = after_loads(w, FP32)
        b = inputs(x, weight, cis, live, k, K, KS, NH, FORMAT, FP32, NORM, inverse, SIMULATE, HEAD, TURNED, up, APART)
        a = unpack(w, scale, FORMAT, FP32, APART)
        a = tl.permute(tl.reshape(a, [C, RH, KS, 8, 4, 8 // C, 2, 2]), (2, 1, 3, 0, 5, 4, 6, 7))
        a = tl.reshape(a, [KS, 8 * RH, 128])
        if FORMAT == "fp8" or APART:  # the scale of a block multiplies its sum
            by = decode_e8m0(scale) if APART else scale
            part = tl.reshape(tl.dot(a, b, input_precision="ieee"), [KS, RH, 8, NH, 4, 2])
            by = tl.permute(tl.reshape(by, [RH, KS, 8, 4]), (1, 0, 2, 3))[:, :, :, None, :, None]
            acc += tl.reshape(part * by, [KS, 8 * RH, 8 * NH])
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        w, scale = w_next, scale_next
        w_next = _words(W, W_UP, k + 2 * STEP, end, first, rows, K, KS, RH, FORMAT)
        scale_next = _scales(S, S_UP, k + 2 * STEP, end, first, rows, K, KS, RH, FORMAT, BO, BK) if SCALED else 0
    y = tl.sum(acc, 0)
    if APART:
        y = tl.sum(tl.reshape(y, [8 * RH, 4, 2]), 1) * (down * HALVES_DOWN)[None, :]
    return y
