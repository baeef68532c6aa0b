"""Items that a fetch staged, one by one, against host memory in its current state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsv4.kernels.staging import Pool, SlotTable
from dsv4.probes.scenes.gqa.steps import Tally


class Item(NamedTuple):
    """A wanted item: its group, its number, the slot that it was given, the item that this slot held before, and holds
    by the table now;
    valid: whether it was staged and may be read as it was; known: whether it was staged at all; end: the first item
    that is not complete."""

    group: int
    number: int
    slot: int
    before: int
    after: int
    valid: bool
    known: bool
    end: int


@dataclass
class Fetches:
    """A fetch operation, looked at: give `run` to whoever fetches. rows: rows of the batch, whose groups lie side by
    side."""

    real: Callable
    rows: int
    where: str = ""
    staged: Tally = field(default_factory=Tally)
    counted: Tally = field(default_factory=Tally)
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    bad: dict[tuple[int, int], str] = field(default_factory=dict)  # (group, slot) → the fault when it was filled

    def run(
        self,
        table: SlotTable,
        pools: tuple[Pool, ...],
        wanted: torch.Tensor,
        start: torch.Tensor,
        unit: int,
        tail: bool,
        run: int = 0,
    ) -> torch.Tensor:
        held, before = table.held.tolist(), table.count.tolist()
        out = self.real(table, pools, wanted, start, unit, tail, run)
        first = torch.arange(len(held), device=out.device).unsqueeze(1) * run
        now, after, slots = table.held.tolist(), table.count.tolist(), torch.where(out < 0, out, out - first).tolist()
        begins, items = (start // unit).repeat_interleave(len(held) // len(start)).tolist(), []
        for g, row in enumerate(wanted.tolist()):
            asked = [(n, slot) for n, slot in zip(row, slots[g]) if n >= 0 and not (tail and n == begins[g])]
            valid = {n for n in held[g] if 0 <= n < begins[g]}
            hits = sum(n in valid for n, _ in asked)
            said = tuple(after[g][k] - before[g][k] for k in (0, 1))
            self.counted.see(int(said != (hits, len(asked) - hits)), 1, f"{self.where}, group {g}")
            self.hits, self.misses = self.hits + hits, self.misses + len(asked) - hits
            self.evicted += len(valid - set(now[g]))
            items += [
                Item(g, n, slot, held[g][slot], now[g][slot], n in valid, n in held[g], begins[g])
                if 0 <= slot < len(held[g])
                else Item(g, n, -1, -1, -1, False, False, begins[g])
                for n, slot in asked
            ]
        self._judge(pools, items, len(held) // self.rows)
        return out

    def _judge(self, pools: tuple[Pool, ...], items: list[Item], groups: int) -> None:
        self.staged.see(0, len(items), self.where)
        for item in items:
            if item.slot < 0:
                self.staged.see(1, 0, self._at(item, groups), ("no slot",))
        items = [item for item in items if item.slot >= 0]
        if not items:
            return
        g, n, slot = (torch.tensor([item[k] for item in items]) for k in range(3))
        differing: dict[int, Pool] = {}
        for pool in pools:
            unlike = (words(pool.staged, g, slot) != words(pool.host, g, n)).any(-1)
            differing |= {i: pool for i in unlike.nonzero().flatten().tolist() if i not in differing}
        for i, item in enumerate(items):
            place = item.group, item.slot
            if i not in differing:
                self.bad.pop(place, None)
                continue
            if not (item.valid and place in self.bad):
                self.bad[place] = cause(differing[i], item, groups)
            self.staged.see(1, 0, self._at(item, groups), (self.bad[place],))

    def _at(self, item: Item, groups: int) -> str:
        return f"{self.where}, row {item.group // groups}, group {item.group % groups}, item {item.number}"


def words(held: torch.Tensor, group: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Items or slots `number` int64 [n] of groups [n], of the host or of staging: [n, width], on the host."""
    group, number = group.to(held.device), number.to(held.device)
    return held[group, number // held.shape[2], number % held.shape[2]].cpu()


def cause(pool: Pool, item: Item, groups: int) -> str:
    """Why the item's slot does not hold the item of host memory."""
    found = words(pool.staged, torch.tensor([item.group]), torch.tensor([item.slot]))

    def like(group: torch.Tensor, number: torch.Tensor) -> bool:
        return bool((words(pool.host, *torch.broadcast_tensors(group, number)) == found).all(-1).any())

    own, others = torch.tensor([item.group]), torch.tensor([g for g in range(pool.host.shape[0]) if g != item.group])
    if item.after != item.number:
        return "slot of another item"
    if len(others) and like(others, torch.tensor([item.number])):
        return "another KV head" if groups > 1 else "another row of the batch"
    if not item.known and item.before >= 0 and like(own, torch.tensor([item.before])):
        return "not copied"
    if like(own, torch.tensor([n for n in range(item.end) if n != item.number])):
        return "slot table" if item.valid else "another block"
    return "rows of an older step" if item.known else "not copied"


def poison(table: SlotTable, pools: tuple[Pool, ...], ends: list[int]) -> None:
    """Fill every slot with NaN that may not be read any more: it holds nothing, or an item from ends[row] on, which was
    forgotten or is not complete."""
    groups = table.held.shape[0] // len(ends)
    for g, items in enumerate(table.held.tolist()):
        for slot, item in enumerate(items):
            if item < 0 or item >= ends[g // groups]:
                for pool in pools:
                    per, words = pool.staged.shape[2], pool.staged
                    words[g, slot // per, slot % per] = 255 if words.dtype is torch.uint8 else -1
