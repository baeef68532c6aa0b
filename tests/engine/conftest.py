"""Small models and helpers of the engine's tests."""

import random
import shutil

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.paged import PagedCache, new_paged_cache
from tests.checkpoints import edit_config

NUMERICS = {
    "fp32": ("fp32", "auto", "auto"),
    "fp8, index keys fp8": ("native", "fp8", "fp8"),
    "fp8, index keys fp4": ("qat", "fp8", "fp4"),
}


@pytest.fixture(scope="session")
def long_golden(brief_golden, tmp_path_factory):
    """The golden checkpoint with a layer of each kind, allowed 2048 positions."""
    return edit_config(
        shutil.copytree(brief_golden, tmp_path_factory.mktemp("golden") / "long"), max_position_embeddings=2048
    )


@pytest.fixture(scope="session")
def model(long_golden):
    """It in fp32 on the CPU backend: every layer kind, window 16, an MTP block."""
    return load_model(long_golden, numerics="fp32", backend="cpu")


@pytest.fixture(scope="session", params=["fp32, reference", *NUMERICS])
def numeric_model(request, brief_official, model, long_golden):
    """The model in fp32, and a quantised checkpoint with packed caches."""
    if request.param == "fp32":
        return model
    if request.param == "fp32, reference":
        return load_model(long_golden, numerics="fp32", backend="reference")
    numerics, cache, index = NUMERICS[request.param]
    return load_model(brief_official, numerics=numerics, backend="cpu", cache=cache, index_cache=index)


def shuffled(cache: PagedCache, seed: int = 0) -> PagedCache:
    """The cache, whose free pages are taken in a random order from now on."""
    for pool in cache.pools.values():
        random.Random(seed).shuffle(pool.free)
    return cache


def paged(model, batch: int = 1, max_context: int = 512, **options) -> PagedCache:
    """A paged cache that poisons freed pages, physically shuffled."""
    return shuffled(new_paged_cache(model, batch, max_context, poison=True, **options))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, where NaN (of rows that were not run) equals NaN."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def random_ids(model, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def prefill(model, cache, ids: list[int], b: int = 0, remember=None, logits: str = "all") -> torch.Tensor:
    """Run what row b lacks of `ids`, that row alone, in chunks that end at multiples of 128: logits [1, chunk or 1,
    vocab] of the last chunk. remember(b, ids so far) at each multiple."""
    while (start := cache.lengths[b]) < len(ids):
        n = min(len(ids), (start // 128 + 1) * 128) - start
        chunk = torch.zeros(cache.batch, n, dtype=torch.int64)
        chunk[b] = torch.tensor(ids[start : start + n])
        found = model.append(chunk, cache, n_new=[n * (row == b) for row in range(cache.batch)], logits=logits)[
            b : b + 1
        ]
        if remember is not None and cache.lengths[b] % 128 == 0:
            remember(b, ids[: start + n])
    return found
