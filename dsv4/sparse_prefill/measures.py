"""Measures of chunked sparse prefill: retained mass, stability of the heavy hitters, what is kept of each chunk, bytes.

`positions` is `Memory.positions` of one call from the beginning of the prompt: int [n + 1, B, KV, M], [i] what chunk i attended, −1: none.
"""

import torch

from kernels.chunked_prefill import Chunking


def retained_mass(q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, chunking: Chunking, lengths: torch.Tensor, scale: float,
                  queries: torch.Tensor) -> torch.Tensor:
    """Share of a dense causal softmax that falls on the keys which chunked prefill kept: 1 is nothing lost.

    q [B, T, H, D]; keys [B, KV, ≥ T, D]; queries int64 [Q]: the positions looked at. Returns fp32 [B, H, Q]; NaN beyond a row's length.
    """
    (B, T, H, _), KV = q.shape, keys.shape[1]
    mine, place = q[:, queries].float().unflatten(2, (KV, -1)).permute(0, 2, 3, 1, 4), torch.arange(T, device=q.device)  # [B, KV, G, Q, D]
    seen = place <= queries.unsqueeze(1)                                                                                 # [Q, T]
    written = place < lengths.unsqueeze(1)                                                                               # [B, T]
    known = torch.where(written[:, None, :, None], keys[:, :, :T].float(), 0)                                            # 0 · NaN is NaN
    dense = (mine @ known.unsqueeze(2).mT * scale).masked_fill(~seen, float("-inf")).softmax(-1)
    own = place // chunking.chunk == (queries // chunking.chunk).unsqueeze(1)
    kept = (own & seen).expand(B, KV, -1, -1) | remembered(positions, T)[queries // chunking.chunk].permute(1, 2, 0, 3)
    share = (dense * kept.unsqueeze(2)).sum(-1).flatten(1, 2)
    return share.masked_fill((queries >= lengths.unsqueeze(1)).unsqueeze(1), float("nan"))


def remembered(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [n + 1, B, KV, tokens]: which tokens each memory holds."""
    held = torch.zeros(*positions.shape[:-1], tokens + 1, dtype=torch.bool, device=positions.device)
    held.scatter_(-1, torch.where(positions < 0, tokens, positions).long(), True)
    return held[..., :tokens]


def stability(positions: torch.Tensor, chunking: Chunking) -> torch.Tensor:
    """Jaccard index |A ∩ B| / |A ∪ B| of the heavy hitters before and after each update but the first: fp32 [n − 1, B, KV].

    Local tokens change at every update and are left out. NaN where a row had no such update, or keeps no heavy tokens.
    """
    heavy = positions[1:, ..., :chunking.heavy]  # ascending, and the local ones come last
    before, after = heavy[:-1], heavy[1:]
    both = (before.unsqueeze(-1) == after.unsqueeze(-2)).any(-1).sum(-1)
    absent = (after < 0).any(-1) | (before < 0).any(-1)
    return (both / (2 * chunking.heavy - both)).masked_fill(absent, float("nan"))


def kept_by_chunk(positions: torch.Tensor, chunking: Chunking) -> torch.Tensor:
    """How many tokens of each chunk the memory of each chunk holds, mean over rows that have one and KV heads: fp32 [n, n].

    [i, j]: tokens of chunk j that chunk i attended beside its own.
    """
    n = positions.shape[0] - 1
    source = torch.where(positions[:n] < 0, n, positions[:n] // chunking.chunk).long()
    counts = torch.zeros(*source.shape[:-1], n + 1, device=positions.device)
    counts.scatter_add_(-1, source, torch.ones_like(source, dtype=counts.dtype))
    has = (positions[:n] >= 0).all(-1).flatten(1).float()                                       # [n, B·KV]
    return (counts[..., :n].flatten(1, 2) * has.unsqueeze(-1)).sum(1) / has.sum(1, keepdim=True).clamp(min=1)


def extra_bytes(batch: int, tokens: int, kv_heads: int, head_dim: int, chunking: Chunking, itemsize: int, rows: int, splits: int) -> int:
    """Bytes that one call takes beyond what dense attention does (its output, and fp32 lse of each query and head).

    Memory sets and scores of every chunk 8·(n + 1)·B·KV·M, masses 4·B·KV·T, updates 8·B·KV; gathered keys and values 2·B·KV·rows·D·itemsize
    and partial sums 4·B·KV·splits·M. rows: M rounded up to whole tiles. splits: parts of the column sums.
    """
    each = batch * kv_heads
    sets = 8 * (chunking.chunks(tokens) + 1) * each * chunking.memory
    return sets + 4 * each * tokens + 8 * each + 2 * each * rows * head_dim * itemsize + 4 * each * splits * chunking.memory


def dense_bytes(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of queries, keys, values, outputs and lse of dense attention over the whole prompt."""
    return batch * tokens * (2 * (heads + kv_heads) * head_dim * itemsize + 4 * heads)
