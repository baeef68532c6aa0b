"""Routing: bias selects only, weights are the unbiased scores, extremes stay finite."""

import math

import pytest
import torch

from dsv4.kernels.router import route_hashed, route_scored


def one_logit_per_expert(logits):
    """x and weight such that W x = logits for the one token."""
    return torch.ones(1, 1), torch.tensor(logits).unsqueeze(1)


def score(logit):
    return math.sqrt(logit + math.log1p(math.exp(-logit)) if logit > 0 else math.log1p(math.exp(logit)))


backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


@backends
def test_bias_selects_and_does_not_weigh(backend):
    x, W = one_logit_per_expert([2.0, 1.0, 0.0, -1.0])
    indices, weights = route_scored(x, W, torch.tensor([0.0, 0.0, 0.0, 100.0]), 2, 1.5, backend=backend)
    assert sorted(indices[0].tolist()) == [0, 3]
    chosen = dict(zip(indices[0].tolist(), weights[0].tolist()))
    total = score(2.0) + score(-1.0)
    assert chosen[0] == pytest.approx(1.5 * score(2.0) / total, rel=1e-6)
    assert chosen[3] == pytest.approx(1.5 * score(-1.0) / total, rel=1e-6)


@backends
@pytest.mark.parametrize(
    "logits",
    [[-200.0, -199.0, -201.0], [-17.0, -18.0, -30.0], [200.0, 150.0, 88.8], [20.5, -20.5, 0.0]],
    ids=["all far below", "below fp32's 1 + e^x", "above exp overflow", "mixed"],
)
def test_extreme_logits_give_finite_exact_weights(logits, backend):
    x, W = one_logit_per_expert(logits)
    indices, weights = route_scored(x, W, torch.zeros(3), 2, 1.0, backend=backend)
    assert torch.isfinite(weights).all()
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-6)
    a, b = (score(logits[i]) for i in indices[0].tolist())
    assert weights[0, 0].item() == pytest.approx(a / (a + b), rel=1e-5)


def test_hash_routing_takes_experts_from_the_token_and_weights_from_the_gate():
    table = torch.tensor([[0, 1], [2, 3], [3, 0]])
    x, W = one_logit_per_expert([0.5, 1.5, -0.5, 3.0])
    indices, weights = route_hashed(x.expand(2, 1), W, table, torch.tensor([2, 1]), 2.0)
    assert indices.tolist() == [[3, 0], [2, 3]]
    assert weights[0, 0].item() == pytest.approx(2 * score(3.0) / (score(3.0) + score(0.5)), rel=1e-6)


def test_bf16_gate_is_scored_in_fp32():
    g = torch.Generator().manual_seed(0)
    x, W = torch.randn(5, 32, generator=g).bfloat16(), torch.randn(6, 32, generator=g).bfloat16()
    low = route_scored(x, W, torch.zeros(6), 3, 1.0)
    high = route_scored(x.float(), W.float(), torch.zeros(6), 3, 1.0)
    assert torch.equal(low[0], high[0]) and torch.equal(low[1], high[1])


def test_host_form_of_one_token_equals_the_reference():
    g = torch.Generator().manual_seed(1)
    table = torch.stack([torch.randperm(9, generator=g)[:3] for _ in range(7)])
    for trial in range(20):
        x, W, bias = torch.randn(1, 16, generator=g) * 3, torch.randn(9, 16, generator=g), torch.randn(9, generator=g)
        for got, wanted in (
            (route_scored(x, W, bias, 3, 1.5, backend="cpu"), route_scored(x, W, bias, 3, 1.5)),
            (
                route_hashed(x, W, table, torch.tensor([trial % 7]), 1.5, backend="cpu"),
                route_hashed(x, W, table, torch.tensor([trial % 7]), 1.5),
            ),
        ):
            assert torch.equal(got[0], wanted[0]) and got[1].dtype == wanted[1].dtype == torch.float32
            assert (got[1] - wanted[1]).abs().max() < 1e-6


@pytest.mark.parametrize("lowest", [-5.0, -104.0, -250.0])
@pytest.mark.parametrize("way", ["scored", "hashed"])
def test_training_weighs_as_the_reference_and_its_gradients_are_finite(way, lowest):
    """Logits at which sqrt(softplus) is 0 in fp32: of all experts, and beside one that is far above."""
    logits = lowest + torch.tensor([[0.0, -1.0, 0.5, -2.0], [0.0, -1.0, 0.5, 2 - lowest]])
    x, table = torch.eye(2).requires_grad_(), torch.tensor([[0, 2, 3], [1, 2, 3]])
    W = logits.T.clone().requires_grad_()

    def route(backend):
        if way == "hashed":
            return route_hashed(x, W, table, torch.tensor([0, 1]), 2.5, backend=backend)
        return route_scored(x, W, torch.zeros(4), 3, 2.5, backend=backend)

    order = lambda indices, weights: (indices.sort(-1).values, weights.gather(1, indices.argsort(-1)))
    with torch.no_grad():
        expected = order(*route("reference"))
    found = order(*route("training"))
    assert torch.equal(expected[0], found[0])
    torch.testing.assert_close(found[1].detach(), expected[1], rtol=2e-6, atol=1e-30)
    found[1].mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(W.grad).all() and W.grad.abs().max() > 1e-3
