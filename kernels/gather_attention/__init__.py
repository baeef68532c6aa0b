"""Attention over the kept blocks of a cache, masked by position."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.gather_attention import cpu, reference
from dsv4.kernels.gather_attention import triton as triton_kernels

gather_attention = Operation(
    "gather_attention",
    {"reference": reference.gather_attention, "cpu": cpu.gather_attention, "triton": triton_kernels.gather_attention},
)
