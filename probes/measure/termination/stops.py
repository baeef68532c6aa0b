"""Where a walk is stopped, by the probe and by two oracles, what that leaves out, and two bounds on the error.

Probe: the rule of `dsv4.kernels.grouped_attention.Termination` on the probed channels. Oracle, whole output: the same
rule (τ, φ, p) on all channels. Oracle, known end: it stops at the first tile after which the whole output is within the
rule's own tolerance of the final one: ‖o⁽ᵗ⁾ − o⁽ᵀ⁾‖₂ < τ and 1 − cos(o⁽ᵗ⁾, o⁽ᵀ⁾) < φ.

Both bounds on ‖o⁽ᵀ⁾ − o⁽ᵗ*⁾‖₂ of a head that stops by itself after t* of T tiles have the form ((τb + Δμ)/ν)·ln(T/t*).

By the probe (`probe_bounds`; b and ν as published in arXiv 2606.00024, the rest derived here, see README.md):

    μ⁽ᵗ⁾  t·‖x⁽ᵗ⁾ − x⁽ᵗ⁻¹⁾‖₂ of the probed channels
    b     t* − p + 1, the first of the p stable tiles: μ⁽ᵇ⁾ < τb
    Δμ    max(0, max over t > t* of μ⁽ᵗ⁾ − τb): drift
    ν     the probe constant, min over t > t* of ‖x⁽ᵗ⁾ − x⁽ᵗ⁻¹⁾‖ / ‖o⁽ᵗ⁾ − o⁽ᵗ⁻¹⁾‖

It holds: the error is at most Σ over t > t* of ‖o⁽ᵗ⁾ − o⁽ᵗ⁻¹⁾‖ ≤ μ⁽ᵗ⁾/(νt) ≤ (τb + Δμ)/(νt), and Σ 1/t ≤ ln(T/t*).

By sums (`bounds`, this tool's own):

    ℓ⁽ᵗ⁾  sum of exponentials after tile t
    c⁽ᵗ⁾  ℓ⁽ᵗ⁾·‖o⁽ᵗ⁾ − o⁽ᵗ⁻¹⁾‖₂, what tile t adds, before it is divided by the sum
    b     ℓ⁽ᵗ*⁾: a tile that changes the output by τ when the walk stops adds τb
    Δμ    max(0, max over t > t* of c⁽ᵗ⁾ − τb): by how much a tile that was not read adds more than that (drift)
    ν     min over t ≥ t* of ℓ⁽ᵗ⁾/t: the sum that a tile brings, at least

It holds: the error is at most Σ over t > t* of c⁽ᵗ⁾/ℓ⁽ᵗ⁾, each at most (τb + Δμ)/(νt).

But Δμ and ν are known afterwards only. What a kernel could claim when it stops has Δμ = 0: the steady bounds, which
hold only where the tiles that were not read are like the last that were. By sums ν is then ℓ⁽ᵗ*⁾/t*, so the steady
bound is τ·t*·ln(T/t*); by the probe it is τ·b·ln(T/t*)/ν, with the ν that was measured.
"""

import math

import torch

from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.probes.measure.termination.walk import Walk


def stable(walk: Walk, rule: Termination, whole: bool = False) -> torch.Tensor:
    """bool [N, G, n]: tiles after which the probe, or the `whole` output, has hardly moved; never the first, and none
    beyond a query's last."""
    moved, turned = (walk.changed, walk.veered) if whole else (walk.moved, walk.turned)
    near = moved < rule.tau if rule.scale else torch.isfinite(moved)
    along = turned < rule.phi if rule.direction else torch.isfinite(moved)
    return near & along & (torch.arange(moved.shape[-1]) < walk.tiles.view(-1, 1, 1))


def probe_stops(walk: Walk, rule: Termination, whole: bool = False) -> torch.Tensor:
    """Tiles that each head reads when it decides alone: int64 [N, G], T where it never stops. whole: by all channels,
    the oracle as published."""
    streak = torch.zeros_like(walk.moved[..., 0], dtype=torch.int64)
    stop = walk.tiles.view(-1, 1).expand_as(streak).clone()
    for t, now in enumerate(stable(walk, rule, whole).unbind(-1)):
        streak = torch.where(now, streak + 1, 0)
        stop = torch.where((streak >= rule.wait) & (stop > t + 1), t + 1, stop)
    return stop


def oracle_stops(walk: Walk, rule: Termination) -> torch.Tensor:
    """Of the oracle that knows the end: int64 [N, G]; the last tile where no earlier one is within the tolerance (or
    where the tolerance is zero)."""
    n, last = walk.left.shape[-1], walk.tiles.view(-1, 1)
    within = (walk.left < rule.tau) & (walk.astray < rule.phi) & (torch.arange(n) < last.unsqueeze(-1))
    return torch.where(within.any(-1), within.int().argmax(-1) + 1, last.expand(within.shape[:2]))


