"""Measures of what chunked sparse prefill kept: stability of the heavy hitters, survivors of the first chunk, what is
kept of each, bytes.

`positions` is `Memory.positions` of one call from the beginning of the prompt: int [n + 1, B, KV, M], [i] what chunk i
attended, −1: none.
"""

import torch

from dsv4.kernels.chunked_prefill import Chunking


def remembered(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [n + 1, B, KV, tokens]: which tokens each memory holds."""
    held = torch.zeros(*positions.shape[:-1], tokens + 1, dtype=torch.bool, device=positions.device)
    held.scatter_(-1, torch.where(positions < 0, tokens, positions).long(), True)
    return held[..., :tokens]


def stability(positions: torch.Tensor, chunking: Chunking) -> torch.Tensor:
    """Jaccard index |A ∩ B| / |A ∪ B| of the heavy hitters before and after each update but the first: fp32 [n − 1, B,
    KV].

    Local tokens change at every update and are left out. NaN where a row had no such update, or keeps no heavy tokens.
    """
    heavy = positions[1:, ..., : chunking.heavy]  # ascending, and the local ones come last
    before, after = heavy[:-1], heavy[1:]
    both = (before.unsqueeze(-1) == after.unsqueeze(-2)).any(-1).sum(-1)
    absent = (after < 0).any(-1) | (before < 0).any(-1)
    return (both / (2 * chunking.heavy - both)).masked_fill(absent, float("nan"))


def survivors(positions: torch.Tensor, chunking: Chunking) -> torch.Tensor:
    """How many tokens of chunk 0 the memory of each chunk from the second on holds: int64 [n − 1, B, KV]; 0 where there
    is no memory."""
    held = positions[1:-1]
    return ((held >= 0) & (held < chunking.chunk)).sum(-1)


def survivors_by_chance(updates: int, chunking: Chunking) -> list[float]:
    """What `survivors` is expected to give where each update picks heavy tokens at random and keeps local tokens.

    The u-th update picks H of u·S − L tokens, of which S are of chunk 0 (S − L at the first, whose local tokens are of
    it too).
    """
    S, L, H = chunking.chunk, chunking.local, chunking.heavy
    return [float(L + H) if u == 1 else H * S / (u * S - L) for u in range(1, updates + 1)]


def kept_by_place(positions: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """How many tokens of each `width` positions the memory of each chunk holds, mean over rows that have one and KV
    heads: fp32 [n, ⌈tokens / width⌉], [i, j]: of positions j·width …, what chunk i attended beside its own."""
    n, bins = positions.shape[0] - 1, -(-tokens // width)
    source = torch.where(positions[:n] < 0, bins, positions[:n] // width).long()
    counts = torch.zeros(*source.shape[:-1], bins + 1, device=positions.device)
    counts.scatter_add_(-1, source, torch.ones_like(source, dtype=counts.dtype))
    has = (positions[:n] >= 0).all(-1).flatten(1).float()  # [n, B·KV]
    return (counts[..., :bins].flatten(1, 2) * has.unsqueeze(-1)).sum(1) / has.sum(1, keepdim=True).clamp(min=1)


def memory_bytes(batch: int, tokens: int, sets: int, chunking: Chunking) -> int:
    """Bytes of the `Memory` of one call: positions and scores 8·(n + 1)·B·R·M, masses 4·B·R·T, updates 8·B·R.
    sets: R, `Chunking.sets`."""
    each = batch * sets
    return 8 * (chunking.chunks(tokens) + 1) * each * chunking.memory + 4 * each * tokens + 8 * each


def extra_bytes(batch: int, tokens: int, heads: int, sets: int, chunking: Chunking, splits: int) -> int:
    """Bytes that one call takes beyond what dense attention does (its output, and fp32 lse of each query and head):
    `memory_bytes`, and partial sums, 4·B·H·T of phase 1 and 4·B·R·splits·M of phase 2. splits: parts of the column
    sums of a memory."""
    return memory_bytes(batch, tokens, sets, chunking) + 4 * batch * (heads * tokens + sets * splits * chunking.memory)


def dense_bytes(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of queries, keys, values, outputs and lse of dense attention over the whole prompt."""
    return batch * tokens * (2 * (heads + kv_heads) * head_dim * itemsize + 4 * heads)
