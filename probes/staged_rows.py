"""What a fetch staged, item by item, against host memory as it is now."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kernels.staging import Pool, SlotTable
from probes.grouped_steps import Tally


class Item(NamedTuple):
    """Where a wanted item is: its group, its number, the slot that it was given."""

    group: int
    number: int
    slot: int


@dataclass
class Fetches:
    """A fetch operation, looked at: give `run` to whoever fetches. rows: rows of the batch, whose groups lie side by side."""

    real: Callable
    rows: int
    where: str = ""
    staged: Tally = field(default_factory=Tally)
    counted: Tally = field(default_factory=Tally)
    hits: int = 0
    misses: int = 0
    evicted: int = 0

    def run(self, table: SlotTable, pools: tuple[Pool, ...], wanted: torch.Tensor, since: torch.Tensor, tail: bool) -> torch.Tensor:
        held, before = table.held.tolist(), table.count.tolist()
        out = self.real(table, pools, wanted, since, tail)
        begins = since.repeat_interleave(len(held) // len(since)).tolist()
        items: list[tuple[Item, bool]] = []
        after, slots = table.count.tolist(), out.tolist()
        for g, row in enumerate(wanted.tolist()):
            fresh = [n for n in row if n >= 0 and not (tail and n == begins[g])]
            known = {n for n in held[g] if 0 <= n < begins[g]}
            found = {n: slot for n, slot in zip(row, slots[g])}
            hits = sum(n in known for n in fresh)
            said = tuple(after[g][k] - before[g][k] for k in (0, 1))
            self.counted.see(int(said != (hits, len(fresh) - hits)), 1, f"{self.where}, group {g}")
            self.hits, self.misses = self.hits + hits, self.misses + len(fresh) - hits
            self.evicted += len(known - set(table.held[g].tolist()))
            items += [(Item(g, n, found[n]), n in known) for n in fresh]
        self._judge(pools, items, len(held[0]), len(held) // self.rows)
        return out

    def _judge(self, pools: tuple[Pool, ...], items: list[tuple[Item, bool]], slots: int, groups: int) -> None:
        """items, and whether each was staged before."""
        lost = [item for item, _ in items if not 0 <= item.slot < slots]
        items = [(item, hit) for item, hit in items if 0 <= item.slot < slots]
        self.staged.see(len(lost), len(lost), f"{self.where}, item {lost[0].number}" if lost else "", ("no slot",) * len(lost))
        if not items:
            return
        g, n, slot = (torch.tensor(column) for column in zip(*(item for item, _ in items)))
        bad: dict[int, Pool] = {}
        for pool in pools:
            differs = (words(pool.staged, g, slot) != words(pool.host, g, n)).any(-1)
            bad |= {i: pool for i in differs.nonzero().flatten().tolist() if i not in bad}
        for i, pool in bad.items():
            item, hit = items[i]
            at = f"{self.where}, row {item.group // groups}, group {item.group % groups}, item {item.number}"
            self.staged.see(1, 0, at, (cause(pool, item, hit, groups),))
        self.staged.see(0, len(items), self.where)


def words(held: torch.Tensor, group: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Items or slots `number` int64 [n] of groups [n], of the host or of staging: [n, width], on the host."""
    group, number = group.to(held.device), number.to(held.device)
    return held[group, number // held.shape[2], number % held.shape[2]].cpu()


def cause(pool: Pool, item: Item, hit: bool, groups: int) -> str:
    """What stands in the slot instead."""
    count, all_groups = pool.host.shape[1] * pool.host.shape[2], torch.arange(pool.host.shape[0])
    found = words(pool.staged, torch.tensor([item.group]), torch.tensor([item.slot]))
    same = lambda g, n: (words(pool.host, g, n) == found).all(-1)
    if same(all_groups[all_groups != item.group], torch.full((len(all_groups) - 1,), item.number)).any():
        return "another KV head" if groups > 1 else "another row of the batch"
    numbers = torch.arange(count)[torch.arange(count) != item.number]
    if same(torch.full((count - 1,), item.group), numbers).any():
        return "slot table" if hit else "another block"
    return "rows of an older step" if hit else "not copied"


def poison(table: SlotTable, pools: tuple[Pool, ...], ends: list[int]) -> None:
    """Fill every slot with NaN that may not be read any more: it holds nothing, or an item from ends[row] on, which was forgotten or
    is not complete."""
    groups = table.held.shape[0] // len(ends)
    for g, items in enumerate(table.held.tolist()):
        for slot, item in enumerate(items):
            if item < 0 or item >= ends[g // groups]:
                for pool in pools:
                    per, words = pool.staged.shape[2], pool.staged
                    words[g, slot // per, slot % per] = 255 if words.dtype is torch.uint8 else -1