def at(values: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """values [N, G, n] after tile [N, G] (1 … n)."""
    return values.gather(-1, (tile - 1).unsqueeze(-1)).squeeze(-1)


def bounds(walk: Walk, rule: Termination, stop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By sums: (the bound, the steady bound) on the error of heads that stop after `stop` [N, G] tiles: fp64 [N, G], 0
    where that is the end."""
    number = torch.arange(1, walk.mass.shape[-1] + 1)
    real, after = number <= walk.tiles.view(-1, 1, 1), number > stop.unsqueeze(-1)
    b = at(walk.mass, stop)
    added = (walk.mass * walk.changed).masked_fill(~(real & after), 0)
    drift = (added.amax(-1) - rule.tau * b).clamp(min=0)
    least = (walk.mass / number).masked_fill(~real | (number < stop.unsqueeze(-1)), torch.inf).amin(-1)
    log = (walk.tiles.view(-1, 1) / stop).log()
    return (rule.tau * b + drift) / least * log, rule.tau * stop * log


def probe_bounds(
    walk: Walk, rule: Termination, stop: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the probe: (the bound, the steady bound, ν, Δμ) of heads that stop after `stop` [N, G] tiles: fp64 [N, G].
    Where that is the end, or no tile after it changes the output, ν is 1 and the bounds hold with what remains. ν = 0,
    a change that the probe does not see at all, makes the bound infinite."""
    number = torch.arange(1, walk.moved.shape[-1] + 1)
    after = (number <= walk.tiles.view(-1, 1, 1)) & (number > stop.unsqueeze(-1))
    claimed = rule.tau * (stop - rule.wait + 1).clamp(min=1)
    most = (walk.moved * number).masked_fill(~after, 0).amax(-1)
    drift = (most - claimed).clamp(min=0)
    seen = (walk.moved / walk.changed).masked_fill(~after | (walk.changed == 0), 1)
    nu = seen.amin(-1).clamp(max=1)
    log = (walk.tiles.view(-1, 1) / stop).log()
    return (claimed + drift) / nu * log, claimed / nu * log, nu, drift


def _agreement(alone: torch.Tensor, oracle: torch.Tensor, T: torch.Tensor, wait: int) -> dict:
    """Shares of heads of which the probe's stop `alone` or the oracle's [N, G] is before the end T. wait: tiles after
    the oracle's that still agree."""
    decided = (alone < T) | (oracle < T)
    offset = (alone - oracle)[decided].double()
    return {
        "decided": _share(decided),
        "agree": _share((offset >= 0) & (offset <= wait)),
        "early": _share(offset < 0),
        "late": _share(offset > wait),
        "offset_median": _quantile(offset, 0.5),
        "offset_p5": _quantile(offset, 0.05),
        "offset_p95": _quantile(offset, 0.95),
    }


def _share(x: torch.Tensor) -> float | None:
    return x.double().mean().item() if x.numel() else None


def _quantile(x: torch.Tensor, q: float) -> float | None:
    """None also where that is infinite."""
    found = x.quantile(q).item() if x.numel() else math.inf
    return found if math.isfinite(found) else None


def figures(walk: Walk, rule: Termination) -> dict:
    """As JSON values; None where nothing was there to be divided by.

    skipped: share of tiles that no head of a group needs any more, which is what saves bytes; skipped_alone: were every
    head served alone; skipped_oracle: the same of the oracle that knows the end. error: ‖o − o⁽ᵀ⁾‖ / ‖o⁽ᵀ⁾‖ of what
    comes out, after the tiles that the group reads.
    agree: the probe stops neither before that oracle nor more than the rule's wait after it; early, late: before, and
    later than that; all three among heads of which probe or oracle stops before the end (`decided`). offset: tiles from
    the oracle to the probe. whole: the same against the oracle by the whole output, which waits as the probe does, so
    agree is the same tile.
    bound_of: heads that stop by themselves; bound_tight: the largest error / bound of them; steady_broken: share whose
    error exceeds the steady bound; by_probe: the same by `probe_bounds`, ν in the median and at least, and the share of
    heads with drift.
    """
    alone, oracle, whole = probe_stops(walk, rule), oracle_stops(walk, rule), probe_stops(walk, rule, whole=True)
    T = walk.tiles.view(-1, 1).expand_as(alone)
    read = alone.amax(-1, keepdim=True).expand_as(alone)
    error = at(walk.left, read) / walk.size
    stopped = alone < T
    bound, steady = (of[stopped] for of in bounds(walk, rule, alone))
    probed, probed_steady, nu, drift = (of[stopped] for of in probe_bounds(walk, rule, alone))
    own = at(walk.left, alone)[stopped]
    tight = lambda of: (own / of).max().item() if len(own) else None
    return {
        "queries": len(walk.tiles),
        "heads": alone.numel(),
        "tiles": walk.tiles.double().mean().item(),
        "skipped": 1 - read.sum().item() / T.sum().item(),
        "skipped_alone": 1 - alone.sum().item() / T.sum().item(),
        "skipped_oracle": 1 - oracle.sum().item() / T.sum().item(),
        "skipped_oracle_shared": _shared(oracle, T),
        "error_mean": _share(error),
        "error_p99": _quantile(error.flatten()[: 1 << 24], 0.99),
        "error_max": error.max().item(),
        **_agreement(alone, oracle, T, rule.wait),
        "whole": {"skipped": 1 - whole.sum().item() / T.sum().item(), "skipped_shared": _shared(whole, T)}
        | _agreement(alone, whole, T, 0),
        "bound_of": int(stopped.sum()),
        "error_alone_max": own.max().item() if len(own) else None,
        "bound_median": _quantile(bound, 0.5),
        "bound_tight": tight(bound),
        "steady_median": _quantile(steady, 0.5),
        "steady_broken": _share(own > steady),
        "by_probe": {
            "bound_median": _quantile(probed, 0.5),
            "bound_tight": tight(probed),
            "steady_median": _quantile(probed_steady, 0.5),
            "steady_broken": _share(own > probed_steady),
            "nu_median": _quantile(nu, 0.5),
            "nu_least": nu.min().item() if len(nu) else None,
            "drifting": _share(drift > 0),
        },
    }


def _shared(stop: torch.Tensor, T: torch.Tensor) -> float:
    return 1 - stop.amax(-1, keepdim=True).expand_as(stop).sum().item() / T.sum().item()
