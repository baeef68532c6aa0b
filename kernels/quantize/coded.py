"""Rows that a kernel leaves rounded to FP8 beside the numbers themselves, for products of rounded activations."""

from typing import NamedTuple

import torch

BLOCK = 128  # columns of a scale
MOST_TOKENS = 256  # of a tile of the products that read scales
FEWEST = 17  # rows from which several products of an input take its codes (`kernels.linear.triton`)
STREAMED = 32  # rows up to which products of numbers round them by themselves


class CodedRows(NamedTuple):
    """x [N, K] in bf16 or fp32, K a multiple of 128, and x through FP8 in blocks of 128 columns, as
    `simulate_fp8_blocks` rounds it: E4M3 codes uint8 [N, K], and their scales fp32 [K / 128, N], as `scales_of`."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


class RoundedRows(NamedTuple):
    """x [N, K] as of `CodedRows`, and the same rounded numbers in x.dtype, for products whose sums are exact."""

    x: torch.Tensor
    rounded: torch.Tensor


Rows = torch.Tensor | CodedRows | RoundedRows


def plain(x: Rows) -> torch.Tensor:
    """The numbers [N, K]."""
    return x if isinstance(x, torch.Tensor) else x.x


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """fp32 [K / 128, N] for the scales of x [N, K], with room for whole tiles of tokens behind each row."""
    N, K = x.shape
    room = -(-N // MOST_TOKENS) * MOST_TOKENS
    return torch.empty(K // BLOCK, room, dtype=torch.float32, device=x.device)[:, :N]
