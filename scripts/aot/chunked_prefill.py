"""Chunked sparse prefill to compile ahead of time, as its launcher launches it for GQA models of 64 and 128 columns a
head."""

from unittest.mock import patch

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.chunked_prefill import triton as prefill
from scripts.aot.linear import empty, launches

SHAPES = [  # label, query heads, KV heads, columns, dtype, chunking
    ("32/8 × 128, chunk 2048", 32, 8, 128, torch.bfloat16, Chunking(2048, 256, 768)),
    ("28/4 × 128, chunk 1024", 28, 4, 128, torch.bfloat16, Chunking(1024, 128, 384)),
    ("32/8 × 128, chunk 512", 32, 8, 128, torch.bfloat16, Chunking(512, 64, 192)),
    ("28/4 × 128, chunk 512", 28, 4, 128, torch.bfloat16, Chunking(512, 64, 180)),
    ("14/2 × 64, chunk 2048", 14, 2, 64, torch.bfloat16, Chunking(2048, 256, 767)),
    ("32/8 × 128 fp32, chunk 512", 32, 8, 128, torch.float32, Chunking(512, 64, 192)),
    ("4/2 × 16, chunk 32", 4, 2, 16, torch.bfloat16, Chunking(32, 8, 12)),  # as tests have them
    ("4/4 × 16, chunk 48", 4, 4, 16, torch.bfloat16, Chunking(48, 16, 20)),
    ("4/2 × 16 fp32, chunk 32", 4, 2, 16, torch.float32, Chunking(32, 8, 12)),
    ("4/4 × 16 fp32, chunk 48", 4, 4, 16, torch.float32, Chunking(48, 16, 20)),
]


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of what a GPU of that capability launches."""
    found = {}
    for label, H, KV, D, dtype, chunking in SHAPES:

        def call(S=2 * chunking.chunk + 100):
            q, cache = (
                empty(2, S, H, D, dtype=dtype),
                [empty(2, KV, -(-S // 128) * 128, D, dtype=dtype) for _ in range(2)],
            )
            prefill.chunked_prefill(q, *cache, 0, empty(2, dtype=torch.int64), chunking, D**-0.5)

        with patch.multiple(
            prefill,
            capability=lambda _: capability,
            dependent_launch=lambda _: capability >= (9, 0),
            require_device=lambda *_: None,
        ):
            for name, kernel, signature, constants, options in launches(f"chunked prefill {label}", call):
                found.setdefault(
                    (kernel, *signature.items(), *sorted(constants.items()), options["num_warps"]),
                    (name, kernel, signature, constants, options),
                )
    return list(found.values())
