"""Byte layouts of packed cache rows.

Rows come in pages of 64. A page holds the payload of all its rows first, then their scales:

- KV_FP8 (FlashMLA's "MODEL1", vLLM's "fp8_ds_mla" of V4), 584 B a row at head_dim 512: 448 E4M3, 64 bf16
  (the rotated columns), then 7 E8M0 scales (one for 64 columns) and a byte of padding. A page is padded to a
  multiple of one row's payload (576 B).
- INDEX_FP8, 132 B a key at 128 dims: 128 E4M3, then one fp32 scale (a power of two here).
- INDEX_FP4, 68 B a key at 128 dims: 64 B of E2M1 pairs (low nibble even), then 4 E8M0 scales (one for 32 dims).
"""

import enum
from typing import NamedTuple

import torch

from dsv4.kernels.errors import UnsupportedInput

PAGE = 64  # rows
KV_BLOCK = 64  # columns of one scale of KV_FP8
KEY_BLOCK = 32  # dims of one scale of INDEX_FP4


class RowFormat(enum.Enum):
    KV_FP8 = "fp8 kv"
    INDEX_FP8 = "fp8 index keys"
    INDEX_FP4 = "fp4 index keys"


class Layout(NamedTuple):
    """Bytes of one row's payload and scales, and of one page of rows."""

    payload: int
    scales: int
    page: int

    @property
    def row(self) -> int:
        return self.payload + self.scales


def pack_layout(format: RowFormat, width: int, rope: int = 0) -> Layout:
    """Layout of rows of `width` numbers, of which KV_FP8 keeps the last `rope` in bf16.

    Raises UnsupportedInput for a width that the format cannot hold.
    """
    match format:
        case RowFormat.KV_FP8:
            if rope % 2 or not 0 <= rope < width:
                raise UnsupportedInput(
                    f"an FP8 cache row of {width} columns cannot keep {rope} of them in bf16; expected an even "
                    f"number below {width}"
                )
            payload, scales = width - rope + 2 * rope, -(-(width - rope) // KV_BLOCK)
            scales = -(-scales // 8) * 8
            return Layout(payload, scales, -(-PAGE * (payload + scales) // payload) * payload)
        case RowFormat.INDEX_FP8:
            return Layout(width, 4, PAGE * (width + 4))
        case RowFormat.INDEX_FP4:
            if width % KEY_BLOCK:
                raise UnsupportedInput(
                    f"FP4 index keys of {width} dims do not divide into blocks of {KEY_BLOCK}; expected a multiple"
                )
            return Layout(width // 2, width // KEY_BLOCK, PAGE * (width // 2 + width // KEY_BLOCK))


class PackedRows(NamedTuple):
    """Rows of a cache as bytes; attention and the indexer take it instead of a tensor of rows.

    data uint8 [pages, page bytes] for a flat pool, [B, pages, page bytes] for one run of rows a batch row; row r is in
    page r // 64 at r % 64. `count`: rows (of each batch row) that exist for the caller; width, rope as in
    `pack_layout`.
    """

    format: RowFormat
    data: torch.Tensor
    width: int
    rope: int
    count: int

    @property
    def layout(self) -> Layout:
        return pack_layout(self.format, self.width, self.rope)

    @property
    def payload(self) -> torch.Tensor:
        """View uint8 [..., pages, 64, payload bytes]."""
        return self._view(self.layout.payload, 0)

    @property
    def scales(self) -> torch.Tensor:
        """View uint8 [..., pages, 64, scale bytes]."""
        return self._view(self.layout.scales, PAGE * self.layout.payload)

    def _view(self, width: int, offset: int) -> torch.Tensor:
        data = self.data
        return data.as_strided(
            (*data.shape[:-1], PAGE, width), (*data.stride()[:-1], width, 1), data.storage_offset() + offset
        )
