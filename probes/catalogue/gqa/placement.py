"""`placement` on GQA models: on the GPUs also with policies that read the cache sparsely, and prompts in chunks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dsv4.kernels.block_choice import Observed, Policy, dense
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.gqa.choice import Attention
from dsv4.probes.catalogue.placement import Placement


class GQAPlacement(Placement):
    """Sizes are small enough that 40 tokens are not all read."""

    readings: ClassVar[Mapping[str, Any]] = {
        "dense": Attention(dense()),
        "page bounds": Attention(Policy("page-bound", "bound", 16, 0, 1, 1)),
        "block means": Attention(Policy("block-mean", "mean", 16, 0, 1, 1)),
        "choice after the prompt": Attention(Observed("snapkv", retention=16, window=8)),
        "chunks": Attention(prefill=Chunking(8, 2, 2)),
    }
