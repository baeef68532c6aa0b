"""The buffers of this project's cache as rows of bytes: all of them, and NaN in what no row may read."""

from collections.abc import Iterator

import torch

from dsv4.cache.cache import Cache
from dsv4.kernels.cache_rows import PackedRows, decode_rows
from dsv4.probes import families
from dsv4.probes.families.cache_rows import UNWRITTEN, Buffer


def buffers(subject, cache: Cache, mtp: bool = True) -> Iterator[Buffer]:
    """All buffers of a cache of the subject (`dsv4.probes.subjects.ours`); without `mtp` those of the backbone."""
    return families.of(subject).buffers(subject, cache, mtp)


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
