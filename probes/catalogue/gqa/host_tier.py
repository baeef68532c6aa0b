"""`host_tier` on GQA models: keys and values in host memory, blocks of them staged."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from dsv4.cache.host_tier.grouped import HostRows
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.operations import GQA_OPERATIONS
from dsv4.model.gqa.choice import Attention
from dsv4.probes.catalogue.host_tier import PART, SAME, HostTier, staging
from dsv4.probes.compare import tokens
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
APPENDED = 20


class GQAHostTier(HostTier):
    """The first and the last layer of a model decode from host memory beside the model itself, given the same queries,
    keys and values."""

    def _checks(self, subject: Subject) -> list[Check]:
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
        yield from self._counted(tally, [one.fetches for one in pair.values()], where, slots == policy.kept)

    def _counted(self, tally: dict[str, Tally], fetches: list[Fetches], where: str, tight: bool) -> Iterator[Check]:
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


class Beside:
    """A layer's cache in host memory, in parallel with the model's own."""

    def __init__(self, subject: Subject, policy: Policy, slots: int, resident, room: int):
        model, c = subject.model, subject.config
        self.policy, self.resident, self.scale = policy, resident, model.layers[0].self_attn.scale
        self.rows = HostRows(
            len(LENGTHS), model.heads.KV, room, c.head_dim, model.numerics.cache, model.device, policy, slots
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
