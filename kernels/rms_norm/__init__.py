"""RMS normalisation, with or without a weight."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.rms_norm import cpu, reference, training
from dsv4.kernels.rms_norm import triton as triton_kernels

rms_norm = Operation(
    "rms_norm",
    {
        "reference": reference.rms_norm,
        "cpu": cpu.rms_norm,
        "training": training.rms_norm,
        "triton": triton_kernels.rms_norm,
    },
)
