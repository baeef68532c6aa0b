"""The gate of a SwiGLU MLP."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.silu_mul import reference, training
from dsv4.kernels.silu_mul import triton as triton_kernels

silu_mul = Operation(
    "silu_mul", {"reference": reference.silu_mul, "training": training.silu_mul, "triton": triton_kernels.silu_mul}
)
