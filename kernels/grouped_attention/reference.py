"""Grouped-query attention (Ainslie et al. 2023): H query heads share KV heads of keys and values, H // KV each."""

import torch

SCRATCH_BYTES = 64 << 20  # of one tile's logits


def grouped_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor, window: int | None,
                      scale: float) -> torch.Tensor:
    """softmax(scale · q·kᵀ)·v over the tokens that each query sees; fp32 inside.

    q [B, T, H, D]; keys, values [B, KV, S, D]; start int64 [B]. Query t of row b stands at position start[b] + t, and its own key
    is in the cache already; it sees positions 0 … start[b] + t, of these only the last `window` (itself included) if that is not
    None. Query head h reads KV head h // (H // KV). What stands beyond a query's position has no part, whatever it is.
    Returns [B, T, H, D] in q.dtype.
    """
    B, T, H, D = q.shape
    KV, end = keys.shape[1], int(start.max()) + T  # of any row: waits for the device, which no other backend may
    first = 0 if window is None else max(0, int(start.min()) + 1 - window)
    position = start.unsqueeze(1) + torch.arange(T, device=q.device)
    slot = torch.arange(first, end, device=q.device)
    queries = (q.float() * scale).view(B, T, KV, H // KV, D).transpose(1, 2)  # [B, KV, T, G, D]
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    step = max(1, SCRATCH_BYTES // (4 * H * (end - first)))
    for b in range(B):
        seen = position[b, -1] >= slot
        k, v = (torch.where(seen.unsqueeze(-1), rows[b, :, first:end].float(), 0) for rows in (keys, values))  # 0 · NaN is NaN
        for t in range(0, T, step):
            tile = slice(t, min(t + step, T))
            part = queries[b, :, tile]
            logits = torch.matmul(part.flatten(1, 2), k.transpose(1, 2)).view(*part.shape[:3], -1)
            behind = position[b, tile].unsqueeze(-1) - slot                       # [t, S]: tokens between key and query
            hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
            p = torch.softmax(logits.masked_fill_(hidden.unsqueeze(1), float("-inf")), -1)
            out[b, tile] = torch.matmul(p.flatten(1, 2), v).view(part.shape).transpose(0, 1).flatten(1, 2).to(q.dtype)
    return out
