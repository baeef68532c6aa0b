"""Where sparse reading pays: the crossover context at each batch, and the map of context × batch for given hardware."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dsv4.cost_model.fit import CostModel
from dsv4.cost_model.rows import Measured
from dsv4.cost_model.tier import HostWay, Tier

LONGEST = 1 << 24  # tokens up to which a crossover is searched

Bytes = Callable[[int, int], int]  # (batch, context) → bytes of one layer's attention, or items searched


@dataclass(frozen=True)
class Way:
    """A policy as the cost model sees it. least: up to that context it keeps everything and is dense attention.
    searched: how many items it scores to find what it reads. held: bytes of its cache of one layer, over all rows.
    host: the same cache in host memory, where blocks or entries can be staged."""

    policy: str
    bytes: Bytes
    finding: str | None = None
    least: int = 0
    searched: Bytes = lambda batch, context: 0
    held: Bytes = lambda batch, context: 0
    host: HostWay | None = None

    def seconds(self, costs: CostModel, batch: int, context: int) -> float:
        """Of one layer's attention."""
        return costs.seconds(self.bytes(batch, context), self.finding, self.searched(batch, context), batch)

    def step(self, costs: CostModel, hardware: "Hardware", batch: int, context: int) -> float:
        """Seconds of a whole step by the cost model of steps (`dsv4.cost_model.steps`). Other layers than those that
        the policy is of take c₀ each; what they read is left out."""
        n = hardware.layers
        share = hardware.weights / n + self.bytes(batch, context)
        finding = self.finding if context > self.least else None  # what keeps everything is dense attention
        layer = costs.seconds(share, finding, self.searched(batch, context), batch)
        return n * layer + hardware.others * costs.launches(batch)


@dataclass(frozen=True)
class Hardware:
    """bandwidth: bytes/s, None for the fitted one. capacity: bytes for weights and caches of `layers` layers. weights:
    bytes that each step reads in addition to the caches; resident: bytes of all weights, which share the capacity (0:
    as `weights`). others: layers of the model beside those. host: bytes of host memory for caches; hit: share of what a
    step chooses of them that is staged on the device already."""

    name: str
    capacity: int
    layers: int = 1
    weights: int = 0
    bandwidth: float | None = None
    resident: int = 0
    others: int = 0
    host: int = 0
    hit: float = 0.0

    @property
    def free(self) -> int:
        """Bytes for caches on the device."""
        return self.capacity - max(self.weights, self.resident)


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
    steps: CostModel | None = None,
    tier: Tier | None = None,
) -> list[dict]:
    """A cell for each context and batch: seconds of one layer by policy; which policies fit (the weights and that
    policy's caches); the fastest that fits; and how many times faster its attention and its whole step are than with
    dense attention, which may not fit.

    The fastest is chosen among dense attention and the policies that search, if there are any: a policy that drops
    tokens without searching is always cheapest, and does not do the same work. If none of them fits, `fits` is false,
    and the fastest is that of all.

    steps: the cost model of whole steps; without it a step is taken to be the weights at β and the layers' attention,
    without all that lies between. tier: the price of caches in host memory; with it each cell has `host`: the same
    step with caches there.
    """
    costs, steps = with_bandwidth(costs, hardware), steps and priced_like(with_bandwidth(steps, hardware), costs)
    cells, able = [], [way for way in ways if way.finding is not None] or list(ways)
    for batch in batches:
        for context in contexts:
            seconds = {way.policy: way.seconds(costs, batch, context) for way in (dense, *ways)}
            fits = {way.policy: hardware.layers * way.held(batch, context) <= hardware.free for way in (dense, *ways)}
            best = min(
                (dense, *able), key=lambda way: (not fits[way.policy], seconds[way.policy], way is not dense)
            ).policy
            rest = hardware.weights / costs.bandwidth
            step = (
                {policy: rest + hardware.layers * t for policy, t in seconds.items()}
                if steps is None
                else {way.policy: way.step(steps, hardware, batch, context) for way in (dense, *ways)}
            )
            host = tier and _in_host_memory(step, able, batch, context, hardware, tier)
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
                    "step_seconds": step,
                }
                | ({"host": host | {"speedup": step[dense.policy] / host["seconds"]}} if host else {})
            )
    return cells


def with_bandwidth(costs: CostModel, hardware: Hardware) -> CostModel:
    """The cost model with β of the hardware, where that is given."""
    return costs if hardware.bandwidth is None else replace(costs, bandwidth=hardware.bandwidth)


def priced_like(steps: CostModel, attention: CostModel) -> CostModel:
    """The cost model of steps, with the prices of attention alone for findings of which no step was measured."""
    return replace(steps, finding={**attention.finding, **steps.finding})


def _in_host_memory(
    step: Mapping[str, float], ways: Sequence[Way], batch: int, context: int, hardware: Hardware, tier: Tier
) -> dict | None:
    """The fastest step with caches in host memory: policy, seconds, bytes fetched, and whether its caches fit there and
    on the device; None if no policy can be staged."""
    found = []
    for way in ways:
        if way.host is None:
            continue
        n, host = hardware.layers, way.host
        fetched = (1 - hardware.hit) * n * host.chosen(batch, context)
        fits = host.held(batch, context, n) <= hardware.free and n * host.host(batch, context) <= hardware.host
        seconds = step[way.policy] + tier.extra(n, fetched)
        found.append({"best": way.policy, "seconds": seconds, "fetched": fetched, "fits": fits})
    return min(found, key=lambda f: (not f["fits"], f["seconds"]), default=None)
