"""Gated pooling of both compressors."""

from kernels.compress import reference
from kernels.compress import triton as triton_kernels
from kernels.dispatch import Operation

gated_pool = Operation("gated_pool", {"reference": reference.gated_pool, "triton": triton_kernels.gated_pool})
