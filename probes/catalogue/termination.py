"""P23: attention stops reading where the rule says, and attends to just what it read. See termination.md."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.kernels.block_choice import Policy, dense
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.choice import Attention
from dsv4.probes.compare import limit_of, tokens
from dsv4.probes.oracle import reading
from dsv4.probes.oracle import termination as oracle
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.gqa.steps import Call, Tally, Watched, captured, full_layers, out_of_reach, poisoned
from dsv4.probes.scenes.gqa.stop_points import ASPECTS, Walk, allowed, alternatives, count
from dsv4.probes.scenes.patching import kept
from dsv4.probes.subject import Subject

TILE = 64
LENGTHS = [14 * TILE + 20, 9 * TILE - 1, TILE + 6]
POLICIES = (dense(), Policy("block-64 bound", "bound", 64, 1, 2, 8))
NEVER = (Termination(tau=0, patience=1), Termination(patience=1 << 20))
ROUNDING = {"fp32": 3e-6, "products in bf16": 4e-3}  # of a probe, of its size
WIDTHS = (1, 2)
WHOLE = "the rule"
NEVER_STOPPING = "termination, never stopping"
SAME = "the same operations on the same numbers"


@dataclass(frozen=True)
class TerminationProbe(Probe):
    """One step of ragged rows under one rule after the other, dense and over chosen blocks; thresholds taken from what
    the probes of this model do, so that some heads stop, some do not, and each part of the rule decides somewhere."""

    name: ClassVar[str] = "termination"
    title: ClassVar[str] = "attention stops reading where the rule says"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "rewind", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        model = subject.model
        if why := out_of_reach(model, max(LENGTHS) + 8):
            return [vacuous(self.title, why, part="termination")]
        checks = []
        with kept(model, "attention"):
            for policy in POLICIES:
                checks += attempted_all(
                    "attention terminates", policy.name, "termination", lambda: self._policy(subject, policy)
                )
        return checks

    def _policy(self, subject: Subject, policy: Policy) -> Iterator[Check]:
        model, ids = subject.model, tokens(subject, max(LENGTHS) + 8, self.seed, rows=len(LENGTHS))
        model.attention = Attention(policy)
        cache = poisoned(model, len(LENGTHS), max(LENGTHS) + 8)
        model.append(ids[:, : max(LENGTHS)], cache, n_new=LENGTHS, logits="none", prompt=True)
        operation = operation_of(policy)
        with Watched(model, operation) as watched:

            def step(rule: Termination, T: int) -> list[Call]:
                model.attention = Attention(policy, rule)
                model.append(ids[:, -T:], cache)
                cache.rewind(T)
                return watched.taken(operation)

            yield from never(subject, policy, [step(rule, 2) for rule in NEVER], watched)
            # a kernel gives short rows a traversal a tile, in which nothing could stop
            alone = replace(NEVER[0], tile=TILE, splits=1)
            first = Look(subject, policy, alone, step(alone, 2))
            yield every_tile(first.calls, alone, f"{policy.name}, in one traversal")
            for name, rule in rules(*first.thresholds()):
                looks = [Look(subject, policy, rule, step(rule, T)) for T in WIDTHS]
                yield from judged(subject, f"{policy.name}, {name}", rule, looks, model.layer_paths())
                if rule.splits == 1 and name == WHOLE:
                    yield captured(subject, cache, ids[:, -3:], f"{policy.name}, {name}", "termination, captured step")
                    watched.taken(operation)


def operation_of(policy: Policy) -> str:
    return "grouped_attention" if policy.dense else "gather_attention"


def rules(tau: float, phi: float) -> Iterator[tuple[str, Termination]]:
    """Names and rules: each part, and what ablations leave out."""
    plain = Termination(tau, phi, 2, tile=TILE, splits=1)
    yield WHOLE, plain
    yield "patience 1", replace(plain, persistence=False)
    yield "without scale", replace(plain, scale=False)
    yield "without direction", replace(plain, direction=False)
    yield "in 2 splits", replace(plain, splits=2, patience=1)


def never(subject: Subject, policy: Policy, steps: list[list[Call]], watched: Watched) -> Iterator[Check]:
    """Rules that never stop: of two such rules the same bits, and those of attention without a rule over the same tiles
    in the same order; every tile read."""
    part, plain, same = NEVER_STOPPING, Tally(), Tally()
    operation = operation_of(policy)
    for a, b in zip(*steps):
        at, wanted = f"layer {a.layer}", watched.real[operation](*a.given[:-1])
        if a.layer == steps[0][0].layer:  # later layers of the second rule are given what the first gave
            same.see(int((a.out[0] != b.out[0]).sum()), a.out[0].numel(), at)
        plain.see(int((a.out[0] != wanted).sum()), wanted.numel(), at)
    yield same.counted("numbers in which two rules that never stop differ", part, SAME, policy.name)
    yield plain.counted("numbers in which a rule that never stops differs from none", part, SAME, policy.name)
    yield every_tile(steps[0], NEVER[0], policy.name)


def every_tile(calls: list[Call], rule: Termination, where: str) -> Check:
    """With a threshold of 0, tiles that were read are all there are."""
    tiles = Tally()
    for call in calls:
        full = [[len([tile for tile in walk.tiles if tile]) for walk in one] for one in by_query(call, rule)]
        tiles.see(
            int((call.out[1].flatten().cpu() != torch.tensor(full).flatten()).sum()),
            call.out[1].numel(),
            f"layer {call.layer}",
        )
    return tiles.counted(
        "queries of which not every tile was read", NEVER_STOPPING, "a threshold of 0 is never met", where
    )


def by_query(call: Call, rule: Termination) -> Iterator[list[Walk]]:
    """The walks of each query's KV heads, in the order of the batch."""
    chosen = len(call.given) == 9
    q, keys, values = call.given[:3]
    blocks, start, scale = (
        (call.given[3], call.given[4], call.given[6]) if chosen else (None, call.given[3], call.given[5])
    )
    (B, T, H, D), KV = q.shape, keys.shape[1]
    heads, begins = q.double().cpu().view(B, T, KV, H // KV, D), start.tolist()
    for b in range(B):
        k, v = (t[b, :, : begins[b] + T].double().cpu() for t in (keys, values))
        for t in range(T):
            p = begins[b] + t
            order = lambda kv: (
                oracle.listed(blocks[b, t, kv].tolist(), call.given[7], rule.tile, p)
                if chosen
                else oracle.newest_first(p, rule.tile)
            )
            yield [
                Walk(b, p, heads[b, t, kv], k[kv, : p + 1], v[kv, : p + 1], order(kv), scale, chosen, rule.splits or 1)
                for kv in range(KV)
            ]


class Look:
    """The calls of one step under one rule, and every walk of theirs."""

    def __init__(self, subject: Subject, policy: Policy, rule: Termination, calls: list[Call]):
        self.policy, self.rule, self.calls = policy, rule, calls
        self.missing = set(full_layers(subject.model)) - {call.layer for call in calls}
        self.rounding = ROUNDING[
            "products in bf16" if subject.model.backend == "triton" and subject.numerics != "fp32" else "fp32"
        ]
        self.walks = [[walk for one in by_query(call, rule) for walk in one] for call in calls]
        self.outs = [[walk.outputs() for walk in walks] for walks in self.walks]

    def thresholds(self) -> tuple[float, float]:
        """(τ, φ): what half of all changes of the probes stay below."""
        found = [
            oracle.changes(out[..., oracle.probed(out.shape[-1])]) for outs in self.outs for one in outs for out in one
        ]
        return tuple(torch.cat([pair[i].flatten() for pair in found]).median().item() for i in (0, 1))

    def judge(self, tally: dict[str, Tally], limit: float) -> None:
        for call, walks, outs in zip(self.calls, self.walks, self.outs):
            (out, read), KV = call.out, call.given[1].shape[1]
            given, read = (
                out.double().cpu().flatten(0, 1).unflatten(1, (KV, -1)).flatten(0, 1),
                read.cpu().flatten().tolist(),
            )
            right = [count(one, self.rule) for one in outs]
            for n, (walk, one, found) in enumerate(zip(walks, outs, read)):
                at = f"layer {call.layer}, row {walk.row}, KV head {n % KV}"
                neighbours = min((r for r, other in zip(right, walks) if other.row != walk.row), default=right[n])
                few, most = allowed(one, self.rule, self.rounding)
                others = dict(alternatives(walk, one, self.rule, neighbours))
                wrong = not few <= found <= most
                tally["stop"].see(
                    int(wrong), 1, at, tuple(name for name, tiles in others.items() if tiles == found) if wrong else ()
                )
                for name, tiles in others.items():
                    tally[name].see(0, 1, at, chance=float(not few <= tiles <= most))
                if self.rule.splits == 1 and 1 <= found <= len(one[0]):
                    tally["output"].far(given[n], one[0][found - 1], at, limit)
                if walk.listed:
                    tally["order"].see(int(not self._ordered(walk, call.given[3].flatten(0, 2)[n].tolist())), 1, at)

    def _ordered(self, walk: Walk, blocks: list[int]) -> bool:
        """Sinks, local blocks from the newest on, distant ones by falling score."""
        p, policy, live = walk.position, self.policy, [j for j in blocks if j >= 0]
        sinks, near = (
            sorted(reading.sinks(p, policy.block, policy.sink)),
            reading.locals_of(p, policy.block, policy.sink, policy.local),
        )
        first = [*sinks, *sorted(near, reverse=True)]
        low, high, _ = reading.summaries(walk.keys, policy.block)
        scores = reading.bounds(walk.q, low, high).max(0).values
        rest = scores[live[len(first) :]]
        return live[: len(first)] == first and bool(
            (rest[1:] <= rest[:-1] + 1e-5 * rest.abs().max()).all() if len(rest) else True
        )


def judged(subject: Subject, where: str, rule: Termination, looks: list[Look], paths: list[dict]) -> Iterator[Check]:
    tally: dict[str, Tally] = defaultdict(Tally)
    for look in looks:
        look.judge(tally, limit_of(subject)[0])
        tally["calls"].see(len(look.missing), len(look.missing) + len(look.calls), where)
    rule_said, part = "the rule in float64, over the same tiles in the same order", "termination, stop point"
    name = "KV heads of queries that read other tiles than the rule says"
    yield tally["calls"].counted(
        "layers that had no rule to stop", "termination", "every layer without a window follows it", where
    )
    yield tally["stop"].counted(
        name, "termination, stop point", rule_said, where, chance=tally["never stopping"].chance
    )
    for aspect, alternative in ASPECTS.items() if where.endswith(WHOLE) else ():
        if alternative in tally:
            yield _decides(aspect, tally[alternative], where, part)
    if rule.splits == 1:
        yield tally["output"].near(
            "attention is one softmax over just the tiles that were read", "termination, output", subject, where
        )
    if "order" in tally:
        yield tally["order"].counted(
            "lists that are not in the order of importance",
            "termination, order of blocks",
            "sinks, newest local first, best first",
            where,
        )
    wrong = [
        p["layer"]
        for p, call in zip((paths[c.layer] for c in looks[-1].calls), looks[-1].calls)
        if p.get("tiles_read") != float(call.out[1].float().mean()) or p.get("of_tiles") != -(-p["tokens"] // rule.tile)
    ]
    yield compare(
        "layers that say they read another number of tiles",
        len(wrong),
        "==",
        0,
        "the mean of what attention counted",
        len(looks[-1].calls),
        where=where,
        found=wrong[0] if wrong else "",
        part="termination, tiles counted",
    )


def _decides(aspect: str, tally: Tally, where: str, part: str) -> Check:
    """Whether one part of the rule was decisive anywhere: without it the check of stop points would have been red."""
    name = f"stop points that would be others without {aspect}"
    if not tally.chance:
        return vacuous(name, "none: this model and these thresholds do not tell", where=where, part=part)
    return compare(
        name,
        int(tally.chance),
        ">=",
        1,
        "the rule with and without it, in float64",
        tally.samples,
        where=where,
        part=part,
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(TerminationProbe)
