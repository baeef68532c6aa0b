"""Gated pooling of both compressors."""

from dsv4.kernels.compress import reference
from dsv4.kernels.compress import triton as triton_kernels
from dsv4.kernels.dispatch import Operation

gated_pool = Operation("gated_pool", {"reference": reference.gated_pool, "triton": triton_kernels.gated_pool})
