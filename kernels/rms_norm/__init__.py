"""RMS normalisation, with or without a weight."""

from kernels.dispatch import Operation
from kernels.rms_norm import cpu, reference

rms_norm = Operation("rms_norm", {"reference": reference.rms_norm, "cpu": cpu.rms_norm})
