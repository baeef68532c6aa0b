"""Where attention stopped reading, one KV head of one query at a time, against the rule in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.kernels.grouped_attention import Termination
from dsv4.probes.oracle import termination as oracle

ASPECTS = {  # what a rule is made of → by which alternative its absence is told
    "scale": "scale ignored",
    "direction": "direction ignored",
    "patience": "patience ignored",
    "a streak": "streak not broken",
    "each head by itself": "the first head to stop stops its group",
    "each row by itself": "the first row to stop stops its neighbours",
    "the first tile first": "first tile not read first",
}


@dataclass(frozen=True)
class Walk:
    """One KV head of one query: q [G, D], keys and values [n, D] up to its position, float64; tiles of positions in the
    order in which they are read; blocks: where they come from a list. x [n, G, C]: probes after each tile, of each
    split."""

    row: int
    position: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tiles: list[list[int]]
    scale: float
    listed: bool
    splits: int = 1

    def parts(self, tiles: list[list[int]] | None = None) -> list[list[list[int]]]:
        """Tiles dealt out to the splits like cards; tiles in which nothing is seen are none."""
        tiles = self.tiles if tiles is None else tiles
        dealt = [[tile for tile in tiles[s :: self.splits] if tile] for s in range(self.splits)]
        return [part for part in dealt if part]

    def outputs(self, tiles: list[list[int]] | None = None) -> list[torch.Tensor]:
        return [oracle.outputs(self.q, self.keys, self.values, part, self.scale) for part in self.parts(tiles)]


def count(outs: list[torch.Tensor], rule: Termination, of=max, channels: list[int] | None = None, **more) -> int:
    """Tiles that a group reads; of: how its heads decide together."""
    total = 0
    given = dict(scale=rule.scale, direction=rule.direction, patience=rule.patience if rule.persistence else 1) | more
    for out in outs:
        x = out[..., oracle.probed(out.shape[-1]) if channels is None else channels]
        total += of(oracle.stops(x, rule.tau, rule.phi, **given))
    return total


def allowed(outs: list[torch.Tensor], rule: Termination, rounding: float) -> tuple[int, int]:
    """(fewest, most) tiles that the rule allows where the probe is rounded by `rounding` of its size."""
    size = rounding * max(float(out.norm(dim=-1).max()) for out in outs)
    turn = max(2e-6, rounding)
    return count(outs, rule, size=size, turn=turn), count(outs, rule, size=-size, turn=-turn)


def alternatives(walk: Walk, outs: list[torch.Tensor], rule: Termination, neighbours: int) -> Iterator[tuple[str, int]]:
    """(what would be wrong, tiles that would then be read). neighbours: fewest tiles of the other rows by the rule."""
    if rule.scale and rule.direction:
        yield "scale ignored", count(outs, rule, scale=False)
        yield "direction ignored", count(outs, rule, direction=False)
    if rule.persistence and rule.patience > 1:
        yield "patience ignored", count(outs, rule, patience=1)
        yield "streak not broken", count(outs, rule, in_a_row=False)
    if len(walk.q) > 1:
        yield "the first head to stop stops its group", count(outs, rule, of=min)
    yield "the first row to stop stops its neighbours", min(neighbours, count(outs, rule))
    if not walk.listed:
        yield "first tile not read first", count(walk.outputs(oracle.oldest_last_first(walk.position, rule.tile)), rule)
        yield (
            "oldest tiles first",
            count(walk.outputs([*reversed(oracle.oldest_last_first(walk.position, rule.tile))]), rule),
        )
    if walk.q.shape[-1] > oracle.PROBED:
        yield "other channels probed", count(outs, rule, channels=list(range(oracle.PROBED)))
    whole = sum(map(len, outs))
    yield "never stopping", whole
    yield "one tile late", min(count(outs, rule) + 1, whole)
    yield "one tile early", count(outs, rule) - 1


def written(walk: Walk, read: int) -> torch.Tensor:
    """Attention [G, D] over the first `read` tiles of a walk without splits."""
    return walk.outputs()[0][read - 1]
