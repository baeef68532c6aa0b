"""A cache as rows of bytes, plain or packed: which bytes of a buffer belong to which row, and copies of rows."""

from dataclasses import dataclass

import torch

from dsv4.probes.scenes.layouts import Packed

UNWRITTEN = 255  # a byte that makes NaN in fp32, bf16, E4M3 and E8M0


@dataclass(frozen=True)
class Buffer:
    """One stream of one layer. slots: rows of each batch row; packed: None for plain numbers.

    ratio: 0 of rings; keep: of rings, how many positions before a step's first token it may read.
    """

    label: str
    stream: str
    tensor: torch.Tensor
    batch: int
    slots: int
    packed: Packed | None = None
    ratio: int = 0
    keep: int = 0

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n]: the whole buffer, in the order of its indices; a view, where no two indices are one byte."""
        return self.tensor.contiguous().view(torch.uint8).view(-1)

    def held(self, length: int, back: int = 0) -> torch.Tensor:
        """int64: slots that a row of `length` tokens may read in later steps, also after a rewind of `back` tokens."""
        if self.ratio:
            return torch.arange(length // self.ratio, device=self.tensor.device)
        return torch.arange(max(0, length - self.keep - back), length, device=self.tensor.device) % self.slots

    def offsets(self, row: int, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n, bytes of a row]: places in `bytes` of slots int64 [n] of a batch row."""
        if self.packed is None:
            size = self.tensor.shape[-1] * self.tensor.element_size()
            return (row * self.slots + slots).unsqueeze(-1) * size + torch.arange(size, device=slots.device)
        if self.ratio:  # pages of each batch row
            return row * self.tensor.shape[1] * self.packed.page + self.packed.offsets(slots)
        return self.packed.offsets(row * self.slots + slots)

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Addresses (start, stop) of a batch row's bytes."""
        if self.packed is None:
            return [span(self.tensor[row])]
        of_row = self.tensor[row] if self.ratio else self.tensor  # a window's pages are shared by the rows of the batch
        at, stretch = of_row.data_ptr(), of_row.stride(0) - self.packed.page
        first = 0 if self.ratio else row * self.slots
        return [
            (at + start + start // self.packed.page * stretch, at + stop + start // self.packed.page * stretch)
            for start, stop in self.packed.spans(first, self.slots)
        ]

    def rows(self, row: int, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [n, bytes of a row] of slots int64 [n] of a batch row."""
        return self.bytes[self.offsets(row, slots)]

    def values(self, raw: torch.Tensor) -> torch.Tensor:
        """float64 [n, width] of `rows`."""
        raw = raw.cpu()
        return raw.view(self.tensor.dtype).double() if self.packed is None else self.packed.decode(raw)


def span(row: torch.Tensor) -> tuple[int, int]:
    """First byte and the one after the last of a view, whatever its strides."""
    last = sum((extent - 1) * stride for extent, stride in zip(row.shape, row.stride()))
    return row.data_ptr(), row.data_ptr() + (last + 1) * row.element_size()


@dataclass(frozen=True)
class Held:
    """Rows of one stream of one layer: raw uint8 [n, bytes] without what pads scales; of numbers of `dtype`, or
    packed."""

    raw: torch.Tensor
    dtype: torch.dtype
    packed: Packed | None = None

    @property
    def values(self) -> torch.Tensor:
        """float64 [n, width]."""
        return self.raw.contiguous().view(self.dtype).double() if self.packed is None else self.packed.decode(self.raw)


Rows = dict[tuple[str, str], Held]  # (layer label, stream as in PARTS) → rows, in order of layers


def held(raw: torch.Tensor, dtype: torch.dtype, packed: Packed | None) -> Held:
    raw = raw.cpu()
    return Held(raw if packed is None else raw[:, : packed.payload + packed.used], dtype, packed)
