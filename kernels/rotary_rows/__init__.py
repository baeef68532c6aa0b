"""Rotary position embedding by halves of a head, and the write of a step's rows into the cache of keys and values."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.rotary_rows import reference, training
from dsv4.kernels.rotary_rows import triton as triton_kernels

rotary_rows = Operation(
    "rotary_rows",
    {"reference": reference.rotary_rows, "training": training.rotary_rows, "triton": triton_kernels.rotary_rows},
)
