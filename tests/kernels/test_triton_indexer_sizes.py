"""The indexer's kernels at production shapes, on a GPU."""

import pytest
import torch

from dsv4.kernels.cache_rows import KEY_FORMATS, PAGE, RowFormat
from dsv4.kernels.indexer import reference, topk_entries
from dsv4.kernels.indexer import triton as ours

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
FORMATS = [None, *KEY_FORMATS]
from tests.kernels.test_triton_indexer import assert_scores, assert_selected, formats, gpu, pack, poison  # noqa: F401  (fixtures)
from tests.kernels.test_triton_selection import KINDS, rows_of


def flash(B, T, n, form, seed=0, capacity=None):
    """Queries and keys of V4-Flash, the keys as a cache of `capacity` holds them, NaN behind n."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn(B, T, 64, 128, device="cuda", generator=g).bfloat16()
    w = torch.randn(B, T, 64, device="cuda", generator=g) / 64
    k = torch.randn(B, n, 128, device="cuda", generator=g)
    if form:
        rows = pack(k, form, spare=((capacity or n) - n) // PAGE + 1)
        return q, w, rows._replace(count=capacity or n)
    held = torch.full((B, capacity or n, 128), NAN, device="cuda", dtype=torch.bfloat16)
    held[:, :n] = k
    return q, w, held


def best_of(scores, selected, k):
    """Whether a selection holds only entries at least as good as the k-th best, but for rounding, and as many as it
    should."""
    kth = scores.topk(k, -1).values[..., -1:]
    picked = scores.gather(-1, selected.clamp(min=0)).masked_fill(selected < 0, -INF)
    distinct = selected.sort(-1).values.diff(dim=-1)
    assert ((selected >= 0).sum(-1) == (scores > -INF).sum(-1).clamp(max=k)).all()
    assert ((distinct > 0) | (selected.sort(-1).values[..., 1:] < 0)).all()
    slack = 5e-5 * scores.masked_fill(scores == -INF, 0).abs().amax(-1, keepdim=True)
    assert ((picked >= kth - slack) | (selected < 0)).all()


@gpu
@formats
@pytest.mark.parametrize(
    "B, T, n",
    [
        (1, 1, 2048),
        (8, 1, 2048),
        (1, 1, 32768),
        (8, 1, 32768),
        (1, 1, 262144),
        (3, 2, 5000),
        (2, 4, 30000),
        (1, 300, 8192),
    ],
    ids=str,
)
def test_production_scores(B, T, n, form):
    q, w, k = flash(B, T, n, form, capacity=n + 640)
    visible = torch.randint(n - n // 8, n + 1, (B, T), device="cuda")
    visible[0, -1] = n
    wanted = reference.index_scores(q, w, k, visible)
    got = ours.index_scores(q, w, k, visible)
    assert_scores(got, wanted, 5e-5)
    for count in (512, 1024):
        best_of(wanted, ours.select_entries(q, w, k, visible, count), count)


@gpu
def test_production_audit_in_fp32():
    q, w, k = flash(1, 3, 5000, RowFormat.INDEX_FP4)
    visible = torch.tensor([[5000, 4000, 70]], device="cuda")
    assert_scores(ours.index_scores(q.float(), w, k, visible), reference.index_scores(q.float(), w, k, visible), 1e-6)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, n, k",
    [
        (1, 2048, 512),
        (8, 2048, 512),
        (1, 4096, 512),
        (1, 32768, 512),
        (300, 32768, 512),
        (1, 262144, 512),
        (8, 262144, 1024),
        (20, 262144, 1024),
        (1, 1000000, 1024),
        (2, 30000, 4096),
        (5000, 300, 64),
    ],
    ids=str,
)
def test_production_selection(rows, n, k, kind):
    scores = rows_of(kind, n, 1, 1).repeat(1, rows, 1) if rows * n > 1 << 23 else rows_of(kind, n, 1, rows)
    visible = torch.randint(0, n + 1, (1, rows), device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    visible[0, -1] = n
    assert_selected(ours.topk_entries(scores, k), topk_entries(scores, k))
    assert_selected(ours.topk_entries(scores, k, visible), topk_entries(scores, k, visible))
    first = ours.topk_entries(scores, k, visible)
    assert all(torch.equal(first, ours.topk_entries(scores, k, visible)) for _ in range(20))


@gpu
@formats
@pytest.mark.parametrize("B, T, n", [(1, 1, 262144), (4, 1, 32768), (1, 1, 2048), (1, 500, 32768)], ids=str)
def test_a_graph_follows_what_is_visible(B, T, n, form):
    q, w, k = flash(B, T, n, form)
    visible = torch.full((B, T), n, device="cuda")
    ours.select_entries(q, w, k, visible, 512)
    ours.index_scores(q[:, :4], w[:, :4], k, visible[:, :4])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.select_entries(q, w, k, visible, 512)
        scores = ours.index_scores(q[:, :4], w[:, :4], k, visible[:, :4])
    for seen in (n, n // 2 + 3, 700, 513, 512, 60, 1, 0):
        visible.fill_(seen)
        graph.replay()
        assert torch.equal(out, ours.select_entries(q, w, k, visible, 512))
        assert torch.equal(scores, ours.index_scores(q[:, :4], w[:, :4], k, visible[:, :4]))


@gpu
@formats
def test_production_repeats_bit_for_bit(form):
    q, w, k = flash(2, 1, 262144, form)
    visible = torch.tensor([[262144], [200001]], device="cuda")
    scores, selected = ours.index_scores(q, w, k, visible), ours.select_entries(q, w, k, visible, 512)
    for _ in range(20):
        assert torch.equal(scores, ours.index_scores(q, w, k, visible))
        assert torch.equal(selected, ours.select_entries(q, w, k, visible, 512))


@gpu
def test_offsets_past_two_gib():
    """Batch rows and queries further apart than 2^31 elements."""
    q, w, k = flash(2, 1, 4200, None)
    far = torch.empty((1 << 31) + 4200 * 128 + 64, dtype=torch.bfloat16, device="cuda").as_strided(
        (2, 4200, 128), ((1 << 31) + 64, 128, 1)
    )
    far.copy_(k)
    visible = torch.full((2, 1), 4200, device="cuda")
    assert_scores(ours.index_scores(q, w, far, visible), reference.index_scores(q, w, k, visible))
    rows = pack(k.float(), RowFormat.INDEX_FP4)
    apart = torch.empty((1 << 32) + rows.data[0].numel(), dtype=torch.uint8, device="cuda").as_strided(
        rows.data.shape, (1 << 32, rows.data.shape[2], 1)
    )
    apart.copy_(rows.data)
    assert_scores(
        ours.index_scores(q, w, rows._replace(data=apart), visible), reference.index_scores(q, w, rows, visible)
    )
    del far, apart
    scores = torch.empty((1 << 31) + 40000, device="cuda").as_strided((1, 2, 33000), (1 << 31, (1 << 31) + 64, 1))
    scores.copy_(rows_of("ties", 33000, 1, 2))
    assert_selected(ours.topk_entries(scores, 512), topk_entries(scores, 512))
