"""The buffers of this project's cache as rows of bytes, plain or packed: which bytes belong to which row, at any
position.

Position p of batch row b sits in slot p mod R of its ring, ring b being rows b·R … of one pool; entry w of row b sits
in row w of the b-th run. The design promises this; the probes find out where the model really writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.cache.cache import Cache
from dsv4.kernels.cache_rows import PackedRows, decode_rows
from dsv4.model.gqa.cache import GroupedCache
from dsv4.probes.oracle import kinds
from dsv4.probes.scenes.layouts import Packed, packed_streams

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


@dataclass(frozen=True)
class HeadBuffer(Buffer):
    """One stream of a GQA layer, [batch, KV, S, D]: keys or values, a slot a position; or summaries, a slot `each`
    positions. Slots that a window has left behind are still a row's own, and may be read with no weight.
    """

    each: int = 1

    def held(self, length: int, back: int = 0) -> torch.Tensor:
        """See `Buffer.held`."""
        return torch.arange(-(-length // self.each), device=self.tensor.device)

    def offsets(self, row: int, slots: torch.Tensor) -> torch.Tensor:
        """See `Buffer.offsets`: of all KV heads."""
        (KV, S, D), size = self.tensor.shape[1:], self.tensor.element_size()
        heads = (row * KV + torch.arange(KV, device=slots.device)).view(1, KV, 1)
        places = (heads * S + slots.view(-1, 1, 1)) * D * size + torch.arange(D * size, device=slots.device)
        return places.flatten(1)

    def spans(self, row: int) -> list[tuple[int, int]]:
        return [span(self.tensor[row])]


def head_buffers(cache: GroupedCache) -> Iterator[HeadBuffer]:
    """All buffers of a cache of a GQA model."""
    for plan, layer in zip(cache.plan, cache.layers, strict=True):
        for stream, tensor in layer.tensors.items():
            each = 1 if stream in ("keys", "values") else layer.block
            yield HeadBuffer(plan.label, stream, tensor, cache.batch, tensor.shape[2], each=each)


def buffers(subject, cache: Cache, mtp: bool = True) -> Iterator[Buffer]:
    """All buffers of a cache of the subject (`dsv4.probes.subjects.ours`); without `mtp` those of the backbone."""
    if isinstance(cache, GroupedCache):
        yield from head_buffers(cache)
        return
    packed = packed_streams(subject.config, subject.caches)
    layers = cache.layers + cache.mtp_layers if mtp else cache.layers
    for plan, layer in zip(cache.plan, layers, strict=mtp):
        overlap = kinds.OVERLAP[plan.ratio]
        for stream, tensor in layer.tensors.items():
            form, ring = packed.get(stream), stream == "window" or stream.endswith("raw rows")
            keep = subject.config.sliding_window - 1 if stream == "window" else overlap * plan.ratio - 1
            slots = plan.window_rows if stream == "window" else tensor.shape[1] * (64 if form else 1)
            yield Buffer(
                plan.label, stream, tensor, cache.batch, slots, form, 0 if ring else plan.ratio, keep if ring else 0
            )


def poison(subject, cache: Cache, lengths: list[int] | None = None, back: int = 0) -> None:
    """Fill with NaN what no row may read: everything, or, with rows of `lengths` tokens, all but the `held` slots."""
    for buffer in buffers(subject, cache):
        whole = buffer.bytes
        kept = [buffer.offsets(row, buffer.held(n, back)).flatten() for row, n in enumerate(lengths or ())]
        kept = torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64, device=whole.device)
        values = whole[kept]
        whole.fill_(UNWRITTEN)
        whole[kept] = values


def numbers(rows: torch.Tensor | PackedRows) -> torch.Tensor:
    """Rows of a cache as numbers: fp32 where they are packed."""
    return decode_rows(rows) if isinstance(rows, PackedRows) else rows


def span(row: torch.Tensor) -> tuple[int, int]:
    """First byte and the one after the last of a view, whatever its strides."""
    last = sum((extent - 1) * stride for extent, stride in zip(row.shape, row.stride()))
    return row.data_ptr(), row.data_ptr() + (last + 1) * row.element_size()


def made_of_input(subject, layer: int) -> set[str]:
    """Streams of a layer that are computed from its input alone: where all of them differ, the layer before is at
    fault."""
    if subject.family == "gqa":
        return {"keys", "values"}
    ratio = subject.config.compress_ratios[layer]
    raw = {kinds.WINDOW: (), kinds.CSA: ("main raw rows", "index raw rows"), kinds.HCA: ("main raw rows",)}[ratio]
    return {"window", *raw}
