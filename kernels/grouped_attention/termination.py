"""Run-time termination of attention (ART): when to stop reading keys.

A query's keys come in tiles, the most important first. After tile t the rule looks at the probe x⁽ᵗ⁾: some scattered
channels of the output from the tiles so far, normalised by their own sum. A tile is stable when ‖x⁽ᵗ⁾ − x⁽ᵗ⁻¹⁾‖₂ < τ
and 1 − cos(x⁽ᵗ⁾, x⁽ᵗ⁻¹⁾) < φ. A query head stops after p stable tiles in a row, and does not start again.

The heads of a group share their tiles, so tiles are read until every head of the group has stopped. A head that has
stopped still adds the tiles that are read: their bytes are already paid, and more keys only bring it nearer to full
attention. Each head decides as it would alone.

Tiles in which a query sees nothing (padding of a keep-set, keys outside the window) are neither read, counted nor
probed. Otherwise an unchanged output would count as stable.
"""

from dataclasses import dataclass

import torch

from dsv4.kernels.errors import UnsupportedInput

PROBED, STEP, OFFSET = 32, 37, 5  # channels of a probe, and where they are


@dataclass(frozen=True)
class Termination:
    """τ, φ and p, and the parts that an ablation leaves out.

    scale, direction, persistence: False leaves out the test of ‖Δx‖, of the cosine, or the wait for p stable tiles
    (then p = 1). tile: tokens of a tile, a multiple of 64. splits: a query's tiles are divided round-robin among so
    many traversals. Each terminates by itself on the output over its own tiles, and their outputs are merged by their
    sums; 1 is the definition. None: the implementation chooses, 1 in the reference, on a GPU as many as without a rule
    (`dealt`). least: tiles that a traversal should have, so that it can stop; if the implementation's number of
    traversals would give each fewer, there are fewer traversals. None: the implementation's number. Tiles are counted
    over the row's capacity, because a captured step knows no length. It cannot be combined with splits.
    """

    tau: float = 1e-5
    phi: float = 1e-3
    patience: int = 5
    scale: bool = True
    direction: bool = True
    persistence: bool = True
    tile: int = 128
    splits: int | None = None
    least: int | None = None

    def __post_init__(self):
        for name, value, fits, wanted in (
            ("tau", self.tau, self.tau >= 0, "0 (never stop) or more"),
            ("phi", self.phi, 0 <= self.phi <= 2, "between 0 and 2"),
            ("patience", self.patience, self.patience >= 1, "1 or more"),
            ("tile", self.tile, self.tile > 0 and self.tile % 64 == 0, "a multiple of 64"),
            ("splits", self.splits, self.splits is None or self.splits >= 1, "1 or more, or None"),
            (
                "least",
                self.least,
                self.least is None or self.least >= 1 and self.splits is None,
                "1 or more, without splits, or None",
            ),
        ):
            if not fits:
                raise UnsupportedInput(f"termination: {name} is {value}; expected {wanted}")
        if not self.scale and not self.direction:
            raise UnsupportedInput("termination: neither scale nor direction is tested; every tile would be stable")

    @property
    def wait(self) -> int:
        """Stable tiles in a row after which a head stops."""
        return self.patience if self.persistence else 1

    @property
    def useful(self) -> int:
        """The number of tiles from which on a traversal may leave some out: its first, `wait` stable ones, and one that
        is not read."""
        return self.wait + 2

    def dealt(self, own: int, tiles: int) -> int:
        """Traversals of a query that has up to `tiles` tiles, if the implementation would make `own` without a rule.

        The default is `own`, for two reasons. With a rule that never stops, the output then has the bits of attention
        without a rule, in nearly the same time. And a device has processors for `own` traversals: their parallel reads
        should take no longer than one traversal of few tiles. So fewer traversals, which can stop, cost time wherever
        `own` would fill the device (reasoned, not measured).
        """
        if self.splits is not None:
            return self.splits
        return own if self.least is None else max(1, min(own, tiles // self.least))

    def stable(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Whether the probe x [..., channels] fp32 is stable after `before`: bool [...]. Zeros have no direction, so
        they are not stable."""
        near = (x - before).square().sum(-1) < self.tau**2
        along = (x * before).sum(-1) > (1 - self.phi) * (x.square().sum(-1) * before.square().sum(-1)).sqrt()
        return (near | (not self.scale)) & (along | (not self.direction))


def probed_channels(D: int) -> torch.Tensor:
    """The channels of a probe: int64 [min(32, D)], (5 + 37·i) mod D, ascending; all of them where D has at most 32 or
    is a multiple of 37, in which case the first 32."""
    if D <= PROBED or D % STEP == 0:
        return torch.arange(min(PROBED, D))
    return ((OFFSET + STEP * torch.arange(PROBED)) % D).sort().values


def traverse(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    position: torch.Tensor,
    window: int | None,
    scale: float,
    rule: Termination,
) -> torch.Tensor:
    """Which tiles of tokens are read, in their order, with termination: bool [B, T, KV, n]; tiles in which nothing is
    seen are not.

    q [B, T, H, D]; keys, values [B, KV, S, D]; tiles int64 [B, T, KV, n, tile]: positions, −1 = nothing there; position
    int64 [B, T]: of each query. The output is attention over the read tiles as one softmax, so with a rule that never
    stops it has the bits of attention without a rule.
    """
    read = torch.zeros(tiles.shape[:4], dtype=torch.bool, device=q.device)
    splits = rule.dealt(1, tiles.shape[3])
    for s in range(min(splits, tiles.shape[3])):
        read[..., s::splits] = _traversal(q, keys, values, tiles[:, :, :, s::splits], position, window, scale, rule)
    return read


def _traversal(q, keys, values, tiles, position, window, scale, rule):
    """The tiles that one traversal reads: bool [B, T, KV, n]."""
    (B, T, H, D), KV = q.shape, keys.shape[1]
    heads = q.float().view(B, T, KV, H // KV, D)
    top = heads.new_full(heads.shape[:-1], float("-inf"))
    total, acc, before = torch.zeros_like(top), torch.zeros_like(heads), None
    streak, stopped = torch.zeros_like(top, dtype=torch.int32), torch.zeros_like(top, dtype=torch.bool)
    read, begun, channels = (
        [],
        torch.zeros(B, T, KV, dtype=torch.bool, device=q.device),
        probed_channels(D).to(q.device),
    )
    b, kv = torch.arange(B, device=q.device).view(B, 1, 1, 1), torch.arange(KV, device=q.device).view(KV, 1)
    for place in tiles.unbind(3):
        seen = (place >= 0) & (place <= position.view(B, T, 1, 1))
        if window is not None:
            seen &= place > position.view(B, T, 1, 1) - window
        live = seen.any(-1) & ~stopped.all(-1)
        seen &= live.unsqueeze(-1)
        at = place.clamp(min=0)
        k, v = (torch.where(seen.unsqueeze(-1), x[b, kv, at].float(), 0) for x in (keys, values))
        logits = (heads @ k.transpose(-1, -2) * scale).masked_fill(~seen.unsqueeze(3), float("-inf"))
        above = torch.maximum(top, logits.amax(-1))
        safe = above.masked_fill(above == float("-inf"), 0)
        keep, p = (top - safe).exp(), (logits - safe.unsqueeze(-1)).exp()
        top, total, acc = above, total * keep + p.sum(-1), acc * keep.unsqueeze(-1) + p @ v
        x = (acc / total.clamp(min=1e-38).unsqueeze(-1))[..., channels]
        stable = rule.stable(x, before) & begun.unsqueeze(-1) if before is not None else torch.zeros_like(stopped)
        streak = torch.where(live.unsqueeze(-1), torch.where(stable, streak + 1, 0), streak)
        stopped, before, begun = stopped | (streak >= rule.wait), x, begun | live
        read.append(live)
    return torch.stack(read, -1)


def newest_first(position: torch.Tensor, first: torch.Tensor, n: int, tile: int) -> torch.Tensor:
    """Tiles of a dense traversal: the first tile of the sequence, if it is seen at all, then the newest to the oldest.

    position int64 [B, T]; first int64 [B, T]: the first position seen. Returns positions int64 [B, T, 1, n, tile], −1
    beyond.
    """
    last, lowest = (position // tile).unsqueeze(-1), (first // tile).unsqueeze(-1)
    i = torch.arange(n, device=position.device)
    number = torch.where(lowest == 0, torch.where(i == 0, 0, last + 1 - i), last - i)
    number = torch.where(i <= last - lowest, number, -1)
    place = number.unsqueeze(-1) * tile + torch.arange(tile, device=position.device)
    return torch.where(number.unsqueeze(-1) >= 0, place, -1).unsqueeze(2)
