"""Buffers in pages, and the tables that say which page holds which rows of which batch row.

Every stream is position-addressed through a table: row r of batch row b is row r mod R of physical page table[b, r //
R]. A `PageLayout` says which streams a family of models has and in which groups of pages. This module has those of
DeepSeek-V4, whose classes replace `Ring`, `Entries` and `CompressorCache`; GQA models have theirs in
`dsv4.model.gqa.paged`. Selections and windows are lists of rows, so kernels read the pools in place. Index scores and
HCA attention read [B, n, width], which each step gathers from the pages.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dsv4.cache.linear import CompressorCache
from dsv4.cache.paging import NOWHERE, PageGroup
from dsv4.cache.rows import EntryRows, TokenRows
from dsv4.cache.streams import LayerStreams, Stream, cache_streams
from dsv4.kernels.cache_rows import PAGE, PackedRows, pack_layout, write_rows
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerSpec
from dsv4.model.step import CapturedStep, Step

# a page: what CSA's overlap spans; a part of HCA's window, which fills slowly
MOST_RAW_ROWS = 32  # a page; fewer where the windows that one entry pools have fewer


class PageTable:
    """Table int64 [batch, logical pages] of one group on the device; NOWHERE if a batch row holds no page.

    with_nobody: the table with an additional empty row at its end. changes: how often a page was set.
    """

    def __init__(self, group: PageGroup, batch: int, max_context: int, device: torch.device):
        self.group, self.R, self.changes = group, group.rows, 0
        logical = -(-max_context // (group.rows * group.tokens))
        self.with_nobody = torch.full((batch + 1, logical), NOWHERE, dtype=torch.int64, device=device)
        self.physical = self.with_nobody[:batch]

    def point(self, b: int, logical: int, page: int) -> None:
        """Rows of that logical page of batch row b are in physical page `page` from now on."""
        self.physical[b, logical].fill_(page)  # an assignment would be a copy, and the host would wait
        self.changes += 1

    def index(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the pool for rows int64 [B, ...] of the batch rows of a step.

        A row outside the table gives some valid row: callers mask those, but an index must exist.
        """
        flat = rows.flatten(1).clamp(0, self.physical.shape[1] * self.R - 1)
        return (self.physical[step.rows].gather(1, flat // self.R) * self.R + flat % self.R).view(rows.shape)

    def first_pages(self, step: Step, n: int) -> torch.Tensor:
        """Physical pages of the first n rows, int64 [B, ⌈n / R⌉]."""
        return self.physical[step.rows, : -(-n // self.R)]


class PagedLayer(Protocol):
    """The cache of one layer in pages. `tensors`: stream name → tensor whose first extent counts pages; `groups`:
    stream name → name of the group whose table addresses it."""

    tensors: dict[str, torch.Tensor]
    groups: dict[str, str]


class PageLayout(Protocol):
    """How the caches of one model lie in pages.

    groups: every group that its layers need, by name; backbone: the number of layers of the main model, which come
    before those of the MTP block in plans; positions: the largest that the model knows; config, numerics, mtp: of the
    model, and whether its MTP block has a part.
    """

    config: Any
    numerics: Numerics
    mtp: bool
    groups: dict[str, PageGroup]
    backbone: int
    positions: int

    def plan(self, pages: Mapping[str, int]) -> Sequence[Any]:
        """The streams of every layer, with `label` and `streams`: `pages` pages of each group beside page 0."""

    def layer(self, plan: Any, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor]) -> PagedLayer:
        """The cache of one layer of the plan, found through `tables`."""


class PagedTokens(TokenRows):
    """One row a token; replaces `Ring`. Nothing is staged: a step has pages for all its tokens in addition to those it
    reads."""

    def __init__(self, buffer: torch.Tensor | PackedRows, table: PageTable, write=write_rows):
        self.buffer, self.table, self._write = buffer, table, write
        self.flat = buffer if isinstance(buffer, PackedRows) else buffer.flatten(0, 1)

    def extend(self, step: Step, values: torch.Tensor) -> torch.Tensor | PackedRows:
        """Write values [N, width] at the step's positions; return the pool that `index` addresses."""
        self.store(self.slots(step), values)
        return self.flat

    def index(self, step: Step, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the pool that hold `positions` int64 [B, ...]."""
        return self.table.index(step, positions)

    def slots(self, step: Step) -> torch.Tensor:
        """Rows of the pool for the step's own positions, int64 [N]."""
        return step.memo(("page slots", self.table.group.name), lambda: self.index(step, step.pos).flatten())

    def address(self, step: Step) -> tuple:
        return (self.table.group.name,)


class PagedEntries(EntryRows):
    """Compressed entries, one every `ratio` tokens; replaces `Entries`."""

    def __init__(self, buffer: torch.Tensor | PackedRows, ratio: int, table: PageTable, write=write_rows):
        self.buffer, self.ratio, self.table, self._write = buffer, ratio, table, write
        self.flat = buffer if isinstance(buffer, PackedRows) else buffer.flatten(0, 1)

    def slots(self, step: Step) -> torch.Tensor:
        """Rows of the pool for the step's new windows, int64 [B·completed]; row 0, which no row owns, for windows that
        a row does not complete.

        Their entries could hit a page that the row shares with the donor of its prefix, which has an entry of its own
        there. A captured step knows which windows are complete and writes no others.
        """

        def rows():
            found = self.table.index(step, step.new_windows(self.ratio)).flatten()
            return found if step.captured else torch.where(step.completes(self.ratio), found, NOWHERE)

        return step.memo(("page slots", self.table.group.name), rows)

    def visible(self, step: Step) -> torch.Tensor | PackedRows:
        """A copy [B, n, width] of the entries that the step's last query may see, gathered from their pages."""
        n = step.max_visible(self.ratio)
        pages = step.memo(("pages of entries", self.table.group.name), lambda: self.table.first_pages(step, n))
        if isinstance(self.buffer, PackedRows):
            return self.buffer._replace(data=self.buffer.data[pages], count=n)
        found = self.buffer[pages]  # [B, pages, R, width]
        return found.view(step.B, pages.shape[1] * self.table.R, self.buffer.shape[-1])[:, :n]

    def chosen(self, step: Step, entry: torch.Tensor) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        """entry int64 [B, T, K] (−1 absent) → a pool of rows and its rows int64 [B·T, K] (−1 absent)."""
        return self.flat, torch.where(entry < 0, -1, self.table.index(step, entry)).flatten(0, 1)

    def chosen_captured(
        self, entry: torch.Tensor, step: CapturedStep, op
    ) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        """`chosen` for a captured step: rows are found through the table as it is when a replay runs."""
        return self.chosen(step, entry)


class PagedCompressorCache(CompressorCache):
    """Raw rows and entries of one compressor, both in pages."""

    def __init__(self, raw: PagedTokens, entries: PagedEntries, ratio: int, overlap: int):
        self.raw, self.entries, self.ratio, self.overlap = raw, entries, ratio, overlap


class PagedLayerCache:
    """Buffers of one layer: a `PagedLayer` that replaces `LayerCache`."""

    def __init__(
        self, plan: LayerStreams, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor], write=write_rows
    ):
        self.tensors = tensors
        self.groups = stream_groups(plan.spec)
        held = {
            s.name: self.tensors[s.name]
            if s.rows is None
            else PackedRows(s.rows[0], self.tensors[s.name], s.rows[1], s.rows[2], PAGE * s.shape[0])
            for s in plan.streams
        }
        table = {name: tables[group] for name, group in self.groups.items()}

        def compressor(raw: str, entries: str) -> PagedCompressorCache:
            return PagedCompressorCache(
                PagedTokens(held[raw], table[raw], write),
                PagedEntries(held[entries], plan.ratio, table[entries], write),
                plan.ratio,
                plan.spec.overlap,
            )

        self.window = PagedTokens(held["window"], table["window"], write)
        self.main = self.index = None
        if plan.spec.compresses:
            self.main = compressor("main raw rows", "entries")
        if plan.spec.selects:
            self.index = compressor("index raw rows", "index keys")


def stream_groups(spec: LayerSpec) -> dict[str, str]:
    """Stream name → name of its group, for a layer like that."""
    groups, kind = {"window": "mtp window" if spec.drafts else "window"}, spec.kind.value
    if spec.compresses:
        groups |= {"main raw rows": f"{kind} raw rows", "entries": f"{kind} entries"}
    if spec.selects:
        groups |= {"index raw rows": f"{kind} raw rows", "index keys": f"{kind} entries"}
    return groups


def page_groups(config: ModelConfig, mtp: bool) -> dict[str, PageGroup]:
    """Every group that the model's layers need, by name."""
    back = config.sliding_window - 1
    groups = [PageGroup("window", PAGE, back=back)]
    for ratio, overlap, kind in sorted({(s.ratio, s.overlap, s.kind.value) for s in config.layers if s.compresses}):
        rows = min(MOST_RAW_ROWS, overlap * ratio)
        groups.append(PageGroup(f"{kind} raw rows", rows, back=(overlap - 1) * ratio, align=ratio))
        groups.append(PageGroup(f"{kind} entries", PAGE, tokens=ratio))
    if mtp:
        groups.append(PageGroup("mtp window", PAGE, back=back, mtp=True))
    return {g.name: g for g in groups}


def paged_streams(plan: LayerStreams, groups: Mapping[str, PageGroup], pages: Mapping[str, int]) -> LayerStreams:
    """The streams of one layer in pages: `pages` pages of each group, and page 0. plan: of the layer in a cache of one
    row."""
    streams, of = [], stream_groups(plan.spec)
    for s in plan.streams:
        group, count = groups[of[s.name]], pages[of[s.name]] + 1
        if s.rows is None:
            shape = (count, group.rows, s.shape[-1])
            formula = f"{count} pages × {group.rows} rows × {s.shape[-1]} × {s.dtype.itemsize} B"
        else:
            layout = pack_layout(*s.rows)
            shape, formula = (count, layout.page), f"{count} pages × {layout.page} B"
        streams.append(Stream(s.name, shape, s.dtype, formula, s.rows))
    return LayerStreams(plan.spec, tuple(streams), 0)


class CompressedLayout:
    """The `PageLayout` of a DeepSeek-V4 model. mtp: whether its MTP block has a window; write: the operation that
    writes rows."""

    def __init__(self, config: ModelConfig, numerics: Numerics, mtp: bool, write=write_rows):
        self.config, self.numerics, self.mtp, self.write = config, numerics, mtp, write
        self.groups = page_groups(config, mtp)
        self.backbone, self.positions = config.num_hidden_layers, config.max_position_embeddings

    def plan(self, pages: Mapping[str, int]) -> list[LayerStreams]:
        # of one token, for widths and formats
        rows = cache_streams(self.config, 1, 1, 0, self.numerics, self.mtp)
        return [paged_streams(layer, self.groups, pages) for layer in rows]

    def layer(
        self, plan: LayerStreams, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor]
    ) -> PagedLayerCache:
        return PagedLayerCache(plan, tables, tensors, self.write)
