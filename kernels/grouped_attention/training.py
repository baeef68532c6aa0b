"""Grouped-query attention of whole sequences, differentiable: torch's own."""

import torch
import torch.nn.functional as F

from dsv4.kernels.errors import UnsupportedInput


def grouped_attention(
    q: torch.Tensor, keys, values, start: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """Computes what the reference does, for sequences that begin at position 0. q [B, T, H, D]; keys, values:
    `dsv4.kernels.rotary_rows.training.Whole`."""
    if window is not None:
        raise UnsupportedInput(f"training attends to whole sequences; this layer has a window of {window}")
    group = q.shape[2] // keys.rows.shape[2]
    k, v = (x.rows.repeat_interleave(group, 2).transpose(1, 2) for x in (keys, values))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=scale).transpose(1, 2)
