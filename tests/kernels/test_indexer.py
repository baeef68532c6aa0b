"""Index scores and selection: ReLU before the weights, visibility, sentinels, ties."""

import pytest
import torch

from dsv4.kernels.indexer import index_scores, reference, topk_entries


def literal_scores(q, w, k, visible):
    B, T, H, _ = q.shape
    out = torch.full((B, T, k.shape[1]), float("-inf"), dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for e in range(int(visible[b, t])):
                out[b, t, e] = sum(
                    w[b, t, h].double() * max(0.0, (q[b, t, h].double() @ k[b, e].double()).item()) for h in range(H)
                )
    return out


def case(B=2, T=3, H=5, D=8, n=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(B, T, H, D, generator=g),
        torch.randn(B, T, H, generator=g),
        torch.randn(B, n, D, generator=g),
        torch.randint(0, n + 1, (B, T), generator=g),
    )


backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


@backends
@pytest.mark.parametrize("shape", [dict(), dict(B=1, T=1), dict(B=1, T=1, n=1), dict(B=1, T=1, n=0)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_equal_the_literal_sum(shape, seed, backend):
    q, w, k, visible = case(**shape, seed=seed)
    got, wanted = index_scores(q, w, k, visible, backend=backend), literal_scores(q, w, k, visible)
    assert got.shape == wanted.shape
    assert torch.equal(torch.isinf(got), torch.isinf(wanted))
    finite = torch.isfinite(wanted)
    assert ((got.double() - wanted)[finite].abs() < 1e-5).all()


def test_tiling_does_not_change_the_scores(monkeypatch):
    q, w, k, visible = case(n=300)
    whole = index_scores(q, w, k, visible)
    monkeypatch.setattr(reference, "SCRATCH_BYTES", 1)
    assert torch.allclose(index_scores(q, w, k, visible), whole, atol=1e-5)


@backends
@pytest.mark.parametrize("queries", [1, 3])
def test_nan_beyond_the_visible_entries_is_not_seen(queries, backend):
    q, w, k, visible = case(B=1, T=queries)
    k[:, 6:] = float("nan")
    scores = index_scores(q, w, k, visible.clamp(max=6), backend=backend)
    assert not torch.isnan(scores).any()


@backends
@pytest.mark.parametrize("k", [1, 3, 4, 9], ids=lambda k: f"k={k}")
def test_among_equal_scores_the_lowest_entry_wins(k, backend):
    scores = torch.tensor([[[0.0, 2.0, -0.0, 2.0, 0.0, 2.0, -1.0, 0.0]]])
    order = sorted(range(8), key=lambda e: (-scores[0, 0, e].item(), e))
    assert topk_entries(scores, k, backend=backend)[0, 0].tolist() == order[:k]


@backends
@pytest.mark.parametrize("n", [1, 63, 64, 65, 400, 1000], ids=lambda n: f"n={n}")
def test_selection_is_a_stable_sort(n, backend):
    g = torch.Generator().manual_seed(n)
    scores = torch.randint(-3, 4, (2, 5, n), generator=g).float() * 1e-3  # few values: ties everywhere
    wanted = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :64]
    assert torch.equal(topk_entries(scores, 64, backend=backend), wanted)


@backends
def test_invisible_picks_are_minus_one(backend):
    inf = float("inf")
    scores = torch.tensor([[[-inf, -inf, -inf], [5.0, -inf, -inf], [-7.0, 3.0, -inf]]])
    assert topk_entries(scores, 2, backend=backend)[0].tolist() == [[-1, -1], [0, -1], [1, 0]]


def test_full_range_of_floats_is_ordered():
    values = [float("-3.4e38"), -1.0, -1e-45, 0.0, 1e-45, 1e-38, 1.0, 3.4e38]
    perm = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    scores = torch.tensor(values)[perm].view(1, 1, 8)
    assert scores[0, 0, topk_entries(scores, 8)[0, 0]].tolist() == pytest.approx(sorted(values, reverse=True))
