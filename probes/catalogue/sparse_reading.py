"""P22: a decode step reads the blocks that its policy defines, and attends to exactly those. See sparse_reading.md."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.kernels.block_choice import Policy
from dsv4.model.gqa.cache import SEARCHED, GroupedCache
from dsv4.model.gqa.choice import Attention
from dsv4.probes.compare import agreeing, limit_of, token_errors, tokens
from dsv4.probes.oracle import reading
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.gqa import selections
from dsv4.probes.scenes.gqa.keep_sets import Group, judged
from dsv4.probes.scenes.gqa.steps import Tally, Watched, captured, full_layers, out_of_reach, poisoned
from dsv4.probes.scenes.patching import kept
from dsv4.probes.subject import Subject

POLICIES = (
    Policy("page-16 bound", "bound", 16, 1, 2, 3),
    Policy("block-16 mean", "mean", 16, 1, 2, 3),
    Policy("two sinks and window", None, 16, 2, 3),
    Policy("block-128 bound", "bound", 128, 1, 2, 2),
)
RULE = "the policy's definition, in float64 from the keys of the cache"
SAME = "the same operations on the same numbers"
NAMES = {"low": "minimum", "high": "maximum", "mean": "mean"}
MOVES = (
    (1, (0, 0, 0)),
    (1, (0, 0, 0)),
    (5, (1, 3, 0)),
    (1, (2, 19, 7)),
    (1, (0, 0, 0)),
    (5, (37, 0, 5)),
    (1, (0, 0, 0)),
    (3, (0, 0, 0)),
)


def lengths_of(policy: Policy) -> list[int]:
    """Three rows: one with many distant blocks, one that is about to begin a block within a step, one whose budget
    covers everything."""
    far, near = (14, 9) if policy.block < 128 else (8, 6)
    return [far * policy.block + 5, near * policy.block - 4, policy.block + 4]


@dataclass(frozen=True)
class SparseReading(Probe):
    """Ragged rows, steps of one token and of more, rewinds followed by other tokens, from caches of NaN."""

    name: ClassVar[str] = "sparse_reading"
    title: ClassVar[str] = "a policy's steps read what it keeps"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "rewind", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        model = subject.model
        if why := out_of_reach(model):
            return [vacuous(self.title, why, part="sparse reading")]
        if model.heads.KV < 2:  # of several ranks, this one's
            several = [vacuous("each KV head chooses for itself", "there is one KV head", part="keep-set")]
        else:
            several = []
        checks = []
        with kept(model, "attention"):
            for policy in POLICIES:
                checks += attempted_all(
                    "a policy runs", policy.name, "sparse reading", lambda: self._policy(subject, policy)
                )
            for policy in selections.OBSERVED:
                checks += attempted_all(
                    "a policy runs",
                    policy.name,
                    "prompt's choice",
                    lambda: selections.checks(subject, policy, self.seed),
                )
            checks += attempted_all(
                "of equal scores the lowest block is kept", "equal keys", "keep-set, ties", lambda: ties(subject)
            )
            checks += attempted_all(
                "a budget for all tokens", "every block", "sparse reading", lambda: self._everything(subject)
            )
        return checks + several

    def _policy(self, subject: Subject, policy: Policy) -> Iterator[Check]:
        model, lengths = subject.model, lengths_of(policy)
        room = max(lengths) + sum(n for n, _ in MOVES) + 1
        if why := out_of_reach(model, room):
            yield vacuous("a policy's steps", why, where=policy.name, part="sparse reading")
            return
        ids = tokens(subject, room, self.seed, rows=len(lengths))
        model.attention = Attention(policy)
        look, cache = Look(subject, policy), poisoned(model, len(lengths), room)
        with Watched(model, "choose_blocks", "gather_attention") as watched:
            model.append(ids[:, : max(lengths)], cache, n_new=lengths, logits="none", prompt=True)
            chosen = len(watched.taken("choose_blocks")) + len(watched.taken("gather_attention"))
            yield from self._prefill(subject, policy, ids, lengths, cache, chosen)
            look.summaries(cache, "after the prompt")
            g = torch.Generator().manual_seed(self.seed + 1)
            for number, (T, forget) in enumerate(MOVES):
                starts = cache.lengths
                model.append(torch.randint(0, subject.config.vocab_size, (len(lengths), T), generator=g), cache)
                look.step(cache, watched, starts, T, f"step {number}")
                cache.rewind(list(forget))
        yield from look.checks()
        new = tokens(subject, 3, self.seed + 3, rows=len(lengths))
        yield captured(subject, cache, new, policy.name, "sparse reading, captured step")

    def _prefill(
        self, subject: Subject, policy: Policy, ids, lengths, cache: GroupedCache, chosen: int
    ) -> Iterator[Check]:
        """Keys and values that a prompt leaves under the policy, against those under dense attention."""
        model, wrong, count = subject.model, 0, 0
        model.attention = Attention()
        plain, first = model.new_cache(cache.batch, cache.max_context), ""
        model.append(ids[:, : max(lengths)], plain, n_new=lengths, logits="none", prompt=True)
        model.attention = Attention(policy)
        for i, (mine, theirs) in enumerate(zip(cache.layers, plain.layers)):
            for row, n in enumerate(lengths):
                for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    bad = int((a[row, :, :n] != b[row, :, :n]).sum())
                    wrong, count, first = (
                        wrong + bad,
                        count + b[row, :, :n].numel(),
                        first or (f"layer {i}" if bad else ""),
                    )
        yield compare(
            "numbers in which a prompt's cache differs from dense prefill's",
            wrong,
            "==",
            0,
            f"prefill is dense and exact: {SAME}",
            count,
            where=policy.name,
            found=first,
            part="dense prefill",
        )
        yield compare(
            "choices of blocks made in a prompt",
            chosen,
            "==",
            0,
            "prefill is dense and exact",
            len(full_layers(model)),
            where=policy.name,
            part="dense prefill",
        )

    def _everything(self, subject: Subject) -> Iterator[Check]:
        """A policy that keeps more blocks than there are has the output of dense attention."""
        model, ids = subject.model, tokens(subject, 180, self.seed + 2)
        logits = {}
        for name, attention in (
            ("dense", Attention()),
            ("all", Attention(replace(POLICIES[0], topk=64))),
            ("few", Attention(POLICIES[0])),
        ):
            model.attention = attention
            cache = model.new_cache(1, 180)
            model.append(ids[:, :170], cache, logits="none", prompt=True)
            logits[name] = torch.cat([model.append(ids[:, t : t + 1], cache) for t in range(170, 180)], 1).cpu()
        errors, lost = (token_errors(logits[name], logits["dense"]) for name in ("all", "few"))
        value, source, limit = agreeing(errors, subject.numerics)
        yield compare(
            "logits of a budget for all tokens are dense attention's",
            value,
            "<=",
            limit,
            source,
            errors.numel(),
            where="67 of 12 blocks",
            part="gathered attention",
            chance=agreeing(lost, subject.numerics)[0],
        )


class Look:
    """The reads of steps under one policy, layer by layer and query by query."""

    def __init__(self, subject: Subject, policy: Policy):
        self.subject, self.model, self.policy = subject, subject.model, policy
        self.tally: dict[str, Tally] = defaultdict(Tally)
        self.limit = limit_of(subject)[0]

    def step(self, cache: GroupedCache, watched: Watched, starts: list[int], T: int, where: str) -> None:
        gathered = {call.layer: call for call in watched.taken("gather_attention")}
        choices = {call.layer: call for call in watched.taken("choose_blocks")}
        for i in full_layers(self.model):
            at = f"layer {i}, {where}"
            self.tally["calls"].see(int(i not in gathered), 1, at)
            if i in gathered:
                self._layer(cache.layers[i], gathered[i], watched.attended[i], starts, T, at)
            if i in choices and self.policy.selector:
                self._bounds(choices[i], cache.layers[i], starts, T, at)
        self._path(gathered, starts, T, where)
        self.summaries(cache, where)

    def _layer(self, rows, call, attended: torch.Tensor, starts: list[int], T: int, at: str) -> None:
        q, _, _, blocks, _, _, scale, *_ = call.given
        B, KV, H, D = q.shape[0], rows.keys.shape[1], *q.shape[2:]
        q, lists, out = q.double().cpu().view(B, T, KV, H // KV, D), blocks.cpu().tolist(), call.out
        self.tally["output"].see(int((attended.reshape(out.shape) != out).sum()), out.numel(), at)
        out = out.double().cpu().view(B, T, KV, H // KV, D)
        for b in range(B):
            held = self._held(rows, b, starts[b] + T)
            for t in range(T):
                p = starts[b] + t
                groups = [group(q[b, t, kv], q[b, t - 1, kv] if t else None, *held[kv], p) for kv in range(KV)]
                for kv in range(KV):
                    self._query(lists[b][t][kv], p, groups, kv, out[b, t, kv], scale, f"{at}, row {b}, KV head {kv}")

    def _query(
        self, listed: list[int], p: int, groups: list[Group], kv: int, out: torch.Tensor, scale: float, at: str
    ) -> None:
        v = judged(listed, p, groups, kv, self.policy)
        self.tally["sink"].see(int(v.sink), int(self.policy.sink > 0), at)
        self.tally["local"].see(int(v.local), 1, at)
        self.tally["distant"].see(int(v.distant), int(self.policy.topk > 0), at, v.causes, v.random)
        self.tally["order"].see(int(v.order), 1, at)
        size, mine = self.policy.block, groups[kv]
        seen = [s for j in dict.fromkeys(listed) if j >= 0 for s in range(j * size, min(j * size + size, p + 1))]
        wanted = reading.attend(mine.q, mine.keys[seen], mine.values[seen], scale)
        self.tally["attention"].far(out, wanted, at, self.limit)

    def _held(self, rows, b: int, n: int) -> list[tuple]:
        """(keys, values, low, high, mean) of each KV head of a row of n tokens. The mean is rounded as the cache rounds
        it."""
        found = []
        for kv in range(rows.keys.shape[1]):
            k, v = (t[b, kv, :n].double().cpu() for t in (rows.keys, rows.values))
            low, high, mean = reading.summaries(k, self.policy.block)
            if "mean" in rows.tensors:
                stored = rows.tensors["mean"][b, kv, : len(mean)].double().cpu()
                mean = torch.where((stored - mean).abs() <= self._ulp(rows, mean), stored, mean)
            found.append((k, v, low, high, mean))
        return found

    def _ulp(self, rows, mean: torch.Tensor) -> torch.Tensor:
        """How far a mean in the cache's dtype may be from the exact one."""
        return torch.finfo(rows.keys.dtype).eps * mean.abs() + 1e-6

    def summaries(self, cache: GroupedCache, where: str) -> None:
        """Of every block of which a row holds anything, over just the tokens that it holds."""
        size = self.policy.block
        for i in full_layers(self.model):
            rows = cache.layers[i]
            for b, n in enumerate(cache.lengths):
                for kv in range(rows.keys.shape[1]):
                    keys = rows.keys[b, kv].double().cpu()
                    wanted = dict(zip(NAMES, reading.summaries(keys[:n], size)))
                    for name in SEARCHED[self.policy.selector]:
                        found = rows.tensors[name][b, kv, : -(-n // size)].double().cpu()
                        slack = self._ulp(rows, wanted[name]) if name == "mean" else 0.0
                        bad = ~((found - wanted[name]).abs() <= slack).all(-1)
                        causes = tuple(
                            c
                            for j in bad.nonzero().flatten().tolist()
                            for c in _cause(name, found[j], keys, j * size, min(n, j * size + size), size)
                        )
                        self.tally[f"summaries {name}"].see(
                            int(bad.sum()), len(bad), f"layer {i}, {where}, row {b}", causes
                        )

    def _bounds(self, call, rows, starts: list[int], T: int, at: str) -> None:
        """No query's product with a key exceeds the bound of its block: by the summaries that the choice was given."""
        if self.policy.selector != "bound":
            return
        q, KV, low, high = call.given[:4]
        B, (H, D) = q.shape[0], q.shape[2:]
        q = q.double().cpu().view(B, T, KV, H // KV, D)
        for b in range(B):
            n = starts[b] // self.policy.block * self.policy.block  # blocks that were complete before this step
            for kv in range(KV if n else 0):
                keys, heads = rows.keys[b, kv, :n].double().cpu(), q[b, :, kv].flatten(0, 1)
                most = (heads @ keys.T).unflatten(1, (-1, self.policy.block)).amax(-1)
                bound = reading.bounds(heads, *(t[b, kv, : most.shape[1]].double().cpu() for t in (low, high)))
                slack = (heads.abs().sum(-1, keepdim=True) * keys.abs().max()) * 2.0**-20
                self.tally["bound"].see(
                    int((~(bound >= most - slack)).sum()), most.numel(), f"{at}, row {b}, KV head {kv}"
                )

    def _path(self, gathered: dict, starts: list[int], T: int, where: str) -> None:
        """The reads that the model reports for its longest row, against the list that it read by."""
        row = starts.index(max(starts))
        p, size = starts[row] + T - 1, self.policy.block
        for i, path in enumerate(self.model.layer_paths()):
            if i in gathered:
                blocks = [j for j in gathered[i].given[3][row, -1, 0].tolist() if j >= 0]
                wanted = {
                    "blocks": len(blocks),
                    "of_blocks": p // size + 1,
                    "tokens": sum(min(size, p + 1 - j * size) for j in blocks),
                }
                bad = [k for k, n in wanted.items() if path.get(k) != n]
                self.tally["counters"].see(int(bool(bad)), 1, f"layer {i}, {where}")

    def checks(self) -> Iterator[Check]:
        name, tally = self.policy.name, self.tally
        yield tally["calls"].counted(
            "layers that did not read by blocks",
            "sparse reading",
            "a policy is followed by every layer without a window",
            name,
        )
        if self.policy.sink:
            yield tally["sink"].counted("keep-sets without a sink block", "keep-set, sink block", RULE, name)
        yield tally["local"].counted("keep-sets without a local block", "keep-set, local blocks", RULE, name)
        if self.policy.topk:
            yield tally["distant"].counted(
                "keep-sets of other distant blocks than the best",
                "keep-set, distant blocks",
                RULE,
                name,
                chance=tally["distant"].chance,
            )
        yield tally["order"].counted(
            "keep-sets out of order, with a block twice or too many", "keep-set, order", RULE, name
        )
        yield tally["attention"].near(
            "attention over the keep-set is one softmax over just its tokens", "gathered attention", self.subject, name
        )
        yield tally["output"].counted(
            "numbers that change between attention and output projection", "gathered attention, output", SAME, name
        )
        for stream in SEARCHED[self.policy.selector]:
            yield tally[f"summaries {stream}"].counted(
                f"blocks whose {NAMES[stream]} is not that of their tokens",
                f"block summaries, {NAMES[stream]}",
                "its definition over the rows that the cache holds",
                name,
            )
        if self.policy.selector == "bound":
            yield tally["bound"].counted(
                "products with a key that exceed the bound of its block", "block bound", "Quest, eq. 2", name
            )
        yield tally["counters"].counted(
            "layers that say they read something else",
            "counters of what was read",
            "the list that attention was given",
            name,
        )


def group(q, before, keys, values, low, high, mean, p: int) -> Group:
    """What a query at p sees of its row's tokens."""
    return Group(q, before, keys[: p + 1], values[: p + 1], low, high, mean)


def _cause(name: str, found: torch.Tensor, keys: torch.Tensor, first: int, last: int, size: int) -> tuple[str, ...]:
    """The tokens for which a wrong summary [D] of tokens first … last − 1 would be right; keys [S, D]. For other rows,
    too, a minimum is only lower."""

    def of(end: int) -> dict[str, torch.Tensor]:
        return {kind: value[0] for kind, value in zip(NAMES, reading.summaries(keys[first:end], size))}

    def near(wanted: torch.Tensor) -> bool:
        return bool(((found - wanted).abs() <= 1e-2 * wanted.abs() + 1e-6).all())

    if last - first > 1 and near(of(last - 1)[name]):
        return ("without the last row",)
    if name == "mean":
        return ()
    if near(of(last)["high" if name == "low" else "low"]):
        return ("minimum and maximum exchanged",)
    beyond = (found - of(last)[name]) * (1 if name == "high" else -1)
    return (
        ("with rows that are not its own",)
        if (beyond >= 0).all()
        else ("without some of its rows",)
        if (beyond <= 0).all()
        else ()
    )


def ties(subject: Subject) -> Iterator[Check]:
    """Every distant block has the same summaries: the lowest are kept, by each selector, and by importance too."""
    model, c = subject.model, subject.config
    KV, G, D, dtype = (
        c.num_key_value_heads,
        c.num_attention_heads // c.num_key_value_heads,
        c.head_dim,
        model.numerics.cache,
    )
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, KV * G, D, generator=g).to(dtype).to(model.device)
    same = torch.randn(1, KV, 1, D, generator=g).to(dtype).expand(1, KV, 16, D).contiguous().to(model.device)
    start, wrong, count = torch.tensor([16 * 16 - 1], device=model.device), [], 0
    for policy in POLICIES[:2]:
        for by_importance, wanted in ((False, [0, 1, 2, 3, 14, 15]), (True, [0, 15, 14, 1, 2, 3])):
            found = model.op.choose_blocks(q, KV, same, same, same, start, policy, by_importance)[0, 0].tolist()
            wrong += [f"{policy.name}: {row}, expected {wanted}" for row in found if row != wanted]
            count += KV
    yield compare(
        "keep-sets that break ties otherwise",
        len(wrong),
        "==",
        0,
        "of equal scores the lowest block",
        count,
        where="equal keys",
        part="keep-set, ties",
        note="; ".join(wrong[:2]),
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(SparseReading)
