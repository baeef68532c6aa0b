"""Scores of blocks of cached keys, and the blocks that a query keeps."""

from dsv4.kernels.block_choice import reference
from dsv4.kernels.block_choice import triton as triton_kernels
from dsv4.kernels.block_choice.policy import (
    POLICIES,
    Policy,
    block_bounds,
    block_means,
    dense,
    page_bounds,
    sink_window,
)
from dsv4.kernels.dispatch import Operation

block_scores = Operation("block_scores", {"reference": reference.block_scores, "triton": triton_kernels.block_scores})
choose_blocks = Operation(
    "choose_blocks", {"reference": reference.choose_blocks, "triton": triton_kernels.choose_blocks}
)

__all__ = [
    "POLICIES",
    "Policy",
    "block_bounds",
    "block_means",
    "block_scores",
    "choose_blocks",
    "dense",
    "page_bounds",
    "sink_window",
]
