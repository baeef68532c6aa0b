"""Manifold-constrained hyper-connections: before a sublayer, after it, and the head."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.hyper_connections import cpu, reference, training
from dsv4.kernels.hyper_connections import triton as triton_kernels

mhc_pre = Operation(
    "mhc_pre",
    {
        "reference": reference.mhc_pre,
        "cpu": cpu.mhc_pre,
        "training": training.mhc_pre,
        "triton": triton_kernels.mhc_pre,
    },
)
mhc_post = Operation(
    "mhc_post",
    {
        "reference": reference.mhc_post,
        "cpu": cpu.mhc_post,
        "training": training.mhc_post,
        "triton": triton_kernels.mhc_post,
    },
)
mhc_head = Operation(
    "mhc_head",
    {
        "reference": reference.mhc_head,
        "cpu": cpu.mhc_head,
        "training": training.mhc_head,
        "triton": triton_kernels.mhc_head,
    },
)
