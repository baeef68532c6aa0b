"""Passes and drafts as captured steps: of one row, and of several rows on pages.

On a GPU a pass of one row then has the bits of the captured single steps of plain decoding. Kernels of a captured step
split their sums by the cache's capacity. The split does not depend on the number of tokens held, nor on the pass's
tokens of the row (up to 16). Passes of `Model.append` split sums by what is visible, which changes within a pass. Rows
that share a pass equal plain decoding up to rounding, because the split depends on the number of rows.
"""

import time
from collections.abc import Iterable

import torch

from dsv4.cache.cache import Cache, Lengths
from dsv4.cache.paged import PagedCache
from dsv4.cache.paged_view import PagedView
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits
from dsv4.runtime.graph import BlockGraph, DecodeGraph
from dsv4.sending import sent
from dsv4.speculation.passes import Append


class Steps:
    """Graphs of steps. Each is captured when that many tokens of one row, or of every row, are first needed. On pages
    one graph of one row serves every row. A graph of several rows has a place for each; rows at rest leave theirs
    empty. On rings the batch must be of one row.

    capture_seconds: the time of all captures so far. Captures during a run count here and not in the run's time.
    """

    mtp, graph = False, DecodeGraph

    def __init__(self, model: CausalLM, cache: Cache):
        self.model, self.cache, self.capture_seconds = model, cache, 0.0
        self.graphs: dict[tuple[int, int], DecodeGraph] = {}  # by rows and tokens
        self._views: dict[int, PagedView] = {}  # by rows
        self.paged = isinstance(cache, PagedCache)

    def takes(self, counts: list[int]) -> bool:
        """Whether rows that run counts[b] tokens each can run here. Several rows each run as many tokens as the
        longest, if pages for that are free: no request is evicted for padding."""
        rows, width = [b for b, n in enumerate(counts) if n], max(counts)
        if len(rows) < 2 or not self.paged:
            return len(rows) == 1 and (self.paged or len(counts) == 1)
        return all(self._lengths.now[b] + width <= self.cache.reach for b in rows) and self.cache.fits(
            rows, width, self.mtp
        )

    def of(self, width: int, rows: int = 1) -> DecodeGraph:
        """The graph of so many tokens of each of so many rows."""
        if (rows, width) not in self.graphs:
            begun = time.perf_counter()
            self.graphs[rows, width] = self.graph(self.model, self._shown(rows), width, whole=False)
            self.capture_seconds += time.perf_counter() - begun
        return self.graphs[rows, width]

    def prepare(self, widths: Iterable[int]) -> None:
        """Capture these widths now, if the batch is one row on rings: there no step of other rows runs, while pages are
        shown row by row."""
        if not self.paged and self.takes([1] * self.cache.batch):
            for width in sorted(set(widths)):
                self.of(width)

    def run(
        self, ids: torch.Tensor, counts: list[int], streams: torch.Tensor | None = None
    ) -> tuple[Logits, torch.Tensor]:
        """ids int64 [B, W]; streams [B, W, n, d] if the graph reads some. Values beyond a row's count may be anything.
        Returns logits and streams [B, …] that are right in the rows that ran. The next run overwrites the logits."""
        active, width = [b for b, n in enumerate(counts) if n], max(counts)
        alone = len(active) == 1
        rows = slice(active[0], active[0] + 1) if alone else slice(None)
        places = 1 if alone else len(counts)
        if self.paged:
            self._shown(places).show(
                active if alone else [b if n else None for b, n in enumerate(counts)], width, self.mtp
            )
        graph = self.of(width, places)
        if streams is not None:
            graph.fed.copy_(streams[rows, :width])
            graph.ends(counts[rows])
        logits = graph.step(ids[rows, :width])
        if self.paged:
            for b in active:
                self._lengths.advance(slice(b, b + 1), counts[b])
        # a drafter keeps them longer than until the next replay
        after = graph.streams.view(places, -1, *graph.streams.shape[1:]).clone()
        return tuple(t.expand(len(ids), *t.shape[1:]) for t in (logits, after))

    def _shown(self, places: int) -> Cache | PagedView:
        """The cache that graphs of so many rows run on."""
        if not self.paged:
            return self.cache
        if places not in self._views:
            self._views[places] = PagedView(self.cache, places)
        return self._views[places]

    @property
    def _lengths(self) -> Lengths:
        return self.cache._mtp if self.mtp else self.cache._main


class Captured(Steps):
    """Runs passes as captured steps, or as an append if they cannot be captured."""

    def __init__(self, model: CausalLM, cache: Cache, pads: bool = False):
        super().__init__(model, cache)
        self.append = Append(model, cache, pads)

    def __call__(self, ids: torch.Tensor, counts: list[int], want_streams: bool) -> tuple[Logits, torch.Tensor]:
        return self.run(ids, counts) if self.takes(counts) else self.append(ids, counts, want_streams)


class CapturedBlock(Steps):
    """Runs the MTP block: streams [B, T, n, d], next tokens ids [B, T] → logits [B, 1, vocab] and streams [B, 1, n, d]
    after each row's last. captured: run steps as graphs where possible; all others run as `Model.mtp_logits`."""

    mtp, graph = True, BlockGraph

    def __init__(self, model: CausalLM, cache: Cache, captured: bool = True):
        super().__init__(model, cache)
        self.captured = captured

    def prepare(self, widths: Iterable[int]) -> None:
        if self.captured:
            super().prepare(widths)

    def __call__(self, streams: torch.Tensor, ids: torch.Tensor, counts: list[int]) -> tuple[Logits, torch.Tensor]:
        if self.captured and max(counts) <= self.cache.max_rewind + 1 and self.takes(counts):
            return self.run(ids, counts, streams)
        logits, after = self.model.mtp_logits(
            streams, ids, self.cache, return_streams=True, n_new=counts, logits="last", whole=False
        )
        rows = torch.arange(len(counts), device=after.device)
        return logits, after[rows, sent([max(0, n - 1) for n in counts], after.device)].unsqueeze(1)
