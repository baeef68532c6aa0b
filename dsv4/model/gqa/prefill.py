"""Prompts that attend to chunks and a memory (`dsv4.kernels.chunked_prefill`), through the whole model.

Rows that begin together run together, right-padded to the longest: pads write beyond their rows' lengths. Prompts run
in pieces of whole chunks, so that memory does not grow with them; the memory of each layer passes from piece to piece,
and from append to append if a row holds a whole number of chunks and was not rewound since.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch

from dsv4.errors import InputError
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.gqa.cache import GroupedCache
from dsv4.model.step import Step


class Piece(NamedTuple):
    """Rows of a step that begin at `start` together; lengths int64 [B] as `chunked_prefill` takes them."""

    start: int
    lengths: torch.Tensor

    def on(self, device: torch.device) -> "Piece":
        """This piece with its lengths on `device`."""
        return Piece(self.start, self.lengths.to(device))


def groups(counts: list[int], starts: list[int]) -> Iterator[slice]:
    """Neighbouring rows that have tokens to run and begin at the same position."""
    for key, found in groupby(range(len(counts)), lambda b: (counts[b] > 0, starts[b])):
        rows = list(found)
        if key[0]:
            yield slice(rows[0], rows[-1] + 1)


def append_chunks(
    model, ids: torch.Tensor, cache: GroupedCache, counts: list[int], chunk: int, out, chunking: Chunking
) -> None:
    """Run ids int64 [B, T], counts[b] of row b, and pass the results to the collector `out`. chunk: tokens of a row in
    one piece.

    Raises InputError, before anything has run, for pieces that are not a whole number of chunks and for rows that hold
    tokens without a memory.
    """
    if chunk % chunking.chunk:
        raise InputError(
            f"pieces of {chunk} tokens were asked for with chunked prefill; expected a multiple of its chunk, "
            f"{chunking.chunk}"
        )
    starts = cache.lengths
    for b, n in enumerate(counts):
        if n and starts[b] and cache.remembered[b] != (starts[b], chunking):
            raise InputError(
                f"row {b} holds {starts[b]} tokens, at which chunked prefill in chunks of {chunking.chunk} cannot go "
                "on: it follows its own whole chunks, not rewound since; reset the cache, append with prompt=False, "
                "or prefill densely"
            )
    for rows in list(groups(counts, starts)):
        longest, begin = max(counts[rows]), starts[rows.start]
        for done in range(0, longest, chunk):
            tokens = min(chunk, longest - done)
            _run(model, ids[rows, done : done + tokens], rows, cache, begin, done, counts, out, chunking)


def _run(
    model,
    ids: torch.Tensor,
    rows: slice,
    cache: GroupedCache,
    begin: int,
    done: int,
    counts: list[int],
    out,
    chunking: Chunking,
) -> None:
    """One piece: tokens done … done + T − 1 of each of `rows`, which began at `begin`."""
    start, T = begin + done, ids.shape[1]
    left = [min(T, max(0, n - done)) for n in counts[rows]]
    real = torch.arange(T) < torch.tensor(left).unsqueeze(1)
    step = Step(
        torch.where(real.to(ids.device), ids, 0).to(model.device),
        rows.start,
        [start] * len(left),
        model.rope_frequencies(),
    )
    # A row that ends with this piece and a chunk may be continued: the kernel gets a larger length, and so keeps its
    # memory.
    ends = [begin + n + (n == done + T and T % chunking.chunk == 0) for n in counts[rows]]
    same = min(ends) == max(ends)  # filled on the device: a copy from the host would wait for all earlier work
    lengths = (
        torch.full((len(ends),), ends[0], device=model.device) if same else torch.tensor(ends, device=model.device)
    )
    step.prompt, step.piece = True, Piece(start, lengths)
    for b, n in enumerate(left, rows.start):  # pads need no room: what is written there is never read
        if n:
            cache.make_room(slice(b, b + 1), n)
    streams = model.run(step, cache)
    streams = streams.view(len(left), T, *streams.shape[1:])
    for n, found in groupby(range(len(left)), lambda i: left[i]):
        alike = list(found)
        here = slice(rows.start + alike[0], rows.start + alike[-1] + 1)
        if n:
            out.add(here, done, n, streams[alike[0] : alike[-1] + 1, :n].flatten(0, 1))
            cache._main.advance(here, n)
            goes_on = n == T and T % chunking.chunk == 0
            cache.remembered[here] = [(start + T, chunking) if goes_on else None] * len(alike)
