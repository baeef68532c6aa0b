"""Number formats inside Triton kernels: scales, codes and rounding bit by bit, rotation and Hadamard of rows.

Everything here is exact arithmetic on fp32 bits, without conversions that some GPUs lack and without fp32 division, so
results equal `formats.py` bit for bit. A tile of rows is fp32 [R, B], B a power of two.
"""

import triton
import triton.language as tl

from dsv4.kernels.launch import interpreting

INTERPRETED = tl.constexpr(interpreting())  # in the interpreter .to(tl.bfloat16) truncates


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """fp32 → DTYPE, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, up)  # adding to a NaN could wrap around
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def widen(x):
    """Any float → fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 → the nearest value of DTYPE, still fp32: what a composition does between two of its steps."""
    return widen(narrow(x, DTYPE))


# Scales --------------------------------------------------------------------------------------------------------------


@triton.jit
def magnitude(x):
    """Bits of |x| as int32, in the order of |x|, with NaN above everything: their maximum is that of |x|, or NaN if any
    is."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e4m3_exponent(amax):
    """k of the scale 2^k = 2^⌈log2(max(amax, 1e-4) / 448)⌉ for amax as `magnitude` gives it; 0 where it is not finite.

    448 = 1.75·2^8: the quotient exceeds 2^(e−8) exactly when the mantissa exceeds 1.75, also after rounding to fp32,
    since neighbours of 448 differ by more than half an ulp of the quotient.
    """
    amax = tl.maximum(amax, 0x38D1B717)
    k = (amax >> 23) - 135 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(amax >= 0x7F800000, 0, k)


@triton.jit
def e2m1_exponent(amax):
    """k of the scale 2^k = 2^⌈log2(max(amax, 6·2^−126) / 6)⌉; 6 = 1.5·2^2. See `e4m3_exponent`."""
    amax = tl.maximum(amax, 0x01C00000)
    k = (amax >> 23) - 129 + ((amax & 0x7FFFFF) > 0x400000).to(tl.int32)
    return tl.where(amax >= 0x7F800000, 0, k)


@triton.jit
def power_of_two(k):
    """fp32 2^k, k int32 −126 … 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(byte):
    """E8M0 byte (any integer type) → fp32 2^(byte − 127); 0 is the subnormal 2^−127, 255 is NaN."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


# Codes ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _with_sign(r, x):
    """r ≥ 0 with the sign bit of x: zeros keep theirs."""
    return (r.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """fp32 → the nearest E4M3 value as fp32: clamped to ±448, ties to even; NaN stays."""
    a = tl.abs(x)
    a = tl.where(a > 448.0, 448.0, a)
    # The step is 2^(e−3), at least 2^−9. Adding 2^23 steps leaves no bits below one step, and rounds as fp32 does.
    e = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, 121)
    shift = ((e + 20) << 23).to(tl.float32, bitcast=True)
    return _with_sign((a + shift) - shift, x)


@triton.jit
def encode_e4m3(x):
    """fp32 → E4M3 byte as int32, rounded as `round_e4m3` does; NaN is 0x7F."""
    r = round_e4m3(x)
    bits = r.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = tl.where(bits < 0x3C800000, (tl.abs(r) * 512.0).to(tl.int32), (bits >> 20) - 960)  # below 2^−6: subnormal
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return code | ((r.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def e4m3_bytes(x):
    """fp32 → E4M3 bytes uint8, as `encode_e4m3`, by the conversion of capability 8.9 and later, which the interpreter
    lacks."""
    if INTERPRETED:
        codes = encode_e4m3(x).to(tl.uint8)
    else:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def e4m3_blocks(x):
    """fp32 [..., B] → E4M3 bytes uint8 [..., B] and their scales fp32 [...], as `simulate_fp8_blocks` has them."""
    exponent = e4m3_exponent(tl.max(magnitude(x), -1))
    return e4m3_bytes(x * tl.expand_dims(power_of_two(-exponent), -1)), power_of_two(exponent)


@triton.jit
def decode_e4m3(byte):
    """E4M3 byte (any integer type) → fp32; S.1111.111 is NaN."""
    byte = byte.to(tl.int32)
    low = byte & 0x7F
    a = tl.where(low < 8, low.to(tl.float32) * 0.001953125, ((low << 20) + 0x3C000000).to(tl.float32, bitcast=True))
    bits = tl.where(low == 0x7F, 0x7FC00000, a.to(tl.int32, bitcast=True)) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_e2m1(x):
    """fp32 → the nearest E2M1 value as fp32: saturating at ±6, ties to the even code; NaN becomes 0."""
    a = tl.abs(x)
    a = tl.where(a > 6.0, 6.0, a)
    a = tl.where(x != x, 0.0, a)
    e = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, 127)  # the step is 2^(e−1), at least 0.5
    shift = ((e + 22) << 23).to(tl.float32, bitcast=True)
    return _with_sign((a + shift) - shift, x)


@triton.jit
def encode_e2m1(x):
    """fp32 → E2M1 code 0 … 15 as int32, rounded as `round_e2m1` does."""
    r = round_e2m1(x)
    bits = r.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = tl.where(bits < 0x3F800000, (tl.abs(r) * 2.0).to(tl.int32), (bits >> 22) - 252)
    return code | ((r.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """E2M1 code (any integer type, 0 … 15) → fp32."""
    code = code.to(tl.int32)
    low = code & 7
    a = tl.where(low < 2, low.to(tl.float32) * 0.5, ((low << 22) + 0x3F000000).to(tl.float32, bitcast=True))
    return (a.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


# Tiles of rows -------------------------------------------------------------------------------------------------------


@triton.jit
def fp8_blocks(x, columns, R: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Tile [R, B] through E4M3 in blocks of BLOCK (which divides B) along its first `columns` columns; the others
    stay."""
    x = tl.reshape(x, [R, B // BLOCK, BLOCK])
    column = tl.arange(0, B // BLOCK)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    k = e4m3_exponent(tl.max(tl.where(column < columns, magnitude(x), 0), 2))[:, :, None]
    y = round_e4m3(x * power_of_two(-k)) * power_of_two(k)  # powers of two: exact, as the division by the scale is
    return tl.reshape(tl.where(column < columns, y, x), [R, B])


@triton.jit
def fp4_blocks(x, columns, R: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    """Tile [R, B] through E2M1 in blocks of BLOCK (which divides B) along its first `columns` columns; the others
    stay."""
    x = tl.reshape(x, [R, B // BLOCK, BLOCK])
    column = tl.arange(0, B // BLOCK)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    k = e2m1_exponent(tl.max(tl.where(column < columns, magnitude(x), 0), 2))[:, :, None]
    y = round_e2m1(x * power_of_two(-k)) * power_of_two(k)
    return tl.reshape(tl.where(column < columns, y, x), [R, B])


@triton.jit
def turn(a, b, c, s):
    """(a + ib)·(c + is)."""
    return a * c - b * s, a * s + b * c


@triton.jit
def hadamard_rows(x, R: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr):
    """Tile [R, D] · H_D · D^−0.5 in Sylvester's order, D = 2^STEPS.

    Each step takes sums and differences over the lowest bit of the column and makes it the highest bit. After STEPS
    steps every bit was the lowest once and is back in its place.
    """
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, [R, D // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [R, D])
    return x * D**-0.5
