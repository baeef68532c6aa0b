"""Rotary position embedding with YaRN, interleaved, on the last dims of a head."""

from kernels.dispatch import Operation
from kernels.rope import reference
from kernels.rope.reference import inverse_frequencies, rotation

rotate = Operation("rotate", {"reference": reference.rotate})

__all__ = ["inverse_frequencies", "rotate", "rotation"]
