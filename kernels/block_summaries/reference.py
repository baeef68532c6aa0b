"""Summaries of blocks of keys: channel-wise minimum, maximum and mean."""

import torch


def touched_blocks(tokens: int, block: int) -> int:
    """The most blocks that `tokens` consecutive positions can touch."""
    return (tokens + block - 2) // block + 1


def summarise_blocks(
    keys: torch.Tensor,
    start: torch.Tensor,
    tokens: int,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    mean: torch.Tensor | None,
    block: int,
) -> None:
    """Write the summaries of every block that positions start … start + tokens − 1 touch, over its keys up to the last
    of them.

    keys [B, KV, S, D]; start int64 [B]; low and high [B, KV, S/block, D] in the keys' dtype (both or neither), mean [B,
    KV, S/block, D] in any float. A summary is computed from the cached keys and never updated, so a rewind needs no
    work: the next token summarises the last block again. Blocks that are not touched do not change.
    """
    (B, KV, S, D), device = keys.shape, keys.device
    number = (start // block).unsqueeze(1) + torch.arange(touched_blocks(tokens, block), device=device)  # [B, m]
    # first unwritten
    end = (start + tokens).view(B, 1, 1)
    # the first block again, instead of one that is not touched
    number = torch.where(number * block < end.squeeze(2), number, number[:, :1])
    # [B, m, block]
    place = number.unsqueeze(2) * block + torch.arange(block, device=device)
    row, seen = torch.arange(B, device=device).view(B, 1, 1), (place < end)[..., None, None]
    # [B, m, block, KV, D]
    k = keys[row, :, place]
    if low is not None:
        low[row[..., 0], :, number] = k.masked_fill(~seen, float("inf")).amin(2)
        high[row[..., 0], :, number] = k.masked_fill(~seen, float("-inf")).amax(2)
    if mean is not None:
        mean[row[..., 0], :, number] = (k.float().masked_fill(~seen, 0).sum(2) / seen.sum(2)).to(mean.dtype)
