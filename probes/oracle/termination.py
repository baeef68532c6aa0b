"""Run-time termination of attention in float64, one KV head of one query at a time.

A query head walks its tiles, and stops after `patience` tiles in a row that changed the probed channels of its output
by less than τ, and their direction by less than φ. Its group reads on until all of its heads have stopped.
"""

import torch

PROBED, STEP, OFFSET = 32, 37, 5


def probed(D: int) -> list[int]:
    """The channels that are looked at: (5 + 37·i) mod D for 32 of them; the first ones where those would repeat."""
    return (
        list(range(min(D, PROBED)))
        if D <= PROBED or D % STEP == 0
        else [(OFFSET + STEP * i) % D for i in range(PROBED)]
    )


def newest_first(position: int, tile: int) -> list[list[int]]:
    """Tiles of all tokens up to `position`: the first of the sequence, then the newest to the oldest."""
    last = position // tile
    return [span(j, tile, position) for j in [0, *range(last, 0, -1)]]


def oldest_last_first(position: int, tile: int) -> list[list[int]]:
    """Newest to oldest, with no regard for the first."""
    return [span(j, tile, position) for j in range(position // tile, -1, -1)]


def span(j: int, tile: int, position: int) -> list[int]:
    return list(range(j * tile, min(j * tile + tile, position + 1)))


def listed(blocks: list[int], block: int, tile: int, position: int) -> list[list[int]]:
    """Tiles of the tokens of a list of blocks (−1: nothing there), in its order; what lies beyond `position` is not
    seen."""
    places = [j * block + i if j >= 0 else -1 for j in blocks for i in range(block)]
    return [[p for p in places[i : i + tile] if 0 <= p <= position] for i in range(0, len(places), tile)]


def outputs(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tiles: list[list[int]], scale: float
) -> torch.Tensor:
    """Attention of q [G, D] over the first 1, 2, … of the tiles: [n, G, D]."""
    places = [p for tile in tiles for p in tile]
    logits = q @ keys[places].T * scale
    weights, v = torch.exp(logits - logits.max(-1, keepdim=True).values), values[places]
    sums, acc, found, at = 0.0, 0.0, [], 0
    for tile in tiles:
        here = slice(at, at + len(tile))
        sums, acc, at = sums + weights[:, here].sum(-1, keepdim=True), acc + weights[:, here] @ v[here], at + len(tile)
        found.append(acc / sums)
    return torch.stack(found)


def changes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """‖x⁽ᵗ⁾ − x⁽ᵗ⁻¹⁾‖ and 1 − cos of probes x [n, G, C] from the second tile on: two of [n − 1, G]."""
    after, before = x[1:], x[:-1]
    cosine = (after * before).sum(-1) / (after.norm(dim=-1) * before.norm(dim=-1)).clamp(min=1e-300)
    return (after - before).norm(dim=-1), 1 - cosine


def stops(
    x: torch.Tensor,
    tau: float,
    phi: float,
    patience: int,
    scale: bool = True,
    direction: bool = True,
    in_a_row: bool = True,
    size: float = 0.0,
    turn: float = 0.0,
) -> list[int]:
    """Tiles that each head reads by itself: of probes x [n, G, C]. size, turn: added to the thresholds. in_a_row: False
    counts stable tiles that do not follow each other."""
    moved, turned = changes(x)
    stable = ((moved < tau + size) | (not scale)) & ((turned < phi + turn) | (not direction))
    found = []
    for head in stable.T.tolist():
        streak, stop = 0, len(head) + 1
        for t, good in enumerate(head):
            streak = streak + 1 if good else (0 if in_a_row else streak)
            if streak >= patience:
                stop = t + 2
                break
        found.append(stop)
    return found
