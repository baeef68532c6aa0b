"""Two-phase chunked sparse prefill of GQA models: chunks attend to themselves and to a memory of earlier tokens."""

from dsv4.kernels.chunked_prefill import reference
from dsv4.kernels.chunked_prefill import triton as triton_kernels
from dsv4.kernels.chunked_prefill.chunking import RULES, Chunking, Memory
from dsv4.kernels.dispatch import Operation

chunked_prefill = Operation(
    "chunked_prefill", {"reference": reference.chunked_prefill, "triton": triton_kernels.chunked_prefill}
)

__all__ = ["RULES", "Chunking", "Memory", "chunked_prefill"]
