"""Attention over the sliding window and compressed entries, with a sink."""

from dsv4.kernels.attention import cpu, reference, training
from dsv4.kernels.attention import triton as triton_kernels
from dsv4.kernels.dispatch import Operation

sparse_attention = Operation(
    "sparse_attention",
    {
        "reference": reference.sparse_attention,
        "cpu": cpu.sparse_attention,
        "training": training.sparse_attention,
        "triton": triton_kernels.sparse_attention,
    },
)
hca_attention = Operation(
    "hca_attention",
    {
        "reference": reference.hca_attention,
        "cpu": cpu.hca_attention,
        "training": training.hca_attention,
        "triton": triton_kernels.hca_attention,
    },
)
