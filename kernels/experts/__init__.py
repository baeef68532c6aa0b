"""Routed and shared experts: SwiGLU with clamps, in every weight format."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.experts import cpu, reference, training
from dsv4.kernels.experts import triton as triton_kernels

experts = Operation(
    "experts",
    {
        "reference": reference.experts,
        "cpu": cpu.experts,
        "training": training.experts,
        "triton": triton_kernels.experts,
    },
)
shared_expert = Operation(
    "shared_expert",
    {"reference": reference.shared_expert, "training": training.shared_expert, "triton": triton_kernels.shared_expert},
)
