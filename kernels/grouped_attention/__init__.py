"""Grouped-query attention over a position-addressed cache."""

from kernels.dispatch import Operation
from kernels.grouped_attention import cpu, reference, training
from kernels.grouped_attention import triton as triton_kernels
from kernels.grouped_attention.termination import Termination

grouped_attention = Operation("grouped_attention", {
    "reference": reference.grouped_attention, "cpu": cpu.grouped_attention, "training": training.grouped_attention,
    "triton": triton_kernels.grouped_attention})

__all__ = ["Termination", "grouped_attention"]
