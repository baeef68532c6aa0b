"""Writes a row from registers into a cache, in any of its formats."""

import triton
import triton.language as tl

from dsv4.kernels.cache_rows.formats import KEY_BLOCK, KV_BLOCK, PAGE, RowFormat
from dsv4.kernels.quantize.triton_codes import (
    e2m1_exponent,
    e4m3_exponent,
    encode_e2m1,
    encode_e4m3,
    magnitude,
    narrow,
    power_of_two,
)

PLAIN, KV_FP8, INDEX_FP8, INDEX_FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FORMS = {RowFormat.KV_FP8: KV_FP8, RowFormat.INDEX_FP8: INDEX_FP8, RowFormat.INDEX_FP4: INDEX_FP4}
_ROWS, _COLUMNS, _DIMS = tl.constexpr(PAGE), tl.constexpr(KV_BLOCK), tl.constexpr(KEY_BLOCK)


@triton.jit
def put(POOL, slot, y, D: tl.constexpr, ROPE: tl.constexpr, STRIDE: tl.constexpr, FORM: tl.constexpr, B: tl.constexpr):
    """Values fp32 [1, B] of a row of D ≤ B numbers to row `slot` int64 of a pool; the bytes are those of `encode_rows`.

    STRIDE: elements from row to row, or bytes from page to page; KV_FP8 keeps the last ROPE numbers in bf16. A negative
    slot is skipped.
    """
    y = tl.reshape(y, [B])
    if slot >= 0:
        if FORM == PLAIN:
            i = tl.arange(0, B)
            tl.store(POOL + slot * STRIDE + i, narrow(y, POOL.dtype.element_ty), mask=i < D)
        elif FORM == KV_FP8:
            _put_kv(POOL + (slot >> 6) * STRIDE, slot & 63, y, D, ROPE, B)
        elif FORM == INDEX_FP8:
            _put_fp8_key(POOL + (slot >> 6) * STRIDE, slot & 63, y, D, B)
        else:
            _put_fp4_key(POOL + (slot >> 6) * STRIDE, slot & 63, y, D, B)


@triton.jit
def _put_kv(page, slot, y, D: tl.constexpr, ROPE: tl.constexpr, B: tl.constexpr):
    """B: a multiple of 64."""
    NOPE: tl.constexpr = D - ROPE
    PAYLOAD: tl.constexpr = D + ROPE
    SCALES: tl.constexpr = ((NOPE + _COLUMNS - 1) // _COLUMNS + 7) // 8 * 8
    BLOCKS: tl.constexpr = B // _COLUMNS
    block, payload = tl.arange(0, BLOCKS), page + slot * PAYLOAD
    c = block[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    x = tl.reshape(y, [BLOCKS, _COLUMNS])
    # codes, exponent = blocks(x[:, :D], KV_BLOCK, FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
    k = e4m3_exponent(tl.max(tl.where(c < NOPE, magnitude(x), 0), 1))
    code = encode_e4m3(x * power_of_two(-k)[:, None])
    tl.store(payload + c, code.to(tl.uint8), mask=c < NOPE)
    # kept = x[:, D:].to(torch.bfloat16).view(torch.uint8)
    kept, place, rotated = (
        narrow(x, tl.bfloat16).to(tl.int16, bitcast=True),
        payload + NOPE + 2 * (c - NOPE),
        (c >= NOPE) & (c < D),
    )
    tl.store(place, (kept & 255).to(tl.uint8), mask=rotated)
    tl.store(place + 1, ((kept >> 8) & 255).to(tl.uint8), mask=rotated)
    # scales = encode_e8m0(exponent); F.pad(scales, (0, -scales.shape[1] % 8))
    scales = page + _ROWS * PAYLOAD + slot * SCALES
    tl.store(scales + block, tl.where(block * _COLUMNS < NOPE, k + 127, 0).to(tl.uint8), mask=block < SCALES)
    if BLOCKS < SCALES:
        padding = tl.arange(0, 8)  # fewer than 8 blocks: SCALES is 8
        tl.store(scales + padding, tl.zeros([8], tl.uint8), mask=padding >= BLOCKS)


@triton.jit
def _put_fp8_key(page, slot, y, D: tl.constexpr, B: tl.constexpr):
    d, i = tl.arange(0, B), tl.arange(0, 4)
    # codes, exponent = blocks(x, x.shape[1], FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
    k = e4m3_exponent(tl.max(tl.where(d < D, magnitude(y), 0), 0))
    tl.store(page + slot * D + d, encode_e4m3(y * power_of_two(-k)).to(tl.uint8), mask=d < D)
    # power_of_two(exponent).contiguous().view(torch.uint8)
    byte = ((k + 127) << 23) >> (8 * i)
    tl.store(page + _ROWS * D + slot * 4 + i, (byte & 255).to(tl.uint8))


@triton.jit
def _put_fp4_key(page, slot, y, D: tl.constexpr, B: tl.constexpr):
    """B: a multiple of 32, and D."""
    BLOCKS: tl.constexpr = B // _DIMS
    block, pair = tl.arange(0, BLOCKS), tl.arange(0, B // 2)
    # codes, exponent = blocks(x, KEY_BLOCK, FP4_AMAX_FLOOR, E2M1_MAX, encode_e2m1)
    x = tl.reshape(y, [BLOCKS, _DIMS])
    k = e2m1_exponent(tl.max(magnitude(x), 1))
    # pack_e2m1: code[..., 0::2] | (code[..., 1::2] << 4)
    even, odd = tl.split(tl.reshape(encode_e2m1(x * power_of_two(-k)[:, None]), [B // 2, 2]))
    tl.store(page + slot * (D // 2) + pair, (even | (odd << 4)).to(tl.uint8), mask=pair < D // 2)
    tl.store(page + _ROWS * (D // 2) + slot * (D // _DIMS) + block, (k + 127).to(tl.uint8), mask=block < D // _DIMS)
