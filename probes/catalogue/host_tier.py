"""P25: a cache in host memory gives the bits of one on the device, after any staging, eviction or rewind. See
host_tier.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.entries import Staged
from dsv4.cache.host_tier.memory import PinnedMemoryError
from dsv4.kernels.cache_rows import PAGE
from dsv4.probes.oracle import kinds
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.gqa.steps import Tally
from dsv4.probes.scenes.staged_rows import Fetches, poison
from dsv4.probes.subject import Subject

MOVES = (  # tokens of a step, and the tokens rewound after it
    *[(1, (0, 0))] * 2,
    (3, (0, 0)),
    (1, (14, 3)),
    *[(1, (0, 0))] * 12,
    (1, (0, 9)),
    *[(1, (0, 0))] * 10,
    (4, (0, 0)),
    (1, (0, 0)),
)
SAME = "the same operations on the same numbers in the same order: equal bits, whatever the numerics"
PART = "host tier, "


@dataclass(frozen=True)
class HostTier(Probe):
    """CSA's entries in host memory through the whole model. Staging begins as NaN, and slots that may not be read any
    more are made NaN again after each step."""

    name: ClassVar[str] = "host_tier"
    title: ClassVar[str] = "a cache in host memory gives the bits of one on the device"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "rewind", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        if subject.model.layer_devices is not None:
            return [vacuous(self.title, "layers are spread over devices, and staging is on one", part="host tier")]
        try:
            return self._checks(subject)
        except PinnedMemoryError as error:
            return [vacuous(self.title, str(error), part="host tier")]

    def _checks(self, subject: Subject) -> list[Check]:
        c = subject.config
        if kinds.CSA not in c.compress_ratios:
            return [vacuous(self.title, "no layer chooses among entries", part="host tier")]
        packed = "fp8" in subject.caches  # packed rows are staged in whole pages
        least, more = (-(-n // PAGE) * PAGE if packed else n for n in (c.index_topk, 2 * c.index_topk))
        first = 4 * (least + (36 if packed else 9)) + 1
        if first + 70 > c.max_position_embeddings:
            return [
                vacuous(
                    self.title,
                    f"{first + 70} tokens are needed, the checkpoint allows {c.max_position_embeddings}",
                    part="host tier",
                )
            ]
        checks = []
        for slots in dict.fromkeys((least, more)):
            where = f"main entries of CSA, {slots} slots"
            checks += attempted_all(
                "a model decodes from host memory",
                where,
                "host tier",
                lambda: self._csa(subject, first, slots, where, slots == least),
            )
        return checks

    def _csa(self, subject: Subject, first: int, slots: int, where: str, tight: bool) -> Iterator[Check]:
        model, lengths, room = subject.model, [first, first - 9], first + 70
        plain, tier = model.new_cache(2, room), model.new_cache(2, room, memory=HostMemory(slots))
        far = {
            i: layer.main.entries.rows
            for i, layer in enumerate(tier.layers)
            if layer.main is not None and isinstance(layer.main.entries.rows, Staged)
        }
        fetches, output, rows = {}, Tally(), Tally()
        for i, entries in far.items():
            fetches[i] = Fetches(entries.fetched, 2)
            entries.fetched = fetches[i].run
            poison(entries.table, entries.pools, [0, 0])
        g = torch.Generator().manual_seed(self.seed)
        new = lambda n: torch.randint(0, subject.config.vocab_size, (2, n), generator=g)
        ids = new(first)
        for cache in (plain, tier):
            model.append(ids, cache, n_new=lengths, logits="none")
        for number, (T, forget) in enumerate(MOVES):
            x = new(T)
            for i in far:
                fetches[i].where = f"layer {i}, step {number}"
            want, got = (model.append(x, cache) for cache in (plain, tier))
            output.see(int((want != got).sum()), want.numel(), f"step {number}")
            for i in far:
                a, b = (cache.layers[i].main.entries.held() for cache in (plain, tier))
                for row, n in enumerate(plain.lengths):
                    bad = (a[row, : n // 4] != b[row, : n // 4]).any(-1)
                    rows.see(int(bad.sum()), len(bad), f"layer {i}, step {number}, row {row}")
            for cache in (plain, tier):
                cache.rewind(list(forget))
            for entries in far.values():
                poison(entries.table, entries.pools, [n // 4 for n in tier.lengths])
        yield rows.counted(
            "entries in host memory that are not those of the device", f"{PART}rows in host memory", SAME, where
        )
        yield output.counted(
            "logits in which a model with entries in host memory differs", f"{PART}output", SAME, where
        )
        yield from staging(list(fetches.values()), where, tight)


def staging(fetches: list[Fetches], where: str, tight: bool) -> Iterator[Check]:
    """What was staged and counted, over all layers. tight: there are only as many slots as a step needs, so that items
    are evicted."""
    staged, counted = Tally.joined([f.staged for f in fetches]), Tally.joined([f.counted for f in fetches])
    yield staged.counted(
        "staged items that are not those of host memory",
        f"{PART}staged rows",
        "each wanted item in its slot, as host memory has it now",
        where,
    )
    yield counted.counted(
        "fetches that count other hits and misses", f"{PART}traffic", "what was staged before, and what was not", where
    )
    hits, misses, evicted = (sum(getattr(f, name) for f in fetches) for name in ("hits", "misses", "evicted"))
    if min(hits, misses, evicted if tight else 1) == 0:
        yield vacuous(
            "hits, misses and evictions happen",
            f"{hits} hits, {misses} misses, {evicted} evictions",
            where=where,
            part=f"{PART}staged rows",
        )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(HostTier)
