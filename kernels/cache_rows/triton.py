"""Packed cache rows on the GPU: `write_rows`, and the code by which attention reads FP8 rows."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.cache_rows.formats import KEY_BLOCK, KV_BLOCK, PAGE, PackedRows, RowFormat
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import (
    decode_e4m3,
    decode_e8m0,
    e2m1_exponent,
    e4m3_exponent,
    encode_e2m1,
    encode_e4m3,
    magnitude,
    narrow,
    power_of_two,
    widen,
)

ROWS, COLUMNS, DIMS = tl.constexpr(PAGE), tl.constexpr(KV_BLOCK), tl.constexpr(KEY_BLOCK)


def write_rows(rows: PackedRows, slots, values) -> None:
    """Encode values [M, D] (fp32 or bf16, any strides) and store them at rows `slots` int64 [M] of a flat pool.

    The bytes are those of the reference's `encode_rows` (of a NaN in a bf16 column: some NaN). Slots are ≥ 0; a
    negative slot is skipped, so that nothing is written outside the pool. Raises UnsupportedInput for a pool that is
    not flat.
    """
    require_device("write_rows", rows.data, slots, values)
    if rows.data.dim() != 2 or rows.data.stride(1) != 1:
        raise UnsupportedInput(
            f"write_rows takes a flat pool [pages, page bytes] with its bytes side by side; found shape "
            f"{tuple(rows.data.shape)}, strides {rows.data.stride()}"
        )
    M, D = values.shape
    if D != rows.width:
        raise UnsupportedInput(f"write_rows got values of {D} columns for rows of {rows.width}")
    if M == 0:
        return
    layout, pdl = rows.layout, dependent_launch(values.device)
    common = (rows.data, slots, values, slots.stride(0), *values.stride(), rows.data.stride(0), D)
    match rows.format:
        case RowFormat.KV_FP8:  # at least 8 blocks: as many as scales, which are padded to a multiple of 8
            blocks = max(8, next_power(-(-D // KV_BLOCK)))
            _write_kv[(M,)](*common, rows.rope, layout.payload, layout.scales, blocks, pdl, num_warps=4, launch_pdl=pdl)
        case RowFormat.INDEX_FP8:
            _write_keys_fp8[(M,)](*common, next_power(D), pdl, num_warps=1, launch_pdl=pdl)
        case RowFormat.INDEX_FP4:
            _write_keys_fp4[(M,)](*common, next_power(D // KEY_BLOCK), pdl, num_warps=1, launch_pdl=pdl)


@triton.jit
def _write_kv(
    DATA,
    SLOTS,
    VALUES,
    slots_step,
    row,
    column,
    page,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    PAYLOAD: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m, NOPE = tl.program_id(0).to(tl.int64), D - ROPE
    slot, block = tl.load(SLOTS + m * slots_step), tl.arange(0, BLOCKS)
    c = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = widen(tl.load(VALUES + m * row + c * column, mask=(c < D) & (slot >= 0), other=0.0))
    payload = DATA + (slot >> 6) * page + (slot & 63) * PAYLOAD
    # codes, exponent = blocks(x[:, :D], KV_BLOCK, FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
    k = e4m3_exponent(tl.max(tl.where(c < NOPE, magnitude(x), 0), 1))
    code = encode_e4m3(x * power_of_two(-k)[:, None])
    tl.store(payload + c, code.to(tl.uint8), mask=(c < NOPE) & (slot >= 0))
    # kept = x[:, D:].to(torch.bfloat16).view(torch.uint8)
    kept, place = narrow(x, tl.bfloat16).to(tl.int16, bitcast=True), payload + NOPE + 2 * (c - NOPE)
    rotated = (c >= NOPE) & (c < D) & (slot >= 0)
    tl.store(place, (kept & 255).to(tl.uint8), mask=rotated)
    tl.store(place + 1, ((kept >> 8) & 255).to(tl.uint8), mask=rotated)
    # scales = encode_e8m0(exponent); F.pad(scales, (0, -scales.shape[1] % 8))
    byte = tl.where(block * COLUMNS < NOPE, k + 127, 0)
    tl.store(
        DATA + (slot >> 6) * page + ROWS * PAYLOAD + (slot & 63) * SCALES + block,
        byte.to(tl.uint8),
        mask=(block < SCALES) & (slot >= 0),
    )


@triton.jit
def _write_keys_fp8(
    DATA, SLOTS, VALUES, slots_step, row, column, page, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m, d, i = tl.program_id(0).to(tl.int64), tl.arange(0, DP), tl.arange(0, 4)
    slot = tl.load(SLOTS + m * slots_step)
    x = widen(tl.load(VALUES + m * row + d * column, mask=(d < D) & (slot >= 0), other=0.0))
    # codes, exponent = blocks(x, x.shape[1], FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
    k = e4m3_exponent(tl.max(magnitude(x), 0))
    code = encode_e4m3(x * power_of_two(-k))
    tl.store(DATA + (slot >> 6) * page + (slot & 63) * D + d, code.to(tl.uint8), mask=(d < D) & (slot >= 0))
    # power_of_two(exponent).contiguous().view(torch.uint8)
    byte = ((k + 127) << 23) >> (8 * i)
    tl.store(
        DATA + (slot >> 6) * page + ROWS * D + (slot & 63) * 4 + i,
        (byte & 255).to(tl.uint8),
        mask=(i < 4) & (slot >= 0),
    )


@triton.jit
def _write_keys_fp4(
    DATA, SLOTS, VALUES, slots_step, row, column, page, D: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    slot, pair = tl.load(SLOTS + m * slots_step), block[:, None] * (DIMS // 2) + tl.arange(0, DIMS // 2)[None, :]
    inside = (pair < D // 2) & (slot >= 0)
    even = widen(tl.load(VALUES + m * row + 2 * pair * column, mask=inside, other=0.0))
    odd = widen(tl.load(VALUES + m * row + (2 * pair + 1) * column, mask=inside, other=0.0))
    # codes, exponent = blocks(x, KEY_BLOCK, FP4_AMAX_FLOOR, E2M1_MAX, encode_e2m1)
    k = e2m1_exponent(tl.maximum(tl.max(magnitude(even), 1), tl.max(magnitude(odd), 1)))
    scale = power_of_two(-k)[:, None]
    # pack_e2m1: code[..., 0::2] | (code[..., 1::2] << 4)
    code = encode_e2m1(even * scale) | (encode_e2m1(odd * scale) << 4)
    tl.store(DATA + (slot >> 6) * page + (slot & 63) * (D // 2) + pair, code.to(tl.uint8), mask=inside)
    tl.store(
        DATA + (slot >> 6) * page + ROWS * (D // 2) + (slot & 63) * (D // DIMS) + block,
        (k + 127).to(tl.uint8),
        mask=(block < D // DIMS) & (slot >= 0),
    )


@triton.jit
def load_fp8_rows(
    data,
    row,
    PAGE_BYTES: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    DP: tl.constexpr,
    WORDS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Rows of KV_FP8 pages as fp32 [N, DP], zeros where row [N] < 0 and beyond D (DP: a multiple of 64).

    Offsets have the type of `row`. WORDS: pages begin at multiples of 8 bytes, and D is even. HARDWARE: the machine
    converts E4M3 (capability 8.9); both ways are exact.
    """
    NOPE: tl.constexpr = D - ROPE
    PAYLOAD: tl.constexpr = D + ROPE
    USED: tl.constexpr = (NOPE + COLUMNS - 1) // COLUMNS
    SCALES: tl.constexpr = (USED + 7) // 8 * 8
    page, slot, present, block = row >> 6, row & 63, row >= 0, tl.arange(0, DP // COLUMNS)
    payload, scales = page * PAGE_BYTES + slot * PAYLOAD, page * PAGE_BYTES + ROWS * PAYLOAD + slot * SCALES
    c = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    code = tl.load(
        data + payload[:, None, None] + c[None, :, :], mask=present[:, None, None] & (c < NOPE)[None, :, :], other=0
    )
    if WORDS and SCALES == 8:  # one load for all scales of a row
        word = tl.load((data + scales).to(tl.pointer_type(tl.int64)), mask=present, other=0)
        exponent = tl.where((block < USED)[None, :], (word[:, None] >> (8 * block)[None, :]) & 255, 0)
    else:
        exponent = tl.load(
            data + scales[:, None] + block[None, :], mask=present[:, None] & (block < USED)[None, :], other=0
        )
    # codes * decode_e8m0(scales).repeat_interleave(KV_BLOCK, 1)
    x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) if HARDWARE else decode_e4m3(code)
    x = x * decode_e8m0(exponent)[:, :, None]
    # the rotated columns are a block of their own: load only that
    if WORDS and USED * COLUMNS == NOPE and ROPE == COLUMNS:
        place = (data + payload + NOPE).to(tl.pointer_type(tl.bfloat16))
        rotated = tl.load(place[:, None] + tl.arange(0, COLUMNS)[None, :], mask=present[:, None], other=0.0)
        x = tl.where((block == USED)[None, :, None], widen(rotated)[:, None, :], x)
    elif ROPE > 0:
        place = data + (payload - NOPE)[:, None, None] + 2 * c[None, :, :]
        inside = present[:, None, None] & ((c >= NOPE) & (c < D))[None, :, :]
        low, high = (
            tl.load(place, mask=inside, other=0).to(tl.int32),
            tl.load(place + 1, mask=inside, other=0).to(tl.int32),
        )
        x = tl.where((c < NOPE)[None, :, :], x, ((high << 24) | (low << 16)).to(tl.float32, bitcast=True))
    elif D < DP:
        x = tl.where((c < D)[None, :, :], x, 0.0)
    return tl.reshape(x, (row.shape[0], DP))
