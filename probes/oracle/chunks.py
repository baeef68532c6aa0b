"""Two-phase chunked prefill in float64, one chunk of one memory at a time: of a KV head and its G query heads, or of
one query head (G = 1)."""

import torch


def within(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Logits [G, n, n] of a chunk's queries q [G, n, D] to its own keys [n, D]; −inf for later ones."""
    n = len(keys)
    return (q @ keys.T * scale).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))


def fused(
    own: torch.Tensor, far: torch.Tensor | None, values: torch.Tensor, far_values: torch.Tensor | None
) -> torch.Tensor:
    """One softmax over a chunk's own keys and its memory: logits [G, n, n] and [G, n, M], values [n, D] and [M, D] →
    [G, n, D]."""
    if far is None:
        return torch.softmax(own, -1) @ values
    return torch.softmax(torch.cat((own, far), -1), -1) @ torch.cat((values, far_values))


def own_mass(own: torch.Tensor) -> torch.Tensor:
    """What phase 1 gives a chunk's keys: column sums of its own softmax, over all queries and heads of the group:
    [n]."""
    return torch.softmax(own, -1).sum((0, 1))


def far_mass(own: torch.Tensor, far: torch.Tensor, score: str) -> torch.Tensor:
    """What phase 2 gives the memory: column sums of the softmax over both (score "fused") or over the memory alone
    ("memory"): [M]."""
    if score == "memory":
        return torch.softmax(far, -1).sum((0, 1))
    return torch.softmax(torch.cat((own, far), -1), -1)[..., own.shape[-1] :].sum((0, 1))


def heaviest(scores: dict[int, float], among: set[int], count: int) -> list[int]:
    """The `count` positions of the highest scores, of equals the earliest; ascending."""
    return sorted(sorted(among, key=lambda p: (-scores[p], p))[:count])
