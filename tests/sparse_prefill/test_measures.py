"""Measures of what chunked sparse prefill keeps, against counting by hand and dense softmaxes."""

import pytest
import torch

from dsv4.kernels.chunked_prefill import Chunking, chunked_prefill
from dsv4.kernels.chunked_prefill import triton as kernels
from dsv4.kernels.chunked_prefill.triton import _Call, empty_memory, splits
from dsv4.probes.measure.sparse_prefill.mass import KINDS, DenseMass, add, figures, shares
from dsv4.probes.measure.sparse_prefill.measures import (
    dense_bytes,
    extra_bytes,
    kept_by_place,
    memory_bytes,
    remembered,
    stability,
    survivors,
    survivors_by_chance,
)

C = Chunking(32, 8, 12)


@pytest.fixture(scope="module")
def prefilled():
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, *shape, generator=make) for shape in ((150, 4, 16), (2, 150, 16), (2, 150, 16)))
    k[1, :, 70:] = v[1, :, 70:] = float("nan")
    lengths = torch.tensor([150, 70])
    return q, k, v, lengths, chunked_prefill(q, k, v, 0, lengths, C, 0.25)[1]


@pytest.fixture(scope="module")
def dense(prefilled):
    """Every third query of the first row, in two appends."""
    q, k = prefilled[0][:1], prefilled[1][:1]
    found = DenseMass(torch.zeros(10, 4, 150), torch.zeros(10, dtype=torch.int64), 16)
    add(found, q[:, :70], k, 0, 0.25, 3), add(found, q[:, 70:], k, 70, 0.25, 3)
    return found.of_chunks(32)


