"""Where a walk is stopped, by the probe and by an oracle, what that leaves out, and the bound on the error.

Probe: the rule of `dsv4.kernels.grouped_attention.Termination`. Oracle: it knows the end, and stops at the first tile
after which the full output, all channels, is within the rule's own tolerance of the final one: ‖o⁽ᵗ⁾ − o⁽ᵀ⁾‖₂ < τ and 1
− cos(o⁽ᵗ⁾, o⁽ᵀ⁾) < φ.

Bound on ‖o⁽ᵀ⁾ − o⁽ᵗ*⁾‖₂ of a head that stops by itself after t* of T tiles: ((τb + Δμ)/ν)·ln(T/t*), with

    ℓ⁽ᵗ⁾  sum of exponentials after tile t            c⁽ᵗ⁾ = ℓ⁽ᵗ⁾·‖o⁽ᵗ⁾ − o⁽ᵗ⁻¹⁾‖₂, what tile t adds, before it is
    divided by the sum b     ℓ⁽ᵗ*⁾: a tile that changes the output by τ when the walk stops adds τb
    Δμ    max(0, max over t > t* of c⁽ᵗ⁾ − τb): by how much a tile that was not read adds more than that (drift)
    ν     min over t ≥ t* of ℓ⁽ᵗ⁾/t: the sum that a tile brings, at least

It holds by these definitions: the error is at most Σ over t > t* of c⁽ᵗ⁾/ℓ⁽ᵗ⁾, each at most (τb + Δμ)/(νt), and Σ 1/t ≤
ln(T/t*). But Δμ and ν are known afterwards only. What a kernel could claim when it stops has Δμ = 0 and ν = ℓ⁽ᵗ*⁾/t*,
so τ·t*·ln(T/t*): the steady bound, which holds only where the tiles that were not read are like the last that was.
"""

import torch

from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.probes.measure.termination.walk import Walk


def stable(walk: Walk, rule: Termination) -> torch.Tensor:
    """bool [N, G, n]: tiles after which the probe has hardly moved; never the first, and none beyond a query's last."""
    n = walk.moved.shape[-1]
    near = walk.moved < rule.tau if rule.scale else torch.isfinite(walk.moved)
    along = walk.turned < rule.phi if rule.direction else torch.isfinite(walk.moved)
    return near & along & (torch.arange(n) < walk.tiles.view(-1, 1, 1))


def probe_stops(walk: Walk, rule: Termination) -> torch.Tensor:
    """Tiles that each head reads when it decides alone: int64 [N, G], T where it never stops."""
    streak = torch.zeros_like(walk.moved[..., 0], dtype=torch.int64)
    stop = walk.tiles.view(-1, 1).expand_as(streak).clone()
    for t, now in enumerate(stable(walk, rule).unbind(-1)):
        streak = torch.where(now, streak + 1, 0)
        stop = torch.where((streak >= rule.wait) & (stop > t + 1), t + 1, stop)
    return stop


def oracle_stops(walk: Walk, rule: Termination) -> torch.Tensor:
    """int64 [N, G]; the last tile where no earlier one is within the tolerance (or where the tolerance is zero)."""
    n, last = walk.left.shape[-1], walk.tiles.view(-1, 1)
    within = (walk.left < rule.tau) & (walk.astray < rule.phi) & (torch.arange(n) < last.unsqueeze(-1))
    return torch.where(within.any(-1), within.int().argmax(-1) + 1, last.expand(within.shape[:2]))


def at(values: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """values [N, G, n] after tile [N, G] (1 … n)."""
    return values.gather(-1, (tile - 1).unsqueeze(-1)).squeeze(-1)


def bounds(walk: Walk, rule: Termination, stop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the bound, the steady bound) on the error of heads that stop after `stop` [N, G] tiles: fp64 [N, G], 0 where
    that is the end."""
    number = torch.arange(1, walk.mass.shape[-1] + 1)
    real, after = number <= walk.tiles.view(-1, 1, 1), number > stop.unsqueeze(-1)
    b = at(walk.mass, stop)
    added = (walk.mass * walk.changed).masked_fill(~(real & after), 0)
    drift = (added.amax(-1) - rule.tau * b).clamp(min=0)
    least = (walk.mass / number).masked_fill(~real | (number < stop.unsqueeze(-1)), torch.inf).amin(-1)
    log = (walk.tiles.view(-1, 1) / stop).log()
    return (rule.tau * b + drift) / least * log, rule.tau * stop * log


def figures(walk: Walk, rule: Termination) -> dict:
    """As JSON values; None where nothing was there to be divided by.

    skipped: share of tiles that no head of a group needs any more, which is what saves bytes; skipped_alone: were every
    head served alone; skipped_oracle: the same of the oracle. error: ‖o − o⁽ᵀ⁾‖ / ‖o⁽ᵀ⁾‖ of what comes out, after the
    tiles that the group reads.
    agree: the probe stops neither before the oracle nor more than the rule's wait after it; early, late: before, and
    later than that; all three among heads of which probe or oracle stops before the end (`decided`). offset: tiles from
    the oracle to the probe.
    bound_of: heads that stop by themselves; bound_tight: the largest error / bound of them; steady_broken: share whose
    error exceeds the steady bound.
    """
    alone, oracle = probe_stops(walk, rule), oracle_stops(walk, rule)
    T = walk.tiles.view(-1, 1).expand_as(alone)
    read = alone.amax(-1, keepdim=True).expand_as(alone)
    error = at(walk.left, read) / walk.size
    decided, stopped = (alone < T) | (oracle < T), alone < T
    offset, wait = (alone - oracle)[decided].double(), rule.wait
    share = lambda x: x.double().mean().item() if x.numel() else None
    quantile = lambda x, q: x.quantile(q).item() if x.numel() else None
    bound, steady = bounds(walk, rule, alone)
    own = at(walk.left, alone)[stopped]
    return {
        "queries": len(walk.tiles),
        "heads": alone.numel(),
        "tiles": walk.tiles.double().mean().item(),
        "skipped": 1 - read.sum().item() / T.sum().item(),
        "skipped_alone": 1 - alone.sum().item() / T.sum().item(),
        "skipped_oracle": 1 - oracle.sum().item() / T.sum().item(),
        "skipped_oracle_shared": _shared(oracle, T),
        "error_mean": share(error),
        "error_p99": quantile(error.flatten()[: 1 << 24], 0.99),
        "error_max": error.max().item(),
        "decided": share(decided),
        "agree": share((offset >= 0) & (offset <= wait)),
        "early": share(offset < 0),
        "late": share(offset > wait),
        "offset_median": quantile(offset, 0.5),
        "offset_p5": quantile(offset, 0.05),
        "offset_p95": quantile(offset, 0.95),
        "bound_of": int(stopped.sum()),
        "error_alone_max": own.max().item() if len(own) else None,
        "bound_median": quantile(bound[stopped], 0.5),
        "bound_tight": (own / bound[stopped]).max().item() if len(own) else None,
        "steady_median": quantile(steady[stopped], 0.5),
        "steady_broken": share(own > steady[stopped]),
    }


def _shared(stop: torch.Tensor, T: torch.Tensor) -> float:
    return 1 - stop.amax(-1, keepdim=True).expand_as(stop).sum().item() / T.sum().item()
