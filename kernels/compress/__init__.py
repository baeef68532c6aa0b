"""Gated pooling of both compressors."""

from kernels.compress import reference
from kernels.dispatch import Operation

gated_pool = Operation("gated_pool", {"reference": reference.gated_pool})
