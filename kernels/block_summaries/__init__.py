"""Channel-wise minimum, maximum and mean of blocks of cached keys."""

from dsv4.kernels.block_summaries import reference
from dsv4.kernels.block_summaries import triton as triton_kernels
from dsv4.kernels.dispatch import Operation

summarise_blocks = Operation(
    "summarise_blocks", {"reference": reference.summarise_blocks, "triton": triton_kernels.summarise_blocks}
)
