"""Linear maps with dense, FP8 or FP4 weights."""

from kernels.dispatch import Operation
from kernels.linear import reference, training

linear = Operation("linear", {"reference": reference.linear, "training": training.linear})
grouped_linear = Operation("grouped_linear", {"reference": reference.grouped_linear, "training": training.grouped_linear})
