"""Hadamard transform of index queries and keys."""

from kernels.dispatch import Operation
from kernels.hadamard import reference
from kernels.hadamard import triton as triton_kernels

hadamard = Operation("hadamard", {"reference": reference.hadamard, "triton": triton_kernels.hadamard})
