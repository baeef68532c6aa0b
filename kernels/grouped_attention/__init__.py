"""Grouped-query attention over a position-addressed cache."""

import torch

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.grouped_attention import cpu, reference, training
from dsv4.kernels.grouped_attention import triton as triton_kernels
from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.kernels.grouped_attention.triton_decode import traversals as planned
from dsv4.kernels.launch import interpreting

grouped_attention = Operation(
    "grouped_attention",
    {
        "reference": reference.grouped_attention,
        "cpu": cpu.grouped_attention,
        "training": training.grouped_attention,
        "triton": triton_kernels.grouped_attention,
    },
)


def traversals(backend: str, counted: torch.Tensor, tokens: int, D: int, dtype: torch.dtype, rule: Termination) -> int:
    """The number of traversals into which a step under `rule` divides the tiles of a query that has up to `tokens`
    tokens.

    counted: the tiles read [B, T, KV] of that step, only for shape and device; D: width of a head; dtype: of its
    numbers.
    """
    B, T, KV = counted.shape
    if backend != "triton":
        return rule.dealt(1, -(-tokens // rule.tile))
    return planned(B, T, KV, tokens, D, interpreting() or dtype is torch.float32, counted.device, None, rule)[1]


__all__ = ["Termination", "grouped_attention", "traversals"]
