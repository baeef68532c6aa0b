"""Keep-sets that a step used, one query and KV head at a time, against those that follow from the cache's keys in
float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.kernels.block_choice import Policy
from dsv4.probes.oracle import reading

ROUNDING = 2.0**-23  # of an fp32 product, for each channel that is summed


@dataclass(frozen=True)
class Group:
    """One KV head of one row. q [G, D] of the query judged, before [G, D] of the token before it (None: there is none);
    keys, values [n, D] of the tokens up to the query's position; low, high, mean [blocks, D]. All float64."""

    q: torch.Tensor
    before: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    mean: torch.Tensor

    def scores(self, selector: str, q: torch.Tensor | None = None) -> torch.Tensor:
        """Of every block, by the policy's definition: [blocks]."""
        q = self.q if q is None else q
        return q.mean(0) @ self.mean.T if selector == "mean" else reading.bounds(q, self.low, self.high).max(0).values

    @property
    def slack(self) -> float:
        """How far two fp32 scores that are equal in exact numbers may be apart."""
        sizes = self.q.abs() @ torch.maximum(self.low.abs(), self.high.abs()).T
        return float(sizes.max()) * self.q.shape[-1] * ROUNDING


def alternatives(groups: list[Group], kv: int, policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """(what would be wrong, the scores by which blocks would then be chosen): known ways to choose other blocks."""
    mine = groups[kv]
    if policy.selector == "bound":
        yield "first query head instead of the maximum over the group", mine.scores("bound", mine.q[:1])
        yield "last query head instead of the maximum over the group", mine.scores("bound", mine.q[-1:])
        yield "mean instead of the maximum over the group", reading.bounds(mine.q, mine.low, mine.high).mean(0)
        exchanged = torch.minimum(mine.q.unsqueeze(1) * mine.low, mine.q.unsqueeze(1) * mine.high)
        yield "bound by exchanged minimum and maximum", exchanged.sum(-1).max(0).values
        yield "bound over other channels", mine.scores("bound", mine.q.roll(1, -1))
        yield (
            "bound over half the channels",
            reading.bounds(*(t[:, : t.shape[1] // 2] for t in (mine.q, mine.low, mine.high))).max(0).values,
        )
        yield "mean instead of the bound", mine.scores("mean")
    else:
        yield "first query head instead of the mean over the group", mine.scores("mean", mine.q[:1])
        yield "mean over other channels", mine.scores("mean", mine.q.roll(1, -1))
        yield "bound instead of the mean", mine.scores("bound")
    for other in range(len(groups)):
        if other != kv:
            yield "choice of another KV head", groups[other].scores(policy.selector)
    if mine.before is not None:
        yield "choice of the token before", mine.scores(policy.selector, mine.before)
    yield "lowest scores", -mine.scores(policy.selector)


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one keep-set, by part; causes: all that would explain its distant blocks; random: how likely
    distant blocks that were drawn at random would be wrong."""

    sink: bool
    local: bool
    distant: bool
    order: bool
    causes: tuple[str, ...] = ()
    random: float = 0.0


def judged(listed: list[int], position: int, groups: list[Group], kv: int, policy: Policy) -> Verdict:
    """listed: the blocks that KV head `kv` of a query at `position` read, −1 where nothing is."""
    live = [j for j in listed if j >= 0]
    sinks = reading.sinks(position, policy.block, policy.sink)
    near = reading.locals_of(position, policy.block, policy.sink, policy.local)
    among = reading.candidates(position, policy.block, policy.sink, policy.local)
    picks, wanted = set(live) - sinks - near, min(policy.topk, len(among))
    ordered = listed == sorted(set(live)) + [-1] * (len(listed) - len(live)) and len(listed) == policy.kept
    wrong = len(picks) != wanted or not picks <= set(among)
    if wanted and not wrong:
        scores = groups[kv].scores(policy.selector)
        left = [float(scores[j]) for j in among if j not in picks]
        wrong = bool(left) and max(left) - min(float(scores[j]) for j in picks) > groups[kv].slack
    causes = tuple(_causes(picks, among, groups, kv, policy)) if wrong and wanted else ()
    random = 1 - 1 / math.comb(len(among), wanted)
    return Verdict(not sinks <= set(live), not near <= set(live), wrong, not ordered, causes, random)


def _causes(picks: set[int], among: range, groups: list[Group], kv: int, policy: Policy) -> Iterator[str]:
    right = reading.best(groups[kv].scores(policy.selector), among, policy.topk)
    for off in (-1, 1):
        shifted = {j + off for j in right} & set(among)
        if shifted and shifted <= picks:
            yield "one block off"
    yield from dict.fromkeys(
        name for name, scores in alternatives(groups, kv, policy) if reading.best(scores, among, policy.topk) == picks
    )
