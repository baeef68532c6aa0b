"""Imported by the process that every subject's process is a copy of, so that each starts in milliseconds."""

from dsv4.kernels.contracts import contracts
from dsv4.probes.kernel_audit import solutions  # noqa: F401 (whose import takes time)
from dsv4.probes.kernel_audit.plants import plants

contracts()
plants()