def given(q, k, t: int, head: int) -> list[float]:
    return (q[0, t, head].double() @ k[0, head // 2, : t + 1].double().T * 0.25).softmax(-1).tolist()


def test_shares_are_those_of_the_dense_softmax(prefilled, dense):
    """Kind by kind, with loops over queries and keys."""
    q, k, _, _, memory = prefilled
    found = shares(dense, memory.positions[:, 0], C)
    assert dense.queries.tolist() == [10, 11, 11, 10, 8] and {k: v.shape for k, v in found.items()} == dict.fromkeys(
        KINDS, (4, 4)
    )
    for i, head in ((1, 0), (2, 3), (4, 1)):
        first, pair = 32 * i, (head // 2 * 2, head // 2 * 2 + 1)
        queries = [t for t in range(first, min(first + 32, 150)) if (t + 1) % 3 == 0]
        mine = [given(q, k, t, head) for t in queries]
        on = lambda keys: sum(p[j] for p in mine for j in keys if j < len(p)) / len(queries)
        own, local = on(range(first, 150)), range(first - 8, first)
        true = {j: sum(given(q, k, t, h)[j] for t in queries for h in pair) for j in range(first - 8)}
        later = [t for t in range(first, 150) if (t + 1) % 3 == 0]
        future = {j: sum(given(q, k, t, h)[j] for t in later for h in pair) for j in range(first - 8)}
        best, coming = (sorted(of, key=lambda j: -of[j])[:12] for of in (true, future))
        wanted = {
            "own": 0,
            "kept": on(memory.positions[i, 0, head // 2].tolist()),
            "recent": on(range(first - 20, first)),
            "random": on(range(first)) * 20 / first,
            "oracle_next": on([*local, *best]),
            "oracle_future": on([*local, *coming]),
        }
        assert {kind: found[kind][i - 1, head].item() for kind in KINDS} == pytest.approx(
            {k: own + v for k, v in wanted.items()}, rel=1e-4
        )


def test_a_step_without_a_measured_query_adds_nothing(prefilled):
    q, k = prefilled[0][:1], prefilled[1][:1]
    found = DenseMass(torch.zeros(5, 4, 150), torch.zeros(5, dtype=torch.int64), 32)
    add(found, q[:, :8], k, 0, 0.25, 9)
    assert not found.queries.any() and not found.sums.any()
    add(found, q[:, 8:12], k, 8, 0.25, 9)
    assert found.queries.tolist() == [1, 0, 0, 0, 0]


def test_no_memory_of_the_same_size_holds_more_than_the_oracle(prefilled, dense):
    found = {kind: v.view(4, 2, 2).sum(-1) for kind, v in shares(dense, prefilled[-1].positions[:, 0], C).items()}
    for kind in ("kept", "oracle_future"):
        assert (found["oracle_next"] >= found[kind] - 1e-6).all() and (found[kind] < found["oracle_next"] - 1e-4).any()
    assert all((found[kind] >= found["own"]).all() for kind in KINDS)


def test_means_weigh_chunks_by_their_queries_and_skip_those_without(dense, prefilled):
    few = DenseMass(dense.sums.clone(), torch.tensor([10, 0, 3, 0, 1]), 32)
    found = shares(few, prefilled[-1].positions[:, 0], C)
    assert found["kept"][0].isnan().all() and found["kept"][2].isnan().all()
    assert figures(found, few.queries)["kept"] == pytest.approx(
        ((3 * found["kept"][1] + found["kept"][3]) / 4).tolist()
    )
    with pytest.raises(ValueError, match="no multiple of 32"):
        dense.of_chunks(48)


def test_survivors_of_the_first_chunk_are_counted(prefilled):
    memory = prefilled[-1]
    left = survivors(memory.positions, C)
    assert left.shape == (4, 2, 2) and left[0].eq(20).all() and not left[2:, 1].any()
    assert left[2, 0, 1] == sum(0 <= t < 32 for t in memory.positions[3, 0, 1].tolist()) < 20
    trial, make = torch.zeros(3), torch.Generator().manual_seed(0)
    for _ in range(4000):  # picked anew among all earlier tokens but the local ones
        trial += torch.tensor([(torch.randperm(32 * u - 8, generator=make)[:12] < 32).sum() for u in (1, 2, 3)])
    assert survivors_by_chance(3, C) == pytest.approx((trial / 4000 + torch.tensor([8.0, 0, 0])).tolist(), abs=0.1)


def test_stability_is_the_jaccard_index_of_heavy_sets():
    at = lambda *heavy: [*heavy, 90, 91]
    sets = (
        torch.tensor([[-1] * 5, at(1, 2, 3), at(1, 2, 3), at(2, 3, 7), at(8, 9, 10), [-1] * 5]).int().view(6, 1, 1, 5)
    )
    found = stability(sets, Chunking(32, 2, 3)).flatten().tolist()
    assert found[:3] == [1.0, 0.5, 0.0] and found[3] != found[3] and len(found) == 4


def test_rows_that_ended_have_no_stability(prefilled):
    memory = prefilled[-1]
    found = stability(memory.positions, C)
    assert (
        found.shape == (4, 2, 2)
        and not found[:3, 0].isnan().any()
        and found[3].isnan().all()
        and found[1:, 1].isnan().all()
    )
    assert ((found[:3, 0] > 0) & (found[:3, 0] <= 1)).all()


def test_what_is_kept_of_each_place_adds_up_to_the_memory(prefilled):
    memory = prefilled[-1]
    counts = kept_by_place(memory.positions, 150, 32)
    assert counts.shape == (5, 5) and counts[0].sum() == 0 and torch.equal(counts[1:].sum(1), torch.full((4,), 20.0))
    assert counts.triu().sum() == 0 and counts[1, 0] == 20 and (counts[2:].diagonal(1) >= 8).all()
    alone = kept_by_place(memory.positions[:, :1], 150, 32)
    assert torch.equal(alone[3:], counts[3:])  # the second row has ended there and does not count
    fine = kept_by_place(memory.positions[:, :1], 150, 10)
    assert (
        fine.shape == (5, 15)
        and fine[4, 5] == sum(50 <= t < 60 for head in range(2) for t in memory.positions[4, 0, head].tolist()) / 2
    )
    held = remembered(memory.positions, 150)
    assert held[1:5, 0].sum(-1).eq(20).all() and not held[0].any() and not held[3:, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_bytes_are_those_of_the_buffers(dtype):
    q, k = torch.zeros(2, 150, 4, 16, dtype=dtype), torch.zeros(2, 2, 160, 16, dtype=dtype)
    call = _Call(q, k, k, torch.empty_like(q), 0, torch.tensor([150, 70]), C, 1.0)
    buffers = [call.part, call.given, *empty_memory(q, 2, C, None)]
    assert memory_bytes(2, 150, 2, C) == sum(t.nbytes for t in empty_memory(q, 2, C, None))
    assert extra_bytes(2, 150, 4, 2, C, call.splits) == sum(t.nbytes for t in buffers)
    assert dense_bytes(2, 150, 4, 2, 16, q.element_size()) == sum(
        t.nbytes for t in (q, q, k[:, :, :150], k[:, :, :150], call.lse)
    )


def test_it_takes_less_than_five_percent_more_than_dense():
    for T, c in (
        (131072, Chunking(2048, 256, 768)),
        (131072, Chunking(4096, 512, 1536)),
        (16384, Chunking(1024, 128, 384)),
    ):
        tile = kernels.tiles(False, 128, c, (9, 0))
        more = extra_bytes(1, T, 32, 8, c, splits(tile, c, 4))
        assert more < 0.05 * dense_bytes(1, T, 32, 8, 128, 2), (T, c, more)
