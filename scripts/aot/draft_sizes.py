"""The cost-aware policy to compile ahead of time, for one row and for many."""

from unittest.mock import patch

import torch

from dsv4.kernels.draft_sizes import triton as draft_sizes
from scripts.aot.linear import empty, launches

SIZES, RESPONSES = 9, 5


def cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options)."""
    floats, found = lambda *shape: empty(*shape, dtype=torch.float32), []
    for B in (1, 32):
        belief, counts = floats(B, 8), [empty(B, dtype=torch.int64) for _ in range(2)]

        def call(B=B, belief=belief, counts=counts):
            draft_sizes.observe(belief, floats(81, 8), floats(9), floats(9, 8), *counts)
            draft_sizes.choose(
                belief,
                floats(SIZES, 8),
                floats(16, RESPONSES, SIZES, 8),
                floats(SIZES, SIZES),
                floats(SIZES),
                empty(SIZES, dtype=torch.int64),
                empty(B, dtype=torch.bool),
                empty(1, dtype=torch.bool)[0],
                2,
            )

        with patch.object(draft_sizes, "require_device", lambda *_: None):
            found += launches(f"draft sizes, {B} rows", call)
    return found
