"""The indexer says that queries and keys are rounded to FP4 where they are: kernels may then multiply codes."""

from types import SimpleNamespace

import pytest
import torch

from dsv4 import load_model
from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.fusions.compositions import select_entries
from dsv4.kernels.quantize.reference import simulate_fp4_blocks


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "among ranks"])
@pytest.mark.parametrize("numerics", ["fp32", "native", "qat", "qat:fp32"])
def test_selections_are_called_rounded_where_they_are(numerics, shared, brief_official):
    model = load_model(brief_official, numerics=numerics, backend="reference")
    indexer = next(block.attn.indexer for block in model.layers if hasattr(block.attn, "indexer"))
    op, hints = indexer.op, []

    def selection(q, weights, keys, visible, k, rounded):
        parts = (q,) if isinstance(keys, PackedRows) else (q, keys)
        hints.append((rounded, all(torch.equal(x, simulate_fp4_blocks(x)) for x in parts)))
        return select_entries(op, q, weights, keys, visible, k, rounded)

    fused = dict(fused=op.fused | {"select_entries"}, select_entries=selection)
    indexer.op = SimpleNamespace(**vars(op) | fused)
    indexer.op.bound = indexer.op
    if shared:
        indexer.shares = lambda step: True
        indexer.ranks = SimpleNamespace(slots=lambda n: range(n), stacked=lambda x, n: x)
    model(torch.randint(0, model.config.vocab_size, (1, 80), generator=torch.Generator().manual_seed(1)))
    assert hints == [(numerics.startswith("qat"),) * 2]
