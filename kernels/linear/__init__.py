"""Linear maps with dense, FP8 or FP4 weights."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.linear import reference, training
from dsv4.kernels.linear import triton as triton_kernels

linear = Operation(
    "linear", {"reference": reference.linear, "training": training.linear, "triton": triton_kernels.linear}
)
grouped_linear = Operation(
    "grouped_linear",
    {
        "reference": reference.grouped_linear,
        "training": training.grouped_linear,
        "triton": triton_kernels.grouped_linear,
    },
)
