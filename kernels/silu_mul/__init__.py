"""The gate of a SwiGLU MLP."""

from kernels.dispatch import Operation
from kernels.silu_mul import reference

silu_mul = Operation("silu_mul", {"reference": reference.silu_mul})
