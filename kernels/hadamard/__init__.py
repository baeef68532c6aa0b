"""Hadamard transform of index queries and keys."""

from kernels.dispatch import Operation
from kernels.hadamard import reference

hadamard = Operation("hadamard", {"reference": reference.hadamard})
