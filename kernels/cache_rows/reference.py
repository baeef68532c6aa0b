"""Encoding and decoding of packed cache rows, in plain torch."""

import torch
import torch.nn.functional as F

from dsv4.kernels.cache_rows.formats import KEY_BLOCK, KV_BLOCK, PAGE, PackedRows, RowFormat
from dsv4.kernels.quantize.formats import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_log2,
    decode_e8m0,
    encode_e2m1,
    encode_e8m0,
    pack_e2m1,
    power_of_two,
    round_e4m3,
    unpack_e2m1,
)
from dsv4.kernels.quantize.weights import FP4_AMAX_FLOOR, FP8_AMAX_FLOOR


def encode_rows(values: torch.Tensor, format: RowFormat, rope: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """values [M, D] float → (payload uint8 [M, ·], scales uint8 [M, ·]).

    Scales are 2^⌈log2(amax / max)⌉ with the floors of the official simulation, so values that went through
    `simulate_fp8_blocks(x, 64, rope)` or `simulate_fp4_blocks(x, 32)` are kept exactly by KV_FP8 and INDEX_FP4.
    """
    x = values.float()
    match format:
        case RowFormat.KV_FP8:
            D = x.shape[1] - rope
            codes, exponent = _blocks(x[:, :D], KV_BLOCK, FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
            scales = encode_e8m0(exponent).view(torch.uint8)
            kept = x[:, D:].to(torch.bfloat16).view(torch.uint8)
            return torch.cat((codes[:, :D].view(torch.uint8), kept), 1), F.pad(scales, (0, -scales.shape[1] % 8))
        case RowFormat.INDEX_FP8:
            codes, exponent = _blocks(x, x.shape[1], FP8_AMAX_FLOOR, E4M3_MAX, round_e4m3)
            return codes.view(torch.uint8), power_of_two(exponent).contiguous().view(torch.uint8)
        case RowFormat.INDEX_FP4:
            codes, exponent = _blocks(x, KEY_BLOCK, FP4_AMAX_FLOOR, E2M1_MAX, encode_e2m1)
            return pack_e2m1(codes), encode_e8m0(exponent).view(torch.uint8)


def _blocks(x: torch.Tensor, block: int, floor: float, largest: float, encode):
    """Codes [M, padded] of x in blocks along its columns, and their exponents int32 [M, blocks]."""
    y = F.pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    exponent = ceil_log2(y.abs().amax(-1).clamp_(min=floor) / largest)
    return encode(y / power_of_two(exponent).unsqueeze(-1)).flatten(1), exponent


def decode_payload(payload: torch.Tensor, scales: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Bytes [M, ·] of rows in the format of `rows` → fp32 [M, D]."""
    match rows.format:
        case RowFormat.KV_FP8:
            D = rows.width - rows.rope
            codes = payload[:, :D].contiguous().view(torch.float8_e4m3fn).float()
            scale = decode_e8m0(scales[:, : -(-D // KV_BLOCK)]).repeat_interleave(KV_BLOCK, 1)[:, :D]
            return torch.cat((codes * scale, payload[:, D:].contiguous().view(torch.bfloat16).float()), 1)
        case RowFormat.INDEX_FP8:
            return payload.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
        case RowFormat.INDEX_FP4:
            return unpack_e2m1(payload) * decode_e8m0(scales.contiguous()).repeat_interleave(KEY_BLOCK, 1)


def read_rows(rows: PackedRows, index: torch.Tensor) -> torch.Tensor:
    """Rows of a flat pool at index int64 [...] (each ≥ 0) → fp32 [..., D]."""
    page, slot = index.flatten() // PAGE, index.flatten() % PAGE
    return decode_payload(rows.payload[page, slot], rows.scales[page, slot], rows).view(*index.shape, rows.width)


def decode_rows(rows: PackedRows) -> torch.Tensor:
    """All rows that exist: fp32 [count, D] of a flat pool, [B, count, D] of a batch."""
    lead = rows.data.shape[:-2]
    payload, scales = rows.payload.flatten(0, -2), rows.scales.flatten(0, -2)
    return decode_payload(payload, scales, rows).view(*lead, -1, rows.width)[..., : rows.count, :]


def write_rows(rows: PackedRows, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Encode values [M, D] and store them at rows `slots` int64 [M] of a flat pool."""
    payload, scales = encode_rows(values, rows.format, rows.rope)
    page, slot = slots // PAGE, slots % PAGE
    rows.payload[page, slot] = payload
    rows.scales[page, slot] = scales
