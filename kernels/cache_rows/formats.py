"""Byte formats of cache rows: what all of them share. Each format is one object, in a file of its own beside this one.

Rows come in pages of 64. A page holds the payload of all its rows first, then their scales.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.quantize.formats import ceil_log2, power_of_two

PAGE = 64  # rows
KV_BLOCK = 64  # columns of one scale of KV_FP8
KEY_BLOCK = 32  # dims of one scale of index keys in blocks


class Layout(NamedTuple):
    """Bytes of one row's payload and scales, and of one page of rows."""

    payload: int
    scales: int
    page: int

    @property
    def row(self) -> int:
        return self.payload + self.scales


class RowFormat(ABC):
    """name: its name as an attribute of this class; value: for people; option: on the command line. simulated: whether
    rows pass through the official simulation before they are used, so that packing loses nothing.

    form: what kernels compile for it, `key_form` of index keys. bits: of a code: 8 for E4M3, 4 for E2M1; block: numbers
    under one E8M0 scale; 0 where a row has one scale in fp32. about: a row in words, {payload} its bytes and {rope} its
    rotated numbers.
    """

    KV_FP8: ClassVar["RowFormat"]
    INDEX_FP8: ClassVar["RowFormat"]
    INDEX_FP4: ClassVar["RowFormat"]

    name: str
    value: str
    option: str
    simulated: bool
    form: int
    bits: int
    block: int
    about: str

    def fits(self, width: int) -> bool:
        """Whether rows of `width` numbers divide into blocks."""
        return self.block == 0 or width % self.block == 0

    def __reduce__(self):
        """There is one object of each format, in copies and in other processes too."""
        return getattr, (RowFormat, self.name)

    @abstractmethod
    def layout(self, width: int, rope: int = 0) -> Layout:
        """Of rows of `width` numbers, of which `rope` at the end are rotated. Raises UnsupportedInput for a width that
        the format cannot hold."""

    @abstractmethod
    def encode(self, x: torch.Tensor, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x fp32 [M, D] → payload uint8 [M, ·] and scales uint8 [M, ·]."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, scales: torch.Tensor, width: int, rope: int) -> torch.Tensor:
        """payload, scales uint8 [M, ·] → fp32 [M, width]."""


PLAIN_FORM, KV_FORM = 0, 1  # of plain numbers; of KV_FP8


def key_form(bits: int, block: int) -> int:
    """`RowFormat.form` of index keys: kernels take bits = form % 16 and block = form // 16 from it."""
    return bits + 16 * block


def key_layout(what: str, width: int, bits: int) -> Layout:
    """Of index keys [width] with codes of `bits` and a scale of one byte for KEY_BLOCK dims. Raises UnsupportedInput,
    with `what` they are, for dims that do not divide into blocks."""
    if width % KEY_BLOCK:
        raise UnsupportedInput(
            f"{what} index keys of {width} dims do not divide into blocks of {KEY_BLOCK}; expected a multiple"
        )
    codes, scales = width * bits // 8, width // KEY_BLOCK
    return Layout(codes, scales, PAGE * (codes + scales))


def blocks(x: torch.Tensor, block: int, floor: float, largest: float, encode):
    """Codes [M, padded] of x in blocks along its columns, and their exponents int32 [M, blocks]: scales are
    2^⌈log2(amax / largest)⌉, amax at least `floor`."""
    y = F.pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    exponent = ceil_log2(y.abs().amax(-1).clamp_(min=floor) / largest)
    return encode(y / power_of_two(exponent).unsqueeze(-1)).flatten(1), exponent


def pack_layout(format: RowFormat, width: int, rope: int = 0) -> Layout:
    """`format.layout`."""
    return format.layout(width, rope)


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
