"""Passes and drafts of one row as captured steps: on a GPU a pass then has the bits of the captured single steps of plain decoding.

Kernels of a captured step split their sums by what the cache could hold, not by what it holds, and not by how many tokens of the row a
pass has (up to 16). Passes of `Model.append` split them by what is visible, which moves within a pass.
"""

import time
from collections.abc import Iterable
from functools import cached_property

import torch

from dsv4.causal import CausalLM, TokenCache
from dsv4.graph import BlockGraph, DecodeGraph
from dsv4.paged_cache import PagedCache
from dsv4.paged_row import PagedRow
from dsv4.speculation.verify import Append


class OneRow:
    """Graphs of steps that run one row of a batch, each captured when that many tokens are first wanted. On pages one graph serves every
    row; rows that share a step would write through the pages of rows that rest. On rings the batch must be of one row.

    capture_seconds: what captures took so far, those in the middle of a run too, which its time is then less."""

    mtp, graph = False, DecodeGraph

    def __init__(self, model: CausalLM, cache: TokenCache):
        self.model, self.cache, self.graphs, self.capture_seconds = model, cache, {}, 0.0

    @cached_property
    def row(self) -> PagedRow | None:
        return PagedRow(self.cache) if isinstance(self.cache, PagedCache) else None

    def takes(self, counts: list[int]) -> bool:
        """Whether rows that run counts[b] tokens each can be run here."""
        return sum(n > 0 for n in counts) == 1 and (self.row is not None or len(counts) == 1)

    def of(self, width: int) -> DecodeGraph:
        """The graph of so many tokens."""
        if width not in self.graphs:
            begun = time.perf_counter()
            self.graphs[width] = self.graph(self.model, self.row or self.cache, width)
            self.capture_seconds += time.perf_counter() - begun
        return self.graphs[width]

    def prepare(self, widths: Iterable[int]) -> None:
        """Capture these widths now, where the batch is one row on rings: no step of others is run here, and pages are shown row by row."""
        if self.row is None and self.takes([1] * self.cache.batch):
            for width in sorted(set(widths)):
                self.of(width)

    def run(self, ids: torch.Tensor, counts: list[int], streams: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [B, W]; streams [B, W, n, d] where the graph reads some. Returns logits and streams [B, …] that are right in the row
        that ran; logits last until the next run."""
        b, width = next((b, n) for b, n in enumerate(counts) if n)
        if self.row is not None:
            self.row.show(b, width, self.mtp)
        graph = self.of(width)
        if streams is not None:
            graph.fed.copy_(streams[b:b + 1, :width])
        logits = graph.step(ids[b:b + 1, :width])
        if self.row is not None:
            (self.cache._mtp if self.mtp else self.cache._main).advance(slice(b, b + 1), width)
        after = graph.streams.view(1, width, *graph.streams.shape[1:]).clone()  # a drafter keeps them beyond the next replay
        return tuple(t.expand(len(ids), *t.shape[1:]) for t in (logits, after))


class Captured(OneRow):
    """A way to run passes. Several rows at once are an append."""

    def __init__(self, model: CausalLM, cache: TokenCache, pads: bool = False):
        super().__init__(model, cache)
        self.append = Append(model, cache, pads)

    def __call__(self, ids: torch.Tensor, counts: list[int], want_streams: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.run(ids, counts) if self.takes(counts) else self.append(ids, counts, want_streams)


class CapturedBlock(OneRow):
    """A way to run the MTP block: streams [B, T, n, d], next tokens ids [B, T] → logits [B, 1, vocab] after each row's last, streams
    [B, T, n, d]. captured: whether steps of one row are; all others are `Model.mtp_logits`."""

    mtp, graph = True, BlockGraph

    def __init__(self, model: CausalLM, cache: TokenCache, captured: bool = True):
        super().__init__(model, cache)
        self.captured = captured

    def prepare(self, widths: Iterable[int]) -> None:
        if self.captured:
            super().prepare(widths)

    def __call__(self, streams: torch.Tensor, ids: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.captured and self.takes(counts) and max(counts) <= self.cache.max_rewind + 1:
            return self.run(ids, counts, streams)
        return self.model.mtp_logits(streams, ids, self.cache, return_streams=True, n_new=counts, logits="last")
