"""P25: a cache in host memory gives the bits of one on the device, after any staging, eviction or rewind. See
host_tier.md."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.entries import Staged
from dsv4.cache.host_tier.grouped import HostRows
from dsv4.cache.host_tier.memory import PinnedMemoryError
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.cache_rows import PAGE
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.operations import GQA_OPERATIONS
from dsv4.model.gqa.choice import Attention
from dsv4.probes.compare import tokens
from dsv4.probes.oracle import kinds
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.gqa.steps import Call, Tally, Watched, full_layers, out_of_reach, poisoned
from dsv4.probes.scenes.patching import kept
from dsv4.probes.scenes.staged_rows import Fetches, poison
from dsv4.probes.subject import Subject

POLICIES = (  # and staging slots beyond those that a step needs
    (Policy("block-16 bound", "bound", 16, 1, 2, 3), 0),
    (Policy("block-16 mean", "mean", 16, 1, 1, 3), 2),
    (Policy("sink and window", None, 16, 1, 4), 1),
)
LENGTHS = [14 * 16 + 5, 9 * 16 - 2]
PROMPT = "prompt"
MOVES = (  # tokens of a step, and the tokens rewound after it
    (1, (0, 0)),
    (1, (0, 0)),
    (12, (0, 0)),
    (1, (19, 3)),
    (12, (0, 0)),
    (12, (0, 0)),
    (1, (0, 0)),
    (5, (37, 0)),
    (PROMPT, (0, 0)),
    (1, (0, 0)),
    (12, (0, 30)),
    (12, (0, 0)),
    (12, (0, 0)),
    (1, (0, 0)),
)
CSA_MOVES = (
    *[(1, (0, 0))] * 2,
    (3, (0, 0)),
    (1, (14, 3)),
    *[(1, (0, 0))] * 12,
    (1, (0, 9)),
    *[(1, (0, 0))] * 10,
    (4, (0, 0)),
    (1, (0, 0)),
)
APPENDED = 20
SAME = "the same operations on the same numbers in the same order: equal bits, whatever the numerics"
PART = "host tier, "


@dataclass(frozen=True)
class HostTier(Probe):
    """The first and the last layer of a GQA model decode from host memory beside the model itself, given the same
    queries, keys and values; CSA's entries in host memory through the whole model. Staging begins as NaN, and slots
    that may not be read any more are made NaN again after each step."""

    name: ClassVar[str] = "host_tier"
    title: ClassVar[str] = "a cache in host memory gives the bits of one on the device"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "rewind", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        if subject.model.layer_devices is not None:
            return [vacuous(self.title, "layers are spread over devices, and staging is on one", part="host tier")]
        try:
            return self._grouped(subject) if subject.family == "gqa" else self._entries(subject)
        except PinnedMemoryError as error:
            return [vacuous(self.title, str(error), part="host tier")]

    # ---- GQA ------------------------------------------------------------------------------

    def _grouped(self, subject: Subject) -> list[Check]:
        model = subject.model
        if why := out_of_reach(model, max(LENGTHS) + 120):
            return [vacuous(self.title, why, part="host tier")]
        checks = []
        with kept(model, "attention"):
            for policy, spare in POLICIES:
                slots = policy.kept + spare
                where = f"{policy.name}, {slots} slots"
                checks += attempted_all(
                    "a layer decodes from host memory",
                    where,
                    "host tier",
                    lambda: self._policy(subject, policy, slots, where),
                )
        return checks

    def _policy(self, subject: Subject, policy: Policy, slots: int, where: str) -> Iterator[Check]:
        model, room = subject.model, max(LENGTHS) + 120
        model.attention = Attention(policy)
        ids, cache = tokens(subject, room, self.seed, rows=len(LENGTHS)), poisoned(model, len(LENGTHS), room)
        model.append(ids[:, : max(LENGTHS)], cache, n_new=LENGTHS, logits="none", prompt=True)
        pair = {
            i: Beside(subject, policy, slots, cache.layers[i], room)
            for i in {full_layers(model)[0], full_layers(model)[-1]}
        }
        tally, g = defaultdict(Tally), torch.Generator().manual_seed(self.seed + 1)
        with Watched(model, "rotary_rows", "gather_attention", "grouped_attention") as watched:
            for number, (T, forget) in enumerate(MOVES):
                prompt = T == PROMPT
                new = torch.randint(
                    0, subject.config.vocab_size, (len(LENGTHS), APPENDED if prompt else T), generator=g
                )
                model.append(new, cache, prompt=prompt)
                outs = {
                    call.layer: call.out
                    for call in watched.taken("grouped_attention" if prompt else "gather_attention")
                }
                for call in watched.taken("rotary_rows"):
                    if call.layer not in pair:
                        continue
                    pair[call.layer].step(call, outs[call.layer], prompt, tally, f"layer {call.layer}, step {number}")
                    pair[call.layer].compare(cache.lengths, tally, f"layer {call.layer}, step {number}")
                cache.rewind(list(forget))
                for one in pair.values():
                    poison(one.rows.table, one.rows.pools, [n // policy.block for n in cache.lengths])
        yield from self._checks(tally, [one.fetches for one in pair.values()], where, slots == policy.kept)

    def _checks(self, tally: dict[str, Tally], fetches: list[Fetches], where: str, tight: bool) -> Iterator[Check]:
        yield tally["output"].counted(
            "numbers in which attention from host memory differs", f"{PART}output", SAME, where
        )
        yield tally["rows"].counted(
            "rows in host memory that are not those of the device", f"{PART}rows in host memory", SAME, where
        )
        if tally["summaries"].samples:
            yield tally["summaries"].counted(
                "summaries that are not those of the cache on the device", f"{PART}summaries", SAME, where
            )
        yield from staging(fetches, where, tight)

    # ---- CSA ------------------------------------------------------------------------------

    def _entries(self, subject: Subject) -> list[Check]:
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
        for number, (T, forget) in enumerate(CSA_MOVES):
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
    staged, counted = joined([f.staged for f in fetches]), joined([f.counted for f in fetches])
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


def joined(tallies: list[Tally]) -> Tally:
    found = Tally()
    for one in tallies:
        found.see(one.wrong, one.samples, one.first)
        found.causes += one.causes
    return found


class Beside:
    """A layer's cache in host memory, in parallel with the model's own."""

    def __init__(self, subject: Subject, policy: Policy, slots: int, resident, room: int):
        model, c = subject.model, subject.config
        self.policy, self.resident, self.scale = policy, resident, model.layers[0].self_attn.scale
        self.rows = HostRows(
            len(LENGTHS), c.num_key_value_heads, room, c.head_dim, model.numerics.cache, model.device, policy, slots
        )
        self.op = bind(GQA_OPERATIONS, model.backend, DispatchLedger(), replacements=model.replacements)
        self.fetches = Fetches(self.op.fetch, len(LENGTHS))
        self.op.fetch = self.fetches.run
        self.rows.keys.fill_(float("nan"))
        self.rows.values.fill_(float("nan"))
        self.rows.store(
            resident.keys,
            resident.values,
            torch.zeros(len(LENGTHS), dtype=torch.int64, device=model.device),
            max(LENGTHS),
        )
        for name, tensor in self._summaries():
            tensor.copy_(resident.tensors[name])

    def _summaries(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, getattr(self.rows, name)) for name in ("low", "high", "mean") if getattr(self.rows, name) is not None
        ]

    def step(self, call: Call, wanted: torch.Tensor, prompt: bool, tally: dict[str, Tally], at: str) -> None:
        """call: of `rotary_rows` by the model's layer."""
        q, k, v, biases, cis, _, _, start = call.given
        self.fetches.where = at
        if prompt:
            found = self._appended(q, k, v, biases, cis, start)
        else:
            places = self.rows.places(start, len(q) // len(start))
            found, _ = self.rows.decode(self.op, q, k, v, biases, cis, places, self.scale)
        tally["output"].see(int((found != wanted).sum()), wanted.numel(), at)

    def _appended(self, q, k, v, biases, cis, start: torch.Tensor) -> torch.Tensor:
        """Tokens of a prompt in `HostLayer`: the whole layer is copied, and the tokens are written through."""
        rows, count = self.rows, len(q) // len(start)
        keys, values = DenseStream([rows]).layer(0)
        q = self.op.rotary_rows(q, k, v, biases, cis, keys, values, start)
        rows.store(keys, values, start, count)
        if rows.policy.selector is not None:
            self.op.summarise_blocks(keys, start, count, rows.low, rows.high, rows.mean, rows.block)
        return self.op.grouped_attention(q, keys, values, start, None, self.scale)

    def compare(self, lengths: list[int], tally: dict[str, Tally], at: str) -> None:
        """Compare host memory with the cache on the device, for the tokens that rows hold."""
        for b, n in enumerate(lengths):
            for far, near in ((self.rows.host_keys, self.resident.keys), (self.rows.host_values, self.resident.values)):
                bad = (far[b, :, :n].cpu() != near[b, :, :n].cpu()).any(-1)
                tally["rows"].see(int(bad.sum()), bad.numel(), f"{at}, row {b}")
            for name, tensor in self._summaries():
                blocks = -(-n // self.policy.block)
                bad = (tensor[b, :, :blocks] != self.resident.tensors[name][b, :, :blocks]).any(-1)
                tally["summaries"].see(int(bad.sum()), bad.numel(), f"{at}, row {b}")


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(HostTier)
