"""Attention over the kept blocks of a position-addressed cache."""

import torch

from dsv4.kernels.grouped_attention.termination import Termination, traverse


def positions_of(blocks: torch.Tensor, block: int) -> torch.Tensor:
    """Token positions of blocks int [..., n]: int64 [..., n·block], −1 where there is no block."""
    place = blocks.long().unsqueeze(-1) * block + torch.arange(block, device=blocks.device)
    return torch.where(blocks.unsqueeze(-1) >= 0, place, -1).flatten(-2)


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
    """o = softmax(scale · q·K)·V over those keys of the kept blocks that a query sees by its position.

    q [B, T, H, D]; keys, values [B, KV, S, D]; blocks int32 [B, T, KV, n]: numbers of blocks of `block` tokens, each at
    most once, −1 anywhere = no block; start int64 [B], window and scale as in `grouped_attention`. A query that sees no
    key gives 0. Returns [B, T, H, D] in q.dtype; fp32 softmax. With `termination` returns (out, tiles read int32 [B, T,
    KV]): tiles of `termination.tile` tokens in the order of the list. `out` is one softmax over the tiles that were
    read: if none is left out, it has the bits of this list without a rule. Sums run in the order of the list. A staged
    cache, whose blocks have other numbers, relies on that. Lists in another order may differ by rounding.
    """
    (B, T, H, D), (KV, S) = q.shape, keys.shape[1:3]
    position = start.unsqueeze(1) + torch.arange(T, device=q.device)
    place, tiles = positions_of(blocks, block), None
    if termination is not None:
        read = tiles_read(q, keys, values, place, position, window, scale, termination)
        tiles, place = read.sum(-1, dtype=torch.int32), torch.where(tokens_of(read, place, termination.tile), place, -1)
    seen = (place >= 0) & (place <= position.view(B, T, 1, 1))
    if window is not None:
        seen &= place > position.view(B, T, 1, 1) - window
    b, kv = torch.arange(B, device=q.device).view(B, 1, 1, 1), torch.arange(KV, device=q.device).view(KV, 1)
    k, v = (torch.where(seen.unsqueeze(-1), x[b, kv, place.clamp(min=0)].float(), 0) for x in (keys, values))
    logits = (q.float().view(B, T, KV, H // KV, D) @ k.transpose(-1, -2) * scale).masked_fill(
        ~seen.unsqueeze(3), float("-inf")
    )
    p = torch.softmax(logits, -1).masked_fill(~seen.any(-1)[..., None, None], 0)
    out = (p @ v).flatten(2, 3).to(q.dtype)
    return out if tiles is None else (out, tiles)


def tiles_read(
    q, keys, values, place: torch.Tensor, position: torch.Tensor, window: int | None, scale: float, rule: Termination
) -> torch.Tensor:
    """bool [B, T, KV, tiles] for place int64 [B, T, KV, tokens], which is cut into tiles in its order."""
    padded = torch.nn.functional.pad(place, (0, -place.shape[-1] % rule.tile), value=-1)
    return traverse(q, keys, values, padded.unflatten(-1, (-1, rule.tile)), position, window, scale, rule)


def tokens_of(read: torch.Tensor, place: torch.Tensor, tile: int) -> torch.Tensor:
    """bool in the shape of `place`: whether a token's tile was read."""
    return read.repeat_interleave(tile, -1)[..., : place.shape[-1]]
