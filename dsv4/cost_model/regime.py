"""Where sparse reading pays: the crossover context at each batch, and the map of context × batch for given hardware."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dsv4.cost_model.fit import CostModel
from dsv4.cost_model.rows import Measured

LONGEST = 1 << 24  # tokens up to which a crossover is searched

Bytes = Callable[[int, int], int]  # (batch, context) → bytes of one layer's attention, or items searched


@dataclass(frozen=True)
class Way:
    """A policy as the cost model sees it. least: up to that context it keeps everything and is dense attention.
    searched: how many items it scores to find what it reads. held: bytes of its cache of one layer, over all rows."""

    policy: str
    bytes: Bytes
    finding: str | None = None
    least: int = 0
    searched: Bytes = lambda batch, context: 0
    held: Bytes = lambda batch, context: 0

    def seconds(self, costs: CostModel, batch: int, context: int) -> float:
        return costs.seconds(self.bytes(batch, context), self.finding, self.searched(batch, context), batch)


@dataclass(frozen=True)
class Hardware:
    """bandwidth: bytes/s, None for the fitted one. capacity: bytes for weights and caches of `layers` layers. weights:
    bytes that each step reads in addition to the caches."""

    name: str
    capacity: int
    layers: int = 1
    weights: int = 0
    bandwidth: float | None = None


def crossover(costs: CostModel, dense: Way, sparse: Way, batch: int, longest: int = LONGEST) -> int | None:
    """The shortest context, from `least` to `longest`, from which on the sparse policy is not slower; None if it never
    pays there.

    Bisection finds it, so the difference of the two times must change its sign once. It does if dense bytes grow
    faster.
    """
    pays = lambda context: sparse.seconds(costs, batch, context) <= dense.seconds(costs, batch, context)
    if not pays(longest):
        return None
    low, high = sparse.least, longest
    if pays(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def measured_crossover(rows: Iterable[Measured], policy: str, batch: int) -> tuple[int | None, int | None]:
    """(longest measured context where dense was faster, shortest from which on the policy was faster); None if there
    was none."""
    times = {(r.policy if not r.dense else "dense", r.context): r.seconds for r in rows if r.batch == batch}
    contexts = sorted(c for p, c in times if p == policy and ("dense", c) in times)
    ahead = [times[policy, c] <= times["dense", c] for c in contexts]
    last = max((i for i, won in enumerate(ahead) if not won), default=-1)
    return contexts[last] if last >= 0 else None, contexts[last + 1] if last + 1 < len(contexts) else None


def regime_map(
    costs: CostModel,
    dense: Way,
    ways: Sequence[Way],
    contexts: Iterable[int],
    batches: Iterable[int],
    hardware: Hardware,
) -> list[dict]:
    """A cell for each context and batch: seconds of one layer by policy; which policies fit (the weights and that
    policy's caches); the fastest that fits; and how many times faster its attention and its whole step are than with
    dense attention, which may not fit.

    The fastest is chosen among dense attention and the policies that search, if there are any: a policy that drops
    tokens without searching is always cheapest, and does not do the same work. If none of them fits, `fits` is false,
    and the fastest is that of all.
    """
    if hardware.bandwidth is not None:
        costs = CostModel(hardware.bandwidth, costs.c0, costs.finding)
    cells, able = [], [way for way in ways if way.finding is not None] or list(ways)
    for batch in batches:
        for context in contexts:
            seconds = {way.policy: way.seconds(costs, batch, context) for way in (dense, *ways)}
            fits = {
                way.policy: hardware.weights + hardware.layers * way.held(batch, context) <= hardware.capacity
                for way in (dense, *ways)
            }
            best = min(
                (dense, *able), key=lambda way: (not fits[way.policy], seconds[way.policy], way is not dense)
            ).policy
            rest = hardware.weights / costs.bandwidth
            step = {policy: rest + hardware.layers * t for policy, t in seconds.items()}
            cells.append(
                {
                    "batch": batch,
                    "context": context,
                    "seconds": seconds,
                    "best": best,
                    "attention_speedup": seconds[dense.policy] / seconds[best],
                    "step_speedup": step[dense.policy] / step[best],
                    "fits": fits[best],
                    "fits_by_policy": fits,
                }
            )
    return cells
