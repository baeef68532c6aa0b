"""Rotary position embedding with YaRN, interleaved, on the last dims of a head."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.rope import reference, training
from dsv4.kernels.rope import triton as triton_kernels
from dsv4.kernels.rope.reference import inverse_frequencies, rotation

rotate = Operation(
    "rotate", {"reference": reference.rotate, "training": training.rotate, "triton": triton_kernels.rotate}
)

__all__ = ["inverse_frequencies", "rotate", "rotation"]
