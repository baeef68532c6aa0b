"""Experts that were given to the kernels, one by one, against host memory, and what their slot tables say."""

from typing import Any

import torch

from dsv4.probes.scenes.gqa.steps import Tally


class Watch:
    """Looks at every call of one layer's `HostExperts.stacks`. layer: its name. read: matrices of chosen experts;
    slots: what each slot holds by its table; counts: hits and misses. bad: why a slot is wrong, found when it became
    so."""

    def __init__(self, layer: str, experts: Any):
        self.layer, self.host, self.where = layer, experts.host, layer
        self.read, self.slots, self.counts = Tally(), Tally(), Tally()
        self.hits = self.misses = self.evicted = self.wholes = 0
        self.names = [
            f"{name}.{leaf}" for name in ("w13", "w2") for leaf, _ in getattr(experts, name).named_parameters()
        ]
        self.bad: dict[int, str] = {}
        self._judge_slots([-1] * self.host.slots, None, [])
        self.real, self.host.stacks = self.host.stacks, self.stacks

    def stacks(self, indices: torch.Tensor) -> tuple:
        table, held = self.host.table, self.host.table.held[0].tolist()
        before, wholes = table.count[0].tolist(), int(self.host.wholes)
        old = [pool.staged.clone() for pool in self.host.pools]
        numbers, w13, w2 = self.real(indices)
        chosen = sorted(set(indices.flatten().tolist()))
        hits, said = len(set(chosen) & set(held)), [n - m for n, m in zip(table.count[0].tolist(), before)]
        self.counts.see(int(said != [hits, len(chosen) - hits]), 1, self.where)
        self.hits, self.misses = self.hits + hits, self.misses + len(chosen) - hits
        self.wholes += int(self.host.wholes) - wholes
        self.evicted += len(set(held) - set(table.held[0].tolist()) - {-1})
        self._judge_slots(held, old, chosen)
        given = [t for packed in (w13, w2) for t in packed[1:4] if t is not None]
        pairs = sorted(set(zip(indices.flatten().tolist(), numbers.flatten().tolist())))
        for e, s in pairs:
            self._judge_read(e, s, given, [slot for _, slot in pairs])
        return numbers, w13, w2

    def _judge_slots(self, held: list[int], old: list[torch.Tensor] | None, chosen: list[int]) -> None:
        """held: of each slot the expert by the table before the call; old: the slots' words then."""
        now = self.host.table.held[0].tolist()
        for s, e in enumerate(now):
            pools = self.host.pools
            bad = [i for i, pool in enumerate(pools) if not torch.equal(pool.staged[0, s], pool.host[0, e])]
            changed = old is None or any(not torch.equal(a[0, s], p.staged[0, s]) for a, p in zip(old, pools))
            if not bad:
                self.bad.pop(s, None)
            elif s not in self.bad or changed or held[s] != e:
                first = pools[bad[0]]
                same = old is not None and torch.equal(old[bad[0]][0, s], first.staged[0, s])
                lost = [n for n in chosen if n not in now]
                self.bad[s] = self._cause(bad, s, e, held[s] == e, same, lost)
            why = () if not bad else (self.bad[s],)
            names = ", ".join(self.names[i] for i in bad)
            self.slots.see(int(bool(bad)), 1, f"{self.where}, slot {s}, expert {e}, {names}", why)

    def _cause(self, bad: list[int], s: int, e: int, stayed: bool, same: bool, lost: list[int]) -> str:
        """Why slot s does not hold expert e. bad: the matrices that differ; stayed: the table said e before too; same:
        the first of them was not written in this call; lost: chosen experts that the table does not have."""
        pool = self.host.pools[bad[0]]
        found, half = pool.staged[0, s, 0], pool.host.shape[3] // 2
        like = lambda n: torch.equal(found, pool.host[0, n, 0])
        if all(self.names[i].endswith("scale") for i in bad):
            return "scales of another expert"
        if stayed and any(like(n) for n in lost):
            return "slot table"
        if half and torch.equal(found[:half], pool.host[0, e, 0, :half]):
            return "cut short"
        if stayed:
            return "slot table" if same else "overwritten"
        if same or not any(like(n) for n in range(self.host.experts)):
            return "not copied"
        return "another expert"

    def _judge_read(self, e: int, s: int, given: list[torch.Tensor], taken: list[int]) -> None:
        """Expert e, which the kernels read as matrix s of the stacks `given`. taken: numbers of all chosen experts."""
        at, near = f"{self.where}, expert {e}", given[0].data_ptr() == self.host.near[0].weight.data_ptr()
        if not 0 <= s < len(given[0]):
            self.read.see(1, 1, at, ("slot number",))
            return
        buffers = self.host.buffers
        bad = [i for i, (t, b) in enumerate(zip(given, buffers)) if not torch.equal(_bytes(t[s]), _bytes(b.device[e]))]
        if not bad:
            self.read.see(0, 1, at)
            return
        if taken.count(s) > 1:
            cause = "one slot for two experts"
        elif near and self.host.table.held[0, s] != e and s not in self.bad:
            cause = "slot number"
        else:
            cause = self.bad.get(s, "slot number") if near else next(iter(self.bad.values()), "another expert")
        self.read.see(1, 1, f"{at}, {', '.join(self.names[i] for i in bad)}", (cause,))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)
