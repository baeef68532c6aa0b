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


def observed(
    q: torch.Tensor,
    keys: torch.Tensor,
    before: int,
    scale: float,
    kernel: int,
    average: bool = True,
    causal: bool = True,
) -> torch.Tensor:
    """Scores of the first `before` of keys [P, D] by the last W queries of each head of a group, q [G, W, D]: float64
    [before]. Sources: SnapKV (Li et al. 2024) for the sum over queries and the pooling, which counts zeros beyond the
    ends; kvpress for the average over the group."""
    P, W = len(keys), q.shape[1]
    found = []
    for head in q:
        mass = torch.zeros(before, dtype=torch.float64)
        for w in range(W):
            seen = keys[: P - W + w + 1] if causal else keys
            mass += torch.softmax(seen @ head[w] * scale, 0)[:before]
        near = [mass[max(0, t - kernel // 2) : t + kernel // 2 + 1] for t in range(before)]
        found.append(torch.stack([n.sum() / kernel if average else n.max() for n in near]))
    return torch.stack(found).mean(0)


def layer_budgets(kept: int, window: int, prompt: int, layers: int, beta: int | None) -> list[int]:
    """Tokens of a prompt by layer, the window among them: `kept` in the mean, by PyramidKV's rule (Cai et al. 2024,
    its code) where beta is given."""
    if kept >= prompt or beta is None or layers == 1:
        return [min(kept, prompt)] * layers
    least = (kept - window) // beta
    most = 2 * (kept - window) - least
    if most > prompt - window:
        most, least = prompt - window, 2 * (kept - window) - (prompt - window)
    return [window + most - layer * ((most - least) // (layers - 1)) for layer in range(layers)]
