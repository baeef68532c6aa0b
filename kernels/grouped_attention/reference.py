"""Grouped-query attention over a position-addressed cache, all keys up to the query's own position."""

import torch
from einops import rearrange

from dsv4.kernels.grouped_attention.termination import Termination, newest_first, traverse

SCRATCH_BYTES = 256 << 20  # bytes of logits: queries are processed a few at a time


def grouped_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    window: int | None,
    scale: float,
    termination: Termination | None = None,
):
    """o = softmax(scale · q·K)·V over keys 0 … p of a query at position p, or over the last `window` of them if that is
    given.

    q [B, T, H, D]; keys, values [B, KV, S, D]; start int64 [B]: query t of row b is at position p = start[b] + t, and
    its own key is in the cache. Query head h reads KV head h // (H // KV). Returns [B, T, H, D] in q.dtype; fp32
    softmax. With `termination` returns (out, tiles read int32 [B, T, KV]) instead: the first tile of the sequence, then
    the newest first. `out` is one softmax over the tiles that were read: if none is left out, it equals the output
    without a rule bit for bit.
    """
    (B, T, H, D), (KV, S) = q.shape, keys.shape[1:3]
    position = start.unsqueeze(1) + torch.arange(T, device=q.device)
    first = torch.zeros_like(position) if window is None else (position - window + 1).clamp(min=0)
    if termination is not None:
        tiles = newest_first(position, first, -(-S // termination.tile), termination.tile).expand(B, T, KV, -1, -1)
        read = traverse(q, keys, values, tiles, position, window, scale, termination)
        return _attend(q, keys, values, position, first, scale, _marked(tiles, read, S)), read.sum(
            -1, dtype=torch.int32
        )
    return _attend(q, keys, values, position, first, scale)


def _marked(tiles: torch.Tensor, read: torch.Tensor, S: int) -> torch.Tensor:
    """bool [B, T, KV, S]: whether a position is in a tile that was read."""
    at = torch.where(read.unsqueeze(-1) & (tiles >= 0), tiles, S).clamp(max=S).flatten(-2)
    return torch.zeros(*at.shape[:3], S + 1, dtype=torch.bool, device=at.device).scatter_(-1, at, True)[..., :S]


def _attend(q, keys, values, position, first, scale, read=None) -> torch.Tensor:
    """One softmax over positions `first` … `position` [B, T], or over those of them that are in `read`."""
    (B, T, H, D), (KV, S) = q.shape, keys.shape[1:3]
    out, place = torch.empty_like(q), torch.arange(S, device=q.device)
    if not out.numel():
        return out
    written = (place <= position[:, -1:]).view(B, 1, S, 1)
    k, v = (torch.where(written, x.float(), 0) for x in (keys, values))  # 0 · NaN is NaN
    step = max(1, SCRATCH_BYTES // (4 * B * H * S))
    for t in range(0, T, step):
        s = slice(t, t + step)
        heads = rearrange(q[:, s].float(), "b t (kv g) d -> b kv (g t) d", kv=KV)
        seen = (place <= position[:, s].unsqueeze(-1)) & (place >= first[:, s].unsqueeze(-1))  # [B, t, S]
        seen = seen[:, None, None] if read is None else (seen.unsqueeze(2) & read[:, s]).transpose(1, 2).unsqueeze(2)
        logits = rearrange(heads @ k.transpose(-1, -2) * scale, "b kv (g t) s -> b kv g t s", g=H // KV)
        p = torch.softmax(logits.masked_fill(~seen, float("-inf")), -1)
        o = rearrange(p, "b kv g t s -> b kv (g t) s") @ v
        out[:, s] = rearrange(o, "b kv (g t) d -> b t (kv g) d", g=H // KV).to(q.dtype)
    return out
