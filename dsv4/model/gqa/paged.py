"""Keys and values of GQA layers in pages, for requests that share pools (`dsv4.cache.paged`).

A page is a tile: BLOCK tokens of every KV head of one layer, [KV, BLOCK, D], of keys and of values; where a policy
searches, beside them the summaries of these tokens' blocks. Tables, holders, copies on write and grafts are those of
every paged cache.

Kernels read a head's tokens as one run of memory. So a step gathers its rows' tokens into [B, KV, S, D], works on that
as on a `GroupedCache` of S slots, with equal bits, and writes its own tokens back. So a layer of a step moves 2 · 2 · B
· KV · S · D · itemsize bytes (keys and values, read and written) more than with a contiguous cache, and 1 / block of
that for each kind of summary: about twice what dense attention itself reads, whatever a policy chooses. Kernels that
read tokens through the table would avoid it.
"""

from collections.abc import Mapping

import torch

from dsv4.cache.page_tables import PageTable
from dsv4.cache.paging import NOWHERE
from dsv4.cache.streams import LayerStreams
from dsv4.kernels.block_summaries.reference import touched_blocks
from dsv4.model.gqa.cache import BLOCK, LayerRows, Summaries
from dsv4.model.gqa.config import AttentionKind
from dsv4.model.step import Step

GROUPS = {AttentionKind.FULL: "tokens", AttentionKind.SLIDING: "window"}  # groups of pages, by what a layer attends to


class PagedRows(LayerRows):
    """One layer, instead of `LayerRows`. tensors: pools [pages + 1, KV, rows, D] of keys and values (BLOCK rows) and of
    summaries (BLOCK / block rows), all addressed by one table. groups: the group of pages of each stream."""

    def __init__(
        self, plan: LayerStreams, tables: Mapping[str, PageTable], tensors: dict[str, torch.Tensor], block: int
    ):
        self.tensors, self.block = tensors, block
        self.keys, self.values = tensors["keys"], tensors["values"]
        self.groups = dict.fromkeys(tensors, GROUPS[plan.kind])
        self.table = tables[GROUPS[plan.kind]]

    @property
    def batch(self) -> int:
        return len(self.table.physical)

    def of(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of keys and values [B, KV, S, D] before the step. S: whole tiles that hold what the step may read; in
        a captured step all tiles of the table."""
        return self._gathered(step, self.keys), self._gathered(step, self.values)

    def written(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's tokens from the tensors of `of` to their pages."""
        here, there = step.memo(("rows of pages", self.table.group.name), lambda: self._rows(step, step.pos, 1))
        for pool, whole in ((self.keys, keys), (self.values, values)):
            _copy(pool, there, whole, here)

    def summaries(self, step: Step) -> Summaries | None:
        """A copy of the summaries of the step's rows [B, KV, S / block, D] before the step; None if none are kept."""
        kept = [
            self._gathered(step, self.tensors[name]) if name in self.tensors else None for name in Summaries._fields[:3]
        ]
        return None if all(t is None for t in kept) else Summaries(*kept, self.block)

    def summarised(self, step: Step, summaries: Summaries) -> None:
        """Write the summaries of the blocks that the step's tokens touch from the tensors of `summaries` to their
        pages."""
        here, there = step.memo(("summaries of pages", self.table.group.name, self.block), lambda: self._touched(step))
        for name in self.tensors.keys() - {"keys", "values"}:
            _copy(self.tensors[name], there, getattr(summaries, name), here)

    def _gathered(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """A copy [B, KV, S / BLOCK · rows, D] of the pages [pages + 1, KV, rows, D] of the step's rows. Pages that a
        window has given back are zeros: page 0 may hold NaN, and kernels multiply all rows up to the last token."""
        (_, KV, rows, D), name = pool.shape, self.table.group.name
        pages = step.memo(("pages", name), lambda: self.table.first_pages(step, step.end))
        tiles = step.memo(("tiles", name, KV), lambda: _by_head(pages, KV).flatten())
        found = pool.view(-1, rows * D).index_select(0, tiles)
        if self.table.group.back is not None:
            absent = step.memo(("absent tiles", name, KV), lambda: (tiles < (NOWHERE + 1) * KV).unsqueeze(1))
            found.masked_fill_(absent, 0)
        return found.view(len(pages), KV, -1, D)

    def _touched(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """`_rows` of the blocks that the step's tokens touch; for blocks that it does not reach, the first again."""
        number = (step.start // self.block).unsqueeze(1) + torch.arange(
            touched_blocks(step.T, self.block), device=step.device
        )
        end = (step.start + step.T).unsqueeze(1)
        return self._rows(step, torch.where(number * self.block < end, number, number[:, :1]) * self.block, self.block)

    def _rows(self, step: Step, tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For tokens int64 [B, n] of the step's rows, int64 [B · KV · n]: rows of a gathered [B, KV, S / size, D], and
        of its pool, where one row has `size` tokens."""
        KV, S = self.keys.shape[1], -(-step.end // BLOCK) * BLOCK
        batch, slot = torch.arange(step.B, device=step.device).unsqueeze(1), self.table.index(step, tokens)
        here = _by_head(batch, KV) * (S // size) + (tokens // size).unsqueeze(1)
        there = _by_head(slot // BLOCK, KV) * (BLOCK // size) + (slot % BLOCK // size).unsqueeze(1)
        return here.flatten(), there.flatten()


def _by_head(pages: torch.Tensor, heads: int) -> torch.Tensor:
    """Tiles of each head of pages int64 [B, n]: int64 [B, heads, n]."""
    return pages.unsqueeze(1) * heads + torch.arange(heads, device=pages.device).unsqueeze(1)


def _copy(pool: torch.Tensor, there: torch.Tensor, whole: torch.Tensor, here: torch.Tensor) -> None:
    width = pool.shape[-1]
    pool.view(-1, width).index_copy_(0, there, whole.view(-1, width).index_select(0, here))
