"""Scores of blocks of cached keys, and the blocks that a query keeps."""

from dsv4.kernels.block_choice import reference
from dsv4.kernels.block_choice import triton as triton_kernels
from dsv4.kernels.block_choice.observed import choose_tokens
from dsv4.kernels.block_choice.policy import (
    POLICIES,
    Observed,
    Policy,
    block_bounds,
    block_means,
    dense,
    page_bounds,
    pyramidkv,
    sink_window,
    snapkv,
)
from dsv4.kernels.dispatch import Operation

block_scores = Operation("block_scores", {"reference": reference.block_scores, "triton": triton_kernels.block_scores})
choose_blocks = Operation(
    "choose_blocks", {"reference": reference.choose_blocks, "triton": triton_kernels.choose_blocks}
)

__all__ = [
    "POLICIES",
    "Observed",
    "Policy",
    "block_bounds",
    "block_means",
    "block_scores",
    "choose_blocks",
    "choose_tokens",
    "dense",
    "page_bounds",
    "pyramidkv",
    "sink_window",
    "snapkv",
]
