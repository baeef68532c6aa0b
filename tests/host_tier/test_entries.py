"""CSA's main entries in host memory: the logits of the plain cache, bit for bit. On a GPU with pinned memory."""

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.errors import CapacityError
from dsv4.runtime.graph import DecodeGraph
from tests import checkpoints

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CACHES = [
    ("fp32", "auto", "auto", "topk", False),
    ("fp32", "auto", "auto", None, True),
    ("native", "auto", "auto", None, False),
    ("qat", "fp8", "fp4", "topk", True),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write_official(tmp_path_factory.mktemp("host") / "official")


@pytest.mark.parametrize("numerics, rows, index, slots, captured", CACHES)
def test_every_step_has_the_logits_of_the_plain_cache(checkpoint, numerics, rows, index, slots, captured):
    """A ragged batch, single tokens and three at once, and rewinds over windows, after which other tokens come."""
    model = load_model(
        checkpoint,
        numerics=numerics,
        device=DEVICE,
        cache=rows,
        index_cache=index,
        backend="triton" if DEVICE == "cuda" else "reference",
    )
    topk = model.config.index_topk
    plain, tier = model.new_cache(2, 100), model.new_cache(2, 100, memory=HostMemory(topk if slots else None))
    assert tier.far and len(tier.far) == sum(layer.index is not None for layer in tier.layers)
    for entries in tier.far:  # nothing is staged yet, and nothing that was not staged may be read
        entries.here.data.fill_(255) if entries.packed else entries.here.fill_(float("nan"))
        entries.brought = entries.brought if captured else None  # prompts by either way
    if captured:
        tier.shared[0].fill_(255 if tier.far[0].packed else float("nan"))
    g = torch.Generator().manual_seed(0)
    new = lambda n: torch.randint(0, model.config.vocab_size, (2, n), generator=g)
    ids = new(70)
    for cache in (plain, tier):
        model.append(ids, cache, n_new=[70, 61], logits="last")
    steps = [DecodeGraph(model, c).step if captured else lambda x, c=c: model.append(x, c) for c in (plain, tier)]
    for step in range(9):
        x = new(3 if step == 5 and not captured else 1)
        want, got = (run(x) for run in steps)
        assert torch.equal(want, got), step
        if step in (3, 6):
            for cache in (plain, tier):
                cache.rewind([14, 3])
    for entries in tier.far:
        hits, misses, nbytes = entries.traffic()
        assert hits > 0 and misses > 0 and nbytes == misses * sum(p.item_bytes for p in entries.pools)


def test_staging_that_is_too_small(checkpoint):
    model = load_model(checkpoint, numerics="fp32", device=DEVICE)
    with pytest.raises(CapacityError, match=f"{model.config.index_topk} entries.*{model.config.index_topk - 1} rows"):
        model.new_cache(1, 100, memory=HostMemory(model.config.index_topk - 1))
