"""Rows of a paged cache that hold every page they will need, so that a loop on the device can fill them without the
host.

A stream that grows with the context gets a page for each part of it. A stream of which a step reads only the last
tokens gets as many pages as it can need at once, which its table names in turn: what a page held before lies behind all
that may be read again.
"""

from collections.abc import Sequence

import torch

from dsv4.cache.paged_view import PagedView
from dsv4.cache.paging import BLOCK, NOWHERE, PageGroup, under_pressure
from dsv4.errors import OutOfPages


class Allotted(PagedView):
    """The first `rows` rows of `cache`, which no one else may use. They hold nothing until `allot`."""

    piece = BLOCK

    def allot(self, tokens: Sequence[int]) -> None:
        """Row b holds no token, and pages for tokens[b] of them, from now on; what rows held before is free. Raises
        OutOfPages if a pool has too few pages; then no row holds any."""
        self.close()
        if reason := self.lacking(tokens):
            raise OutOfPages(f"{reason}; run fewer requests at once, or make the pool larger")
        cache = self.whole
        for name, group in cache.groups.items():
            table, of = self.tables[name].physical, cache.tables[name]
            for b, n in enumerate(tokens):
                pages = cache.pools[name].allocate(self._pages(group, n), b)
                cache._held[b][name] = dict(enumerate(pages))
                turns = torch.tensor(pages * -(-table.shape[1] // len(pages)))[: table.shape[1]]
                of.physical[b].copy_(turns)
            of.changes += 1
            table.copy_(of.physical[: self.batch])

    def lacking(self, tokens: Sequence[int]) -> str:
        """What empty pools lack for rows of so many tokens, in words; '' if nothing."""
        for name, group in self.whole.groups.items():
            wanted, pages = sum(self._pages(group, n) for n in tokens), self.whole.pools[name].pages
            if wanted > pages:
                return f"{len(tokens)} rows of {sum(tokens)} tokens need {wanted} pages of {name}, and it has {pages}"
        return ""

    def _pages(self, group: PageGroup, tokens: int) -> int:
        """Pages that a row of so many tokens needs at once, while steps of up to BLOCK tokens run."""
        whole = -(-tokens // (group.rows * group.tokens))
        if group.back is None:
            return max(1, whole)
        return max(1, min(whole, group.at_once((self._mtp if group.mtp else self._main).max_rewind, BLOCK)))

    def close(self) -> None:
        """Give back all pages, and forget all tokens."""
        self.reset()
        for b in range(self.batch):
            self.whole.leave(b)
            for table in self.whole.tables.values():
                table.physical[b].fill_(NOWHERE)
                table.changes += 1

    # ---- pressure, on the device ---------------------------------------------------------

    def live(self, tokens: torch.Tensor, done: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pages of each pool that rows of tokens int64 [..., B] would hold if they took them as they grow, with room
        for one token more: int64 [...]. Rows that are done, bool [..., B], hold none."""
        found = {}
        for name, group in self.whole.groups.items():
            last = -(-((tokens + 1) // group.tokens) // group.rows)
            if group.back is not None:
                reach = (tokens - (self._mtp if group.mtp else self._main).max_rewind).clamp(min=0)
                needed = (reach // group.align * group.align - group.back).clamp(min=0)
                last = last - needed // (group.rows * group.tokens)
            found[name] = last.masked_fill(done, 0).sum(-1)
        return found

    def pressed(self, start: torch.Tensor, more: torch.Tensor | int, done: torch.Tensor) -> torch.Tensor:
        """As in `Cache`, of any leading shape: start int64 and done bool [..., B], bool [...]."""
        live, pools = self.live(start + more, done), self.whole.pools
        return torch.stack([under_pressure(n, pools[name].pages) for name, n in live.items()]).any(0)
