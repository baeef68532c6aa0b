"""Requests that run in rows of a plain or a paged cache, the MTP block one token behind, and what they show on the
way."""

from collections import Counter
from dataclasses import dataclass

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache, Snapshot
from dsv4.cache.paging import BLOCK
from dsv4.cache.prefixes import PrefixTree
from dsv4.probes.scenes.cache_contents import Rows, visible
from dsv4.probes.subject import Subject


@dataclass
class Seen:
    """After one piece: its logits fp32 [n, vocab], those of the MTP block [m, vocab] (None: no block), what may be read
    then."""

    when: str
    logits: torch.Tensor | None
    drafts: torch.Tensor | None
    rows: Rows


class Going:
    """A request in row b of a cache, alone in its pieces. The MTP block follows: its entry at t needs the token at t +
    1.

    ids: prompt and what is fed after it; behind [1, 1, n, d]: the main model's streams at the last token that the row
    holds.
    """

    def __init__(self, subject: Subject, cache: Cache, b: int, ids: list[int], behind: torch.Tensor | None = None):
        self.subject, self.model, self.cache, self.b, self.ids, self.behind = (
            subject,
            subject.model,
            cache,
            b,
            ids,
            behind,
        )
        self.follows = len(self.model.mtp) > 0

    @property
    def length(self) -> int:
        return self.cache.lengths[self.b]

    def rows(self) -> Rows:
        return visible(
            self.subject, self.cache, self.b, self.length, self.cache.mtp_lengths[self.b] if self.follows else 0
        )

    def run(self, n: int) -> Seen:
        """The next n tokens as one piece."""
        start, B, b = self.length, self.cache.batch, self.b
        ids = torch.tensor([self.ids[start : start + n]]).expand(B, n)
        logits, streams = self.model.append(ids, self.cache, n_new=self._alone(n), return_streams=True, chunk=n)
        drafts = self._follow(streams[b : b + 1], start + n) if self.follows else None
        return Seen(f"{start} + {n} tokens", logits[b].cpu(), drafts, self.rows())

    def _follow(self, streams: torch.Tensor, end: int) -> torch.Tensor:
        """The block's entries up to the last whose next token is there: logits [m, vocab]."""
        B, b = self.cache.batch, self.b
        behind = streams if self.behind is None else torch.cat((self.behind, streams), 1)
        ids = torch.tensor([self.ids[self.cache.mtp_lengths[b] + 1 : end]], dtype=torch.int64)
        self.behind, m = streams[:, -1:].clone(), ids.shape[1]
        if m == 0:
            return torch.empty(0, self.model.config.vocab_size)
        wide = behind[:, :m].expand(B, *behind[:, :m].shape[1:])
        return self.model.mtp_logits(wide, ids.expand(B, m), self.cache, n_new=self._alone(m), chunk=m)[b].cpu()

    def _alone(self, n: int) -> list[int]:
        return [n * (row == self.b) for row in range(self.cache.batch)]

    def prefill(self, end: int, tree: PrefixTree | None = None) -> None:
        """Up to `end` tokens, in pieces that end at multiples of BLOCK; tree keeps the prefix at each of those."""
        while self.length < end:
            self.run(min(end, (self.length // BLOCK + 1) * BLOCK) - self.length)
            if tree is not None and self.length % BLOCK == 0:
                tree.remember(self.b, self.ids[: self.length], None if self.behind is None else self.behind[0, 0])

    def pieces(self, sizes: tuple[int, ...]) -> list[Seen]:
        """What is there now, and after each piece."""
        begun = Seen(f"at {self.length} tokens", None, None, self.rows())
        return [begun, *(self.run(n) for n in sizes)]


def last_grafted(tree: PrefixTree) -> Snapshot:
    """The snapshot that was used last."""
    return list(tree.kept)[-1].snapshot


# ---- who holds what -----------------------------------------------------------------------


def miscounted(cache: PagedCache, tree: PrefixTree) -> list[str]:
    """Pages whose holders are not as many as the pool says, and free lists that are not the pages nobody holds."""
    held, found = holders(cache, tree), []
    for name, pool in cache.pools.items():
        for page in range(1, pool.pages + 1):
            if pool.state[page].refs != held[name][page]:
                found.append(f"page {page} of {name}: {pool.state[page].refs} counted, {held[name][page]} hold it")
        if sorted(pool.free) != [page for page in range(1, pool.pages + 1) if not held[name][page]]:
            found.append(
                f"{name}: {len(pool.free)} pages in the free list, {pool.pages - len(+held[name])} that nobody holds"
            )
    return found


def holders(cache: PagedCache, tree: PrefixTree) -> dict[str, Counter]:
    """Group → page → how many rows and kept snapshots hold it. Rows hold what their tables name."""
    found = {name: Counter() for name in cache.pools}
    for name, table in cache.tables.items():
        found[name].update(page for page in table.physical.flatten().tolist() if page)
        for node in tree.kept:
            found[name].update(node.snapshot.pages[name].values())
    return found


def state_of(cache: PagedCache) -> dict[str, tuple]:
    """Group → (holders of each page, the free pages)."""
    return {name: (tuple(p.refs for p in pool.state), tuple(sorted(pool.free))) for name, pool in cache.pools.items()}
