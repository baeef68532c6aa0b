"""Rows of a paged cache that hold every page they will need, so that a loop on the device can fill them without the
host.

A stream that grows with the context gets a page for each part of it. A stream of which a step reads only the last
tokens gets as many pages as it can need at once, which its table names in turn: what a page held before lies behind all
that may be read again.
"""

from collections.abc import Sequence

import torch

from dsv4.cache.paged import PagedCache
from dsv4.cache.paged_view import PagedView
from dsv4.cache.paging import BLOCK, NOWHERE, PageGroup, under_pressure
from dsv4.errors import OutOfPages


class Allotted(PagedView):
    """The first rows of `cache`, which must be empty: row b with pages for tokens[b] tokens. `close` gives them back.

    Raises OutOfPages if a pool has too few pages, and then takes none.
    """

    def __init__(self, cache: PagedCache, tokens: Sequence[int]):
        super().__init__(cache, len(tokens))
        wanted = {name: [self._pages(group, n) for n in tokens] for name, group in cache.groups.items()}
        for name, counts in wanted.items():
            pool = cache.pools[name]
            if sum(counts) > len(pool.free):
                raise OutOfPages(
                    f"{len(tokens)} rows of {sum(tokens)} tokens in all need {sum(counts)} pages of {name}, "
                    f"{len(pool.free)} of {pool.pages} are free; run fewer requests at once, or make the pool larger"
                )
        for name, counts in wanted.items():
            table, of = self.tables[name].physical, cache.tables[name]
            for b, count in enumerate(counts):
                pages = cache.pools[name].allocate(count, b)
                cache._held[b][name] = dict(enumerate(pages))
                turns = torch.tensor(pages * -(-table.shape[1] // count))[: table.shape[1]]
                of.physical[b].copy_(turns)
            of.changes += 1
            table.copy_(of.physical[: len(tokens)])

    def _pages(self, group: PageGroup, tokens: int) -> int:
        """Pages that a row of so many tokens needs at once, while steps of up to BLOCK tokens run."""
        whole = -(-tokens // (group.rows * group.tokens))
        if group.back is None:
            return max(1, whole)
        return max(1, min(whole, group.at_once((self._mtp if group.mtp else self._main).max_rewind, BLOCK)))

    def close(self) -> None:
        """Give back all pages."""
        for b in range(self.batch):
            self.whole.leave(b)
            for table in self.whole.tables.values():
                table.physical[b].fill_(NOWHERE)
                table.changes += 1

    # ---- pressure, on the device ---------------------------------------------------------

    def live(self, tokens: torch.Tensor, done: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pages of each pool that rows of tokens int64 [B] would hold if they took them as they grow, with room for one
        token more: int64 scalars. Rows that are done, bool [B], hold none."""
        found = {}
        for name, group in self.whole.groups.items():
            last = -(-((tokens + 1) // group.tokens) // group.rows)
            if group.back is not None:
                reach = (tokens - (self._mtp if group.mtp else self._main).max_rewind).clamp(min=0)
                needed = (reach // group.align * group.align - group.back).clamp(min=0)
                last = last - needed // (group.rows * group.tokens)
            found[name] = last.masked_fill(done, 0).sum()
        return found

    def pressed(self, start: torch.Tensor, more: torch.Tensor | int, done: torch.Tensor) -> torch.Tensor:
        live, pools = self.live(start + more, done), self.whole.pools
        return torch.stack([under_pressure(n, pools[name].pages) for name, n in live.items()]).any()
