"""Measures of what chunked sparse prefill keeps, against counting by hand and dense softmaxes."""

import pytest
import torch

from dsv4.sparse_prefill.measures import dense_bytes, extra_bytes, kept_by_chunk, remembered, retained_mass, stability
from dsv4.sparse_prefill.plot import svg
from kernels.chunked_prefill import Chunking, chunked_prefill
from kernels.chunked_prefill import triton as kernels
from kernels.chunked_prefill.triton import _Call, empty_memory

C = Chunking(32, 8, 12)


@pytest.fixture(scope="module")
def prefilled():
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, *shape, generator=make) for shape in ((150, 4, 16), (2, 150, 16), (2, 150, 16)))
    k[1, :, 70:] = v[1, :, 70:] = float("nan")
    lengths = torch.tensor([150, 70])
    return q, k, v, lengths, chunked_prefill(q, k, v, 0, lengths, C, 0.25)[1]


def test_retained_mass_is_the_share_of_the_dense_softmax(prefilled):
    q, k, _, lengths, memory = prefilled
    queries = torch.tensor([0, 31, 32, 69, 149])
    share = retained_mass(q, k, memory.positions, C, lengths, 0.25, queries)
    assert share.shape == (2, 4, 5) and torch.allclose(share[:, :, :2], torch.ones(2, 4, 2)) and share[1, :, 4].isnan().all()
    for b, t, head in ((0, 149, 3), (0, 32, 0), (1, 69, 2)):
        p = (q[b, t, head].double() @ k[b, head // 2, :t + 1].double().T * 0.25).softmax(-1)
        kept = {*range(t // 32 * 32, t + 1), *memory.positions[t // 32, b, head // 2].tolist()}
        assert share[b, head, queries.tolist().index(t)].item() == pytest.approx(sum(p[j].item() for j in kept), rel=1e-5)
    everything = torch.arange(31).int().expand(6, 2, 2, -1)
    assert torch.allclose(retained_mass(q, k, everything, Chunking(32, 0, 31), lengths, 0.25, torch.tensor([40]))[0, 0],
                          1 - torch.tensor([(q[0, 40, 0] @ k[0, 0, :41].T * 0.25).softmax(-1)[31]]), atol=1e-6)


def test_stability_is_the_jaccard_index_of_heavy_sets():
    at = lambda *heavy: [*heavy, 90, 91]
    sets = torch.tensor([[-1] * 5, at(1, 2, 3), at(1, 2, 3), at(2, 3, 7), at(8, 9, 10), [-1] * 5]).int().view(6, 1, 1, 5)
    found = stability(sets, Chunking(32, 2, 3)).flatten().tolist()
    assert found[:3] == [1.0, 0.5, 0.0] and found[3] != found[3] and len(found) == 4


def test_rows_that_ended_have_no_stability(prefilled):
    memory = prefilled[-1]
    found = stability(memory.positions, C)
    assert found.shape == (4, 2, 2) and not found[:3, 0].isnan().any() and found[3].isnan().all() and found[1:, 1].isnan().all()
    assert ((found[:3, 0] > 0) & (found[:3, 0] <= 1)).all()


def test_what_is_kept_of_each_chunk_adds_up_to_the_memory(prefilled):
    memory = prefilled[-1]
    counts = kept_by_chunk(memory.positions, C)
    assert counts.shape == (5, 5) and counts[0].sum() == 0 and torch.equal(counts[1:].sum(1), torch.full((4,), 20.0))
    assert counts.triu().sum() == 0 and counts[1, 0] == 20 and (counts[2:].diagonal(1) >= 8).all()
    alone = kept_by_chunk(memory.positions[:, :1], C)
    assert torch.equal(alone[3:], counts[3:])  # the second row has ended there and does not count
    held = remembered(memory.positions, 150)
    assert held[1:5, 0].sum(-1).eq(20).all() and not held[0].any() and not held[3:, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_bytes_are_those_of_the_buffers(dtype):
    q, k = torch.zeros(2, 150, 4, 16, dtype=dtype), torch.zeros(2, 2, 160, 16, dtype=dtype)
    call = _Call(q, k, k, torch.empty_like(q), 0, torch.tensor([150, 70]), C, 1.0)
    buffers = [call.near, call.part, *empty_memory(q, 2, C, None)]
    assert extra_bytes(2, 150, 2, 16, C, q.element_size(), call.rows, call.splits) == sum(t.nbytes for t in buffers)
    assert dense_bytes(2, 150, 4, 2, 16, q.element_size()) == sum(t.nbytes for t in (q, q, k[:, :, :150], k[:, :, :150], call.lse))


def test_it_takes_less_than_five_percent_more_than_dense():
    for T, c in ((131072, Chunking(2048, 256, 768)), (131072, Chunking(4096, 512, 1536)), (16384, Chunking(1024, 128, 384))):
        tile = kernels.tiles(False, 128, c.chunk, (9, 0))
        rows = -(-c.memory // tile.sums.rows) * tile.sums.rows
        more = extra_bytes(1, T, 8, 128, c, 2, rows, max(1, 4 * 132 // (8 * rows // tile.sums.rows)))
        assert more < 0.05 * dense_bytes(1, T, 32, 8, 128, 2), (T, c, more)


def test_the_heat_map_is_drawn_the_same_every_time(prefilled):
    memory = prefilled[-1]
    text = svg("made up", memory.positions, C)
    assert text.startswith("<?xml") and text == svg("made up", memory.positions, C) and "8 local and 12 heavy" in text
    assert svg("one chunk", memory.positions[:2], C).startswith("<?xml")
