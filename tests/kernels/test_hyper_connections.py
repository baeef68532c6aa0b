"""mHC against a literal transcription of its equations in fp64, and the cpu form against the reference."""

import pytest
import torch

from dsv4.kernels.hyper_connections import mhc_head, mhc_post, mhc_pre
from dsv4.kernels.hyper_connections.reference import sinkhorn

EPS = 1e-6


def literal_sinkhorn(logits, iters):
    """The order that the paper's code fixes: softmax rows + eps, column, then rows and columns, ends on columns."""
    n = logits.shape[0]
    C = [[0.0] * n for _ in range(n)]
    for j in range(n):
        e = [torch.exp(x - logits[j].max()).item() for x in logits[j]]
        for k in range(n):
            C[j][k] = e[k] / sum(e) + EPS
    columns = lambda C: [[C[j][k] / (sum(C[i][k] for i in range(n)) + EPS) for k in range(n)] for j in range(n)]
    rows = lambda C: [[C[j][k] / (sum(C[j]) + EPS) for k in range(n)] for j in range(n)]
    C = columns(C)
    for _ in range(iters - 1):
        C = columns(rows(C))
    return torch.tensor(C, dtype=torch.float64)


def case(tokens, spread, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    n, d = 4, 48
    streams = torch.randn(tokens, n, d, generator=g).to(dtype)
    fn = torch.randn(2 * n + n * n, n * d, generator=g) * (n * d) ** -0.5
    return streams, fn, torch.tensor([0.7, 1.3, spread]), torch.randn(2 * n + n * n, generator=g)


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0], ids=lambda s: f"logit spread {s}")
@pytest.mark.parametrize("iters", [1, 2, 20], ids=lambda i: f"{i} iterations")
def test_sinkhorn_follows_the_literal_order(spread, iters):
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * spread
    wanted = torch.stack([literal_sinkhorn(m, iters) for m in logits])
    assert (sinkhorn(logits, iters, EPS) - wanted).abs().max() < 1e-12


def test_sinkhorn_ends_on_a_column_step():
    C = sinkhorn(torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(2)) * 8, 20, EPS)
    assert (C.sum(-2) - 1).abs().max() < 2e-6  # columns: exact but for eps
    assert (C.sum(-1) - 1).abs().max() > 1e-4  # rows: only as far as 20 steps converge


@pytest.mark.parametrize("tokens", [1, 4, 9], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("spread", [0.5, 6.0, 40.0], ids=lambda s: f"comb scale {s}")
def test_cpu_form_equals_the_reference(tokens, spread):
    streams, fn, scale, base = case(tokens, spread)
    for got, wanted in zip(
        mhc_pre(streams, fn, scale, base, 20, EPS, EPS, backend="cpu"), mhc_pre(streams, fn, scale, base, 20, EPS, EPS)
    ):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert (got - wanted).abs().max() < 3e-6


def test_cpu_form_takes_extreme_logits():
    streams, fn, scale, base = case(2, 1.0)
    base = base * 400  # sigmoids saturate, exponentials would overflow if taken naively
    for got, wanted in zip(
        mhc_pre(streams, fn, scale, base, 20, EPS, EPS, backend="cpu"), mhc_pre(streams, fn, scale, base, 20, EPS, EPS)
    ):
        assert torch.isfinite(got).all()
        assert (got - wanted).abs().max() < 1e-5


def test_pre_collapses_with_eps_and_post_has_none():
    streams, fn, scale, base = case(3, 1.0)
    y, post, comb = mhc_pre(streams, fn, scale, base - 100, 20, EPS, EPS)  # every sigmoid at 0
    assert torch.allclose(y, EPS * streams.sum(1), atol=1e-9)
    assert (post < 1e-30).all()


def test_post_mixes_over_the_first_index():
    streams, out = torch.randn(2, 4, 8), torch.randn(2, 8)
    post, comb = torch.rand(2, 4), torch.rand(2, 4, 4)
    got = mhc_post(out, streams, post, comb)
    for t in range(2):
        for k in range(4):
            wanted = post[t, k] * out[t] + sum(comb[t, j, k] * streams[t, j] for j in range(4))
            assert torch.allclose(got[t, k], wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_host_form_of_post_equals_the_reference(dtype):
    for tokens in (1, 3):
        args = (
            torch.randn(tokens, 8).to(dtype),
            torch.randn(tokens, 4, 8).to(dtype),
            torch.rand(tokens, 4),
            torch.rand(tokens, 4, 4),
        )
        got, wanted = mhc_post(*args, backend="cpu"), mhc_post(*args)
        assert got.dtype == dtype and (got.float() - wanted.float()).abs().max() < (
            1e-6 if dtype is torch.float32 else 4e-2
        )


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_head_is_the_learned_collapse(tokens, backend):
    streams, fn, scale, base = case(tokens, 1.0)
    x = streams.flatten(1).double()
    m = (x @ fn[:4].double().T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(m * 0.7 + base[:4].double()) + 0.03
    wanted = (pre.unsqueeze(-1) * streams.double()).sum(1)
    assert (mhc_head(streams, fn[:4], scale[:1], base[:4], 0.03, EPS, backend=backend) - wanted).abs().max() < 1e-5


def test_bf16_streams_are_mixed_in_fp32():
    streams, fn, scale, base = case(6, 1.0, torch.bfloat16)
    y, post, comb = mhc_pre(streams, fn, scale, base, 20, EPS, EPS)
    exact, post32, comb32 = mhc_pre(streams.float(), fn, scale, base, 20, EPS, EPS)
    assert post.dtype == comb.dtype == torch.float32
    assert torch.equal(post, post32) and torch.equal(comb, comb32)
    assert torch.equal(y, exact.bfloat16())
