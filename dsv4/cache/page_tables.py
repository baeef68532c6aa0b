"""Buffers in pages, and the tables that say which page holds which rows of which batch row.

Every stream is position-addressed through a table: row r of batch row b is row r mod R of physical page table[b, r //
R]. Selections and windows are lists of rows, so kernels read the pools in place. Index scores and HCA attention read
[B, n, width], which each step gathers from the pages.
"""

from collections.abc import Callable, Mapping

import torch

from dsv4.cache.paging import NOWHERE, PageGroup
from dsv4.cache.rows import Rows
from dsv4.cache.streams import LayerStreams, Stream
from dsv4.kernels.cache_rows import PAGE, PackedRows, pack_layout, write_rows
from dsv4.model.config import ModelConfig
from dsv4.model.spec import LayerSpec
from dsv4.model.step import Step

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


class Paged(Rows):
    """Number i of batch row b is row i mod R of the page that `table` names. Nothing is laid out apart: a step has
    pages for all its tokens in addition to those it reads."""

    spare = NOWHERE

    def __init__(self, buffer: torch.Tensor | PackedRows, table: PageTable, write: Callable = write_rows):
        flat = buffer if isinstance(buffer, PackedRows) else buffer.flatten(0, 1)
        super().__init__(buffer, flat, (table.group.name,), write)
        self.table = table

    def place(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        return self.table.index(step, numbers)

    def view(self, step: Step, n: int) -> torch.Tensor | PackedRows:
        """A copy, gathered from the pages."""
        pages = step.memo(("pages of entries", self.table.group.name), lambda: self.table.first_pages(step, n))
        if self.packed:
            return self.buffer._replace(data=self.buffer.data[pages], count=n)
        found = self.buffer[pages]  # [B, pages, R, width]
        return found.view(step.B, pages.shape[1] * self.table.R, self.buffer.shape[-1])[:, :n]


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
