"""Hadamard transform of index queries and keys."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.hadamard import reference
from dsv4.kernels.hadamard import triton as triton_kernels

hadamard = Operation("hadamard", {"reference": reference.hadamard, "triton": triton_kernels.hadamard})
