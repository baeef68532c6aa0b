"""The fused training kernels in Triton's interpreter, against autograd through their definitions.

The same comparisons run at production shapes on a GPU (scripts/training/check_kernels.py, called by
scripts/gpu_tests.sh).
"""

import pytest
import torch

from dsv4.kernels.attention import training as attention
from dsv4.kernels.experts import training as experts
from dsv4.kernels.hyper_connections import reference as hyper_reference
from dsv4.kernels.hyper_connections import training as hyper
from dsv4.kernels.rms_norm import reference as rms_reference
from dsv4.kernels.rms_norm import training as rms
from dsv4.kernels.rope import inverse_frequencies, rotation
from dsv4.kernels.rope import training as rope

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU check_kernels compares the compiled kernels"
)
randn = lambda *shape, seed=0: torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def compare(fused, definition, inputs, tolerance: float = 1e-4) -> None:
    """Outputs and the gradient of each input, within `tolerance` of their norms."""
    a, b = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    x, y = fused(*a), definition(*b)
    g = randn(*x.shape, seed=9)
    x.backward(g)
    y.backward(g)
    for name, u, v in [("output", x, y)] + [(f"gradient {i}", p.grad, q.grad) for i, (p, q) in enumerate(zip(a, b))]:
        assert (u - v).norm() <= tolerance * v.norm().clamp(min=1e-6), (name, (u - v).norm() / v.norm())


@interpreted
@pytest.mark.parametrize(
    "T,ratio,masked", [(70, 4, False), (70, 4, True), (150, 128, False), (16, 0, False), (33, 0, False)]
)
def test_attention(T, ratio, masked):
    B, H, D = 2, 2, 16
    n = T // ratio if ratio else 0
    mask = (torch.rand(B, T, n, generator=torch.Generator().manual_seed(5)) < 0.3).to(torch.uint8) if masked else None
    args = (mask, 0.25, 20, max(1, ratio))
    call = lambda f: lambda q, kv, e, s: f(q, kv, e, args[0], s, *args[1:])
    compare(
        call(attention._Attention.apply),
        call(attention.masked_attention),
        (randn(B, T, H, D), randn(B, T, D), randn(B, n, D), randn(H)),
    )


@interpreted
def test_attention_refuses_what_its_tiles_cannot_hold():
    from dsv4.kernels.errors import UnsupportedInput

    with pytest.raises(UnsupportedInput, match="powers of two of heads"):
        attention._Attention.apply(randn(1, 8, 3, 16), randn(1, 8, 16), randn(1, 0, 16), None, randn(3), 0.25, 4, 1)


@interpreted
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn(iters):
    compare(
        lambda z: hyper._Sinkhorn.apply(z, iters, 1e-6),
        lambda z: hyper_reference.sinkhorn(z, iters, 1e-6),
        (2 * randn(70, 4, 4),),
    )


@interpreted
def test_streams():
    N, n, d = 5, 4, 24
    compare(hyper._Collapse.apply, lambda s, p: torch.einsum("njd,nj->nd", s, p), (randn(N, n, d), randn(N, n)))
    compare(
        hyper._Post.apply,
        lambda o, s, p, c: hyper_reference.mhc_post(o, s, p, c),
        (randn(N, d), randn(N, n, d), randn(N, n), randn(N, n, n)),
    )


@interpreted
@pytest.mark.parametrize("shape", [(40, 24), (7, 3, 16)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(shape, weighted, monkeypatch):
    monkeypatch.setattr(rms, "PROGRAMS", 3)
    if weighted:
        compare(
            lambda x, w: rms._RMSNorm.apply(x, w, 1e-3),
            lambda x, w: rms_reference.rms_norm(x, w, 1e-3),
            (randn(*shape), randn(shape[-1])),
        )
    else:
        compare(
            lambda x: rms._RMSNorm.apply(x, None, 1e-3),
            lambda x: rms_reference.rms_norm(x, None, 1e-3),
            (randn(*shape),),
        )


@interpreted
@pytest.mark.parametrize("heads", [None, 3])
def test_rotation(heads):
    N, D, d = 37, 24, 16
    cis = rotation(torch.arange(N), inverse_frequencies(d, 100.0))
    cis, x = (cis.unsqueeze(1), randn(N, heads, D)) if heads else (cis, randn(N, D))
    compare(lambda x: rope._Rotate.apply(x, torch.view_as_real(cis), 1.0), lambda x: rope.rotate(x, cis), (x,))


@interpreted
@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu(weighted):
    y, w = 2 * randn(9, 20), randn(9)
    y[0, 0], y[0, 10], y[1, 11] = 1.5, 1.5, -1.5  # on the clamps, where the gradient still passes

    def plain(y, w=None):
        gate, up = y.chunk(2, -1)
        h = torch.nn.functional.silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)
        return h if w is None else h * w[:, None]

    if weighted:
        compare(lambda y, w: experts._SwiGLU.apply(y, w, 1.5), plain, (y, w))
    else:
        compare(lambda y: experts._SwiGLU.apply(y, None, 1.5), plain, (y,))


def test_spreading_and_gathering_are_each_other_s_way_back():
    """Tokens to experts and back: the gradient is that of plain indexing."""
    N, k, d, E = 11, 3, 8, 5
    indices = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(i))[:k] for i in range(N)])
    order = torch.argsort(indices.flatten(), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(N * k))
    compare(lambda x: experts._Spread.apply(x, order // k, place, k), lambda x: x[order // k], (randn(N, d),))
    compare(
        lambda r: experts._Gather.apply(r, order // k, place, k),
        lambda r: torch.zeros(N, d).index_add(0, order // k, r),
        (randn(N * k, d),),
    )
