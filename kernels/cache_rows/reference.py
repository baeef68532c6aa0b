"""Encoding and decoding of packed cache rows, in plain torch."""

import torch

from dsv4.kernels.cache_rows.formats import PAGE, PackedRows, RowFormat


def encode_rows(values: torch.Tensor, format: RowFormat, rope: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """values [M, D] float → (payload uint8 [M, ·], scales uint8 [M, ·]). Scales have the floors of the official
    simulation."""
    return format.encode(values.float(), rope)


def decode_payload(payload: torch.Tensor, scales: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Bytes [M, ·] of rows in the format of `rows` → fp32 [M, D]."""
    return rows.format.decode(payload, scales, rows.width, rows.rope)


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
