"""What a step of a GQA model reads of a long cache, in float64 and for one query at a time.

Sources: StreamingLLM (Xiao et al. 2023) for sink and local tokens, Quest (Tang et al. 2024, eq. 2) for bounds of pages.
"""

import torch


def blocks_of(keys: torch.Tensor, block: int) -> list[torch.Tensor]:
    """keys [n, D] in blocks of `block` tokens, the last perhaps shorter."""
    return list(keys.split(block))


def summaries(keys: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channel-wise minimum, maximum and mean of each block of keys [n, D]: three of [⌈n/block⌉, D]."""
    parts = blocks_of(keys, block)
    return tuple(
        torch.stack([f(part) for part in parts])
        for f in (
            lambda part: part.min(0).values,
            lambda part: part.max(0).values,
            lambda part: part.sum(0) / len(part),
        )
    )


def bounds(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Σ_d max(q_d·low_d, q_d·high_d) of each query head and block: q [G, D], low and high [n, D] → [G, n]."""
    return torch.maximum(q.unsqueeze(1) * low, q.unsqueeze(1) * high).sum(-1)


def candidates(position: int, block: int, sink: int, local: int) -> range:
    """Blocks that are neither sink nor local to a query at `position`; all of them complete."""
    return range(sink, max(sink, position // block - local + 1))


def sinks(position: int, block: int, sink: int) -> set[int]:
    return {j for j in range(sink) if j * block <= position}


def locals_of(position: int, block: int, sink: int, local: int) -> set[int]:
    """The block of the position and those before it, `local` in all; sinks are not among them."""
    now = position // block
    return {j for j in range(now - local + 1, now + 1) if j >= sink}


def best(scores: torch.Tensor, among: range, k: int) -> set[int]:
    """The k blocks of the highest scores [n], of equals the lowest."""
    return set(sorted(among, key=lambda j: (-float(scores[j]), j))[:k])


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One softmax over keys [n, D] for each of q [G, D]: [G, D]. NaN without any key."""
    return torch.softmax(q @ keys.T * scale, -1) @ values
