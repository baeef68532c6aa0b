"""Attention over kept blocks on a host processor: whole blocks are copied, one query at a time, so that the copies stay
in the processor's caches.

The reference gathers token by token, for all queries at once: for 16 queries of 4K kept tokens that is mostly memory
traffic.
"""

import torch

from dsv4.kernels.gather_attention import reference
from dsv4.kernels.gather_attention.reference import positions_of, tiles_read, tokens_of
from dsv4.kernels.grouped_attention.termination import Termination


def gather_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    start: torch.Tensor,
    window: int | None,
    scale: float,
    block: int,
    termination: Termination | None = None,
):
    if keys.shape[2] % block or not blocks.numel():
        return reference.gather_attention(q, keys, values, blocks, start, window, scale, block, termination)
    read = None
    if termination is not None:
        place, position = positions_of(blocks, block), start.unsqueeze(1) + torch.arange(q.shape[1])
        tiles = tiles_read(q, keys, values, place, position, window, scale, termination)
        read = tokens_of(tiles, place, termination.tile)
    out = _attended(q, keys, values, blocks, start, window, scale, block, read)
    return out if termination is None else (out, tiles.sum(-1, dtype=torch.int32))


def _attended(q, keys, values, blocks, start, window, scale, block, read) -> torch.Tensor:
    """read: bool [B, T, KV, n·block], the tokens that count (None: all)."""
    out, (H, D), KV = torch.empty_like(q), q.shape[2:], keys.shape[1]
    for b, first in enumerate(start.tolist()):
        # [T, KV, n·block]
        place = positions_of(blocks[b], block)
        position = first + torch.arange(q.shape[1]).view(-1, 1, 1)
        seen = (place >= 0) & (place <= position)
        if window is not None:
            seen &= place > position - window
        if read is not None:
            seen &= read[b]
        for t, (kept, visible) in enumerate(zip(blocks[b].clamp(min=0), seen)):
            k, v = (torch.where(visible.unsqueeze(-1), _copied(x[b], kept, block), 0) for x in (keys, values))
            logits = (q[b, t].float().view(KV, H // KV, D) @ k.transpose(-1, -2) * scale).masked_fill(
                ~visible.unsqueeze(1), float("-inf")
            )
            p = torch.softmax(logits, -1).masked_fill(~visible.any(-1)[:, None, None], 0)
            out[b, t] = (p @ v).flatten(0, 1).to(q.dtype)
    return out


def _copied(cache: torch.Tensor, blocks: torch.Tensor, block: int) -> torch.Tensor:
    """Blocks int [KV, n] of cache [KV, S, D] as fp32 [KV, n·block, D]."""
    whole = cache.unflatten(1, (-1, block)).flatten(2)
    return (
        torch.stack([head.index_select(0, numbers) for head, numbers in zip(whole, blocks)])
        .float()
        .view(len(cache), -1, cache.shape[-1])
    )


gather_attention.__doc__ = reference.gather_attention.__doc__
