"""Routing on a GPU (in Triton's interpreter without one) against the reference."""

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.router import reference
from dsv4.kernels.router import triton as gpu
from tests.kernels.products import DEVICE, graphed, needs_gpu, poison, randn  # noqa: F401

FACTOR = 1.5
DTYPES = [torch.float32, torch.bfloat16]


def compare(got, wanted, relative: float = 2e-6) -> None:
    """Experts and their weights are equal, in whatever order."""
    (i, a), (j, b) = got, wanted
    assert i.dtype is j.dtype is torch.int64 and a.dtype is b.dtype is torch.float32 and i.shape == j.shape
    i, order = i.sort(-1)
    j, other = j.sort(-1)
    assert torch.equal(i, j)
    assert torch.allclose(a.gather(1, order), b.gather(1, other), rtol=relative, atol=0)


@pytest.mark.parametrize(
    "N,D,E,k",
    [(1, 64, 16, 4), (3, 640, 40, 6), (12, 128, 7, 7), (18, 96, 24, 3), (40, 640, 24, 3), (2, 20, 5, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_by_score(N, D, E, k, dtype, kind):
    x, W, bias = randn(N, D).to(dtype), (randn(E, D) * D**-0.5).to(kind), randn(E, seed=5)
    got = gpu.route_scored(x, W, bias, k, FACTOR)
    compare(got, reference.route_scored(x.float(), W.float(), bias, k, FACTOR), 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(got, gpu.route_scored(x, W, bias, k, FACTOR)))
    assert (got[0][:, 1:] != got[0][:, :1]).all()


@pytest.mark.parametrize("N,D,k", [(1, 64, 4), (20, 100, 6), (3, 5000, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_hash(N, D, k, dtype):
    E = 12
    x, W = randn(N, D).to(dtype), (randn(E, D) * D**-0.5).to(dtype)
    table = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(v))[:k] for v in range(9)]).to(
        DEVICE
    )
    ids = torch.arange(N, device=DEVICE) * 5 % 9
    got, wanted = gpu.route_hashed(x, W, table, ids, FACTOR), reference.route_hashed(x, W, table, ids, FACTOR)
    assert torch.equal(got[0], wanted[0]) and torch.allclose(got[1], wanted[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "logits",
    [
        [-200.0, -199.0, -201.0],
        [-17.0, -18.0, -30.0],
        [200.0, 150.0, 88.8],
        [20.5, -20.5, 0.0],
        [19.9, 20.1, 3.0],
        [-120.0, -300.0, -90.0],
        [-130.0, -19.0, -75.0],
    ],
    ids=[
        "all far below",
        "below fp32's 1 + e^x",
        "above exp overflow",
        "mixed",
        "where softplus ends",
        "far apart and far below",
        "far apart",
    ],
)
def test_extreme_logits(logits):
    x, W = torch.ones(1, 1, device=DEVICE), torch.tensor(logits, device=DEVICE).unsqueeze(1)
    bias = torch.zeros(3, device=DEVICE)
    compare(gpu.route_scored(x, W, bias, 2, 1.0), reference.route_scored(x, W, bias, 2, 1.0), 1e-6)
    table, ids = torch.tensor([[0, 1, 2]], device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    compare(gpu.route_hashed(x, W, table, ids, 1.0), reference.route_hashed(x, W, table, ids, 1.0), 1e-6)


def test_the_bias_selects_and_does_not_weigh_and_of_equals_the_first_is_chosen():
    x, W = torch.ones(1, 1, device=DEVICE), torch.tensor([[1.0], [2.0], [1.0], [1.0], [-3.0]], device=DEVICE)
    indices, weights = gpu.route_scored(x, W, torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0], device=DEVICE), 4, 1.0)
    assert indices.tolist() == [[4, 1, 0, 2]]
    assert weights[0, 0] < weights[0, 2] == weights[0, 3] < weights[0, 1]
    indices, _ = gpu.route_scored(x, W, torch.full((5,), float("-inf"), device=DEVICE), 3, 1.0)
    assert indices.tolist() == [[0, 1, 2]]


def test_nan_chooses_experts_that_exist():
    x = randn(2, 64)
    x[0, 3] = float("nan")
    indices, weights = gpu.route_scored(x, randn(9, 64), randn(9), 4, 1.0)
    assert (
        sorted(set(indices[0].tolist())) == indices[0].sort().values.tolist()
        and indices.max() < 9
        and indices.min() >= 0
    )
    assert weights[0].isnan().all() and not weights[1].isnan().any()


def test_nothing_to_do_and_what_is_refused():
    W, bias = randn(6, 64), randn(6)
    assert gpu.route_scored(torch.empty(0, 64, device=DEVICE), W, bias, 2, 1.0)[0].shape == (0, 2)
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert gpu.route_hashed(torch.empty(0, 64, device=DEVICE), W, empty.view(0, 2), empty, 1.0)[1].shape == (0, 2)
    with pytest.raises(UnsupportedInput, match="7 of 6 experts"):
        gpu.route_scored(randn(1, 64), W, bias, 7, 1.0)
    with pytest.raises(UnsupportedInput, match="float16"):
        gpu.route_hashed(randn(1, 64), W.half(), empty.view(0, 2), empty, 1.0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 8, 16, 64, 2000])
@pytest.mark.parametrize("E,k", [(256, 6), (384, 8)])
def test_production_shapes(N, E, k):
    x, W = torch.randn(N, 4096, device="cuda").bfloat16(), (torch.randn(E, 4096, device="cuda") / 64).bfloat16()
    bias = randn(E) / 10
    for gate in (W, W.float()):
        got = graphed(lambda: gpu.route_scored(x, gate, bias, k, FACTOR))
        wanted = reference.route_scored(x, gate, bias, k, FACTOR)
        same = (got[0].sort(-1).values == wanted[0].sort(-1).values).all(-1)
        assert same.float().mean() > 0.998  # scores of two experts may be closer than sums in another order
        compare(tuple(t[same] for t in got), tuple(t[same] for t in wanted), 1e-4)
        assert all(
            all(torch.equal(a, b) for a, b in zip(got, gpu.route_scored(x, gate, bias, k, FACTOR))) for _ in range(20)
        )
    table = torch.stack([torch.randperm(E)[:k] for _ in range(500)]).cuda()
    ids = torch.randint(500, (N,), device="cuda")
    compare(
        graphed(lambda: gpu.route_hashed(x, W, table, ids, FACTOR)),
        reference.route_hashed(x, W, table, ids, FACTOR),
        1e-4,
    )
