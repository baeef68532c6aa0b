"""Attention over kept blocks on the GPU: the decode kernel of `grouped_attention`, its tiles from a list of blocks."""

import torch

from dsv4.kernels.gather_attention import reference
from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.kernels.grouped_attention.triton_decode import attend_queries


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
    """Computes what the reference does, for contiguous keys and values of bf16 or fp32, head_dim ≤ 256, up to 64 query
    heads a KV head, and blocks that divide tiles of 128 tokens (those of `termination`) or are multiples of them;
    raises UnsupportedInput beyond. With up to 16 tokens a row, their number changes no token's bits."""
    return attend_queries("gather_attention", q, keys, values, blocks, start, window, scale, block, termination)


gather_attention.__doc__ = f"{reference.gather_attention.__doc__}\n\n    On a GPU: {gather_attention.__doc__}"
