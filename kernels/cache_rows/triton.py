"""Packed cache rows on the GPU: `write_rows`, the code by which every kernel stores a row, and that by which attention
reads FP8 rows."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.cache_rows.formats import KV_BLOCK, KV_FORM, PAGE, PackedRows, RowFormat
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

ROWS, COLUMNS, KV = tl.constexpr(PAGE), tl.constexpr(KV_BLOCK), tl.constexpr(KV_FORM)


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
    form, B, pdl = rows.format.form, padded_row(rows.format, D), dependent_launch(values.device)
    steps = slots.stride(0), *values.stride(), rows.data.stride(0)
    options = dict(num_warps=4 if form == KV.value else 1, launch_pdl=pdl)
    _write[(M,)](rows.data, slots, values, *steps, D, rows.rope, form, B, pdl, **options)


def padded_row(format: RowFormat, D: int) -> int:
    """Numbers of a row of D as `store_row` takes it: a power of two, and whole blocks."""
    return max(format.block, next_power(D))


@triton.jit
def _write(
    DATA,
    SLOTS,
    VALUES,
    slots_step,
    row,
    column,
    page,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    FORM: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m, i = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    slot = tl.load(SLOTS + m * slots_step)
    if slot >= 0:
        y = widen(tl.load(VALUES + m * row + i * column, mask=i < D, other=0.0))
        store_row(DATA + (slot >> 6) * page, slot & 63, y, D, ROPE, FORM, B)


@triton.jit
def store_row(page, slot, y, D: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, B: tl.constexpr):
    """Values fp32 [B] of a row of D ≤ B numbers, B as `padded_row` has it, to row `slot` of a page; the bytes are those
    of `encode_rows`. FORM: of a `RowFormat`; KV_FP8 keeps the last ROPE numbers in bf16."""
    if FORM == KV:
        _store_kv(page, slot, y, D, ROPE, B)
    elif FORM // 16 == 0:
        _store_key(page, slot, y, D, B)
    else:
        _store_blocks(page, slot, y, D, FORM % 16, FORM // 16, B)


@triton.jit
def _store_kv(page, slot, y, D: tl.constexpr, ROPE: tl.constexpr, B: tl.constexpr):
    """B: a multiple of 64."""
    NOPE: tl.constexpr = D - ROPE
    PAYLOAD: tl.constexpr = D + ROPE
    SCALES: tl.constexpr = ((NOPE + COLUMNS - 1) // COLUMNS + 7) // 8 * 8
    BLOCKS: tl.constexpr = B // COLUMNS
    block, payload = tl.arange(0, BLOCKS), page + slot * PAYLOAD
    c = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.reshape(y, [BLOCKS, COLUMNS])
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
    scales = page + ROWS * PAYLOAD + slot * SCALES
    tl.store(scales + block, tl.where(block * COLUMNS < NOPE, k + 127, 0).to(tl.uint8), mask=block < SCALES)
    if BLOCKS < SCALES:
        padding = tl.arange(0, 8)  # fewer than 8 blocks: SCALES is 8
        tl.store(scales + padding, tl.zeros([8], tl.uint8), mask=padding >= BLOCKS)


@triton.jit
def _store_key(page, slot, y, D: tl.constexpr, B: tl.constexpr):
    """E4M3 codes under one fp32 scale."""
    d, i = tl.arange(0, B), tl.arange(0, 4)
    # codes, exponent = blocks(x, x.shape[1], FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
    k = e4m3_exponent(tl.max(tl.where(d < D, magnitude(y), 0), 0))
    tl.store(page + slot * D + d, encode_e4m3(y * power_of_two(-k)).to(tl.uint8), mask=d < D)
    # power_of_two(exponent).contiguous().view(torch.uint8)
    byte = ((k + 127) << 23) >> (8 * i)
    tl.store(page + ROWS * D + slot * 4 + i, (byte & 255).to(tl.uint8))


@triton.jit
def _store_blocks(page, slot, y, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr):
    """Codes of BITS with an E8M0 scale for each BLOCK numbers; B and D are multiples of BLOCK."""
    BYTES: tl.constexpr = D * BITS // 8
    block, i = tl.arange(0, B // BLOCK), tl.arange(0, B * BITS // 8)
    x = tl.reshape(y, [B // BLOCK, BLOCK])
    if BITS == 4:
        # codes, exponent = blocks(x, KEY_BLOCK, FP4_AMAX_FLOOR, E2M1_MAX, encode_e2m1)
        k = e2m1_exponent(tl.max(magnitude(x), 1))
        # pack_e2m1: code[..., 0::2] | (code[..., 1::2] << 4)
        even, odd = tl.split(tl.reshape(encode_e2m1(x * power_of_two(-k)[:, None]), [B // 2, 2]))
        code = even | (odd << 4)
    else:
        # codes, exponent = blocks(x, KEY_BLOCK, FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
        k = e4m3_exponent(tl.max(magnitude(x), 1))
        code = tl.reshape(encode_e4m3(x * power_of_two(-k)[:, None]), [B])
    tl.store(page + slot * BYTES + i, code.to(tl.uint8), mask=i < BYTES)
    tl.store(page + ROWS * BYTES + slot * (D // BLOCK) + block, (k + 127).to(tl.uint8), mask=block < D // BLOCK)


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
