"""Index scores of the lightning indexer, and the selection of the best entries."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.indexer import cpu, reference, training
from dsv4.kernels.indexer import triton as triton_kernels

index_scores = Operation(
    "index_scores",
    {
        "reference": reference.index_scores,
        "cpu": cpu.index_scores,
        "training": training.index_scores,
        "triton": triton_kernels.index_scores,
    },
)
topk_entries = Operation(
    "topk_entries",
    {
        "reference": reference.topk_entries,
        "cpu": cpu.topk_entries,
        "training": training.topk_entries,
        "triton": triton_kernels.topk_entries,
    },
)
