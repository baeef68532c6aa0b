"""Tokens of a prompt in one step: more on a GPU, where the cache leaves room."""

import pytest
import torch

from dsv4.model.causal import CHUNK, GPU_CHUNK
from dsv4.model.deepseek_v4 import LARGE_CHUNK, LARGE_CHUNK_BESIDE
from dsv4.model.dummy import plan_dummy
from dsv4.model.ranks import Ranks


@pytest.mark.parametrize(
    "device, batch, context, chunk",
    [
        ("meta", 1, 8192, LARGE_CHUNK),
        ("meta", 1, LARGE_CHUNK_BESIDE, LARGE_CHUNK),
        ("meta", 1, LARGE_CHUNK_BESIDE + 4096, GPU_CHUNK),
        ("meta", 2, 8192, GPU_CHUNK),
        ("cpu", 1, 8192, CHUNK),
    ],
)
def test_chunk_beside_a_cache(device, batch, context, chunk, monkeypatch):
    model = plan_dummy("flash", 2, "native", "triton", "fp8", "fp4").to("meta")
    model.device, model.max_context, ran = torch.device(device), None, []
    cache = model.new_cache(batch, context, 0)
    assert model.chunk_beside(cache) == chunk
    monkeypatch.setattr(type(model), "_run_pieces", lambda *given: ran.append(given[4]))
    model.append(torch.zeros(batch, 8000, dtype=torch.int64), cache, logits="none")
    assert ran == [chunk]


@pytest.mark.parametrize("size, chunks", [(1, 1), (2, 2), (4, 2)])
def test_several_ranks_take_larger_chunks(size, chunks):
    model = plan_dummy("flash", 2, "native", "triton", "fp8", "fp4", ranks=Ranks(0, size))
    assert model.gpu_chunk(1, 8192) == chunks * LARGE_CHUNK and model.gpu_chunk(2, 8192) == GPU_CHUNK


def test_a_cache_in_pages_takes_smaller_steps():
    model = plan_dummy("flash", 2, "native", "triton", "fp8", "fp4").to("meta")
    model.device, model.max_context = torch.device("meta"), None
    cache = model.new_cache(1, 8192, 0)
    cache.__class__ = type("Paged", (type(cache),), {})
    assert model.chunk_beside(cache) == model.chunk == GPU_CHUNK
