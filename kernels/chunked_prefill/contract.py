"""Calls of chunked sparse prefill at production sizes. There is no contract: which tokens are kept follows from sums of
probabilities, of which many are nearly equal, so that a right kernel may keep others than fp64 would;
`tests/kernels/test_triton_chunked_prefill.py` follows the kernel's own choice through a definition in fp64."""

from dataclasses import replace

import torch

from dsv4.kernels.chunked_prefill.chunking import Chunking
from dsv4.kernels.contract import Production
from dsv4.kernels.grouped_attention.exact import sizes


def inputs(w, draw, tokens, chunking, batch=1) -> tuple:
    """Whole prompts of equal lengths."""
    H, KV, D = sizes(w)
    q, keys, values = (draw.large(batch, *shape) for shape in ((tokens, H, D), (KV, tokens, D), (KV, tokens, D)))
    return q, keys, values, 0, torch.full((batch,), tokens, device=draw.device), chunking, D**-0.5


def production_sizes(w) -> dict:
    """Prompts of 4K to 128K tokens, in the published cut too, by the default and by the published rule; compiled for
    two chunks and a part of one."""
    small, middle, large, largest = CHUNKINGS
    bench = {4096: (small, middle), 16384: (middle, large), 65536: (large, largest), 131072: (large, largest)}
    bench = {T: (*cuts, PUBLISHED, replace(PUBLISHED, **PUBLISHED_RULE)) for T, cuts in bench.items()}
    bf16, compiled = torch.bfloat16, (small, Chunking(512, 64, 180), middle, Chunking(2048, 256, 767), large)
    compiled += tuple(replace(cut, **PUBLISHED_RULE) for cut in (small, PUBLISHED))
    return {
        "bench": [dict(tokens=T, chunking=c) for T, each in bench.items() for c in each],
        "compiled": [
            dict(batch=2, tokens=2 * c.chunk + 100, chunking=c, dtype=dtype)
            for c, dtype in [*((c, bf16) for c in compiled), (small, torch.float32)]
        ],
    }


SIZES = (512, 64, 192), (1024, 128, 384), (2048, 256, 768), (4096, 512, 1536)
PUBLISHED, PUBLISHED_RULE = Chunking(1024, 256, 256), dict(score="memory", heads="query")
CHUNKINGS = [Chunking(*each) for each in SIZES]
CONTRACTS = ()
PRODUCTIONS = {"chunked_prefill": Production(inputs, production_sizes)}
