"""Grouped-query attention of prompts on a host processor, by torch's fused attention.

The reference holds a piece's logits against the whole cache, in fp32. Torch's kernel keeps them in the processor's
caches, and multiplies in the inputs' own type: a prompt of 8K tokens runs several times as fast, especially in bf16.
Few queries, and attention with termination, use the reference, so decoding has the reference's bits, whatever policy is
compared with it.
"""

import torch
import torch.nn.functional as F

from dsv4.kernels.grouped_attention import reference
from dsv4.kernels.grouped_attention.termination import Termination

FEW = 16  # tokens of a row that count as decoding
PIECE = 1024  # queries of one mask


def grouped_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    window: int | None,
    scale: float,
    termination: Termination | None = None,
):
    if termination is not None or q.shape[1] <= FEW or not q.dtype == keys.dtype == values.dtype:
        return reference.grouped_attention(q, keys, values, start, window, scale, termination)
    out = torch.empty_like(q)
    for b, first in enumerate(start.tolist()):
        for t in range(0, q.shape[1], PIECE):
            mine = q[b, t : t + PIECE].transpose(0, 1).unsqueeze(0)  # [1, H, t, D]
            position = first + t + torch.arange(mine.shape[2])
            low, end = 0 if window is None else max(0, first + t - window + 1), first + t + mine.shape[2]
            place, since = torch.arange(low, end), position.unsqueeze(-1)
            seen = place <= since if window is None else (place <= since) & (place > since - window)
            # unwritten slots may be NaN
            k, v = (x[b : b + 1, :, low:end] for x in (keys, values))
            found = F.scaled_dot_product_attention(mine, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
            out[b, t : t + PIECE] = found[0].transpose(0, 1)
    return out


grouped_attention.__doc__ = reference.grouped_attention.__doc__
