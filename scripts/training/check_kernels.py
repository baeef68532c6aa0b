"""The fused training kernels against autograd through their definitions, on a GPU: values and every gradient, and
times.

    python -m scripts.training.check_kernels
"""

import sys

import torch
import triton

from dsv4.kernels.attention import training as attention
from dsv4.kernels.experts import training as experts
from dsv4.kernels.hyper_connections import reference
from dsv4.kernels.hyper_connections import training as hyper
from dsv4.kernels.rms_norm import reference as rms_reference
from dsv4.kernels.rms_norm import training as rms_training
from dsv4.kernels.rope import inverse_frequencies, rotation
from dsv4.kernels.rope import training as rope


def compare(name: str, fused, definition, inputs, other=(), tolerance: float = 2e-2) -> bool:
    """Relative errors of the output and of the gradient of each input, both computed from the same rounded inputs."""
    a = [t.detach().clone().requires_grad_() for t in inputs]
    b = [
        t.detach().double().requires_grad_() if t.dtype is torch.float32 else t.detach().float().requires_grad_()
        for t in inputs
    ]
    x, y = fused(*a, *other), definition(*b, *other)
    g = torch.randn_like(x)
    x.backward(g)
    y.backward(g.to(y.dtype))
    error = lambda u, v: ((u.double() - v.double()).norm() / v.double().norm().clamp(min=1e-20)).item()
    errors = [error(x, y)] + [error(u.grad, v.grad) for u, v in zip(a, b)]
    good = all(e < tolerance for e in errors)
    print(f"{'ok  ' if good else 'FAIL'} {name:44} " + " ".join(f"{e:.1e}" for e in errors), flush=True)
    return good


def _turn(x, cis):
    pairs = torch.view_as_complex(x[..., -32:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-32], torch.view_as_real(pairs * cis).flatten(-2)), -1)


def main() -> None:
    torch.manual_seed(0)
    ok, dev = True, dict(device="cuda")
    b16 = lambda *s: torch.randn(*s, **dev).bfloat16()
    for T, ratio, masked in ((200, 4, False), (333, 4, True), (300, 128, False), (1024, 4, True), (50, 1, False)):
        B, H, D, n = 2, 8, 64, T // ratio if ratio > 1 else 0
        mask = (torch.rand(B, T, n, **dev) < 0.3).to(torch.uint8) if masked else None
        ok &= compare(
            f"attention T={T} ratio={ratio} masked={masked}",
            lambda q, kv, e, s: attention._Attention.apply(q, kv, e, mask, s, 0.125, 64, ratio),
            lambda q, kv, e, s: attention.masked_attention(q, kv, e, mask, s.float(), 0.125, 64, ratio),
            (b16(B, T, H, D), b16(B, T, D), b16(B, n, D), torch.randn(H, **dev)),
        )
    N, n, d = 1000, 4, 256
    ok &= compare(
        "sinkhorn",
        lambda z: hyper._Sinkhorn.apply(z, 20, 1e-6),
        lambda z: reference.sinkhorn(z, 20, 1e-6),
        (torch.randn(N, n, n, **dev) * 2,),
        tolerance=1e-4,
    )
    ok &= compare(
        "collapse",
        hyper._Collapse.apply,
        lambda s, p: torch.einsum("njd,nj->nd", s, p.float()),
        (b16(N, n, d), torch.rand(N, n, **dev)),
    )
    ok &= compare(
        "post",
        hyper._Post.apply,
        lambda o, s, p, c: p.float()[..., None] * o[:, None] + torch.einsum("njk,njd->nkd", c.float(), s),
        (b16(N, d), b16(N, n, d), torch.rand(N, n, **dev), torch.rand(N, n, n, **dev)),
    )

    ok &= compare(
        "stream statistics",
        lambda x, fn: hyper._Statistics.apply(x, fn, 1e-6),
        lambda x, fn: (x @ fn.T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
        (b16(N, 1024), b16(24, 1024)),
    )
    for D, shape in ((256, (N, 256)), (64, (N, 8, 64)), (128, (77, 128))):
        ok &= compare(
            f"rms norm {shape}",
            lambda x, w: rms_training.rms_norm(x, w, 1e-6),
            lambda x, w: rms_reference.rms_norm(x, w, 1e-6),
            (b16(*shape), torch.rand(D, **dev)),
        )
        ok &= compare(
            f"rms norm {shape} without weight",
            lambda x: rms_training.rms_norm(x, None, 1e-6),
            lambda x: rms_reference.rms_norm(x, None, 1e-6),
            (b16(*shape),),
        )
    cis = rotation(torch.arange(N, **dev), inverse_frequencies(32, 10000.0).cuda())
    ok &= compare(
        "rotation", lambda x: rope.rotate(x, cis.unsqueeze(1)), lambda x: _turn(x, cis.unsqueeze(1)), (b16(N, 8, 64),)
    )
    ok &= compare("rotation, one head", lambda x: rope.rotate(x, cis), lambda x: _turn(x, cis), (b16(N, 64),))

    def swiglu(y, w):
        g, u = y.chunk(2, -1)
        return torch.nn.functional.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5) * w.float()[:, None]

    ok &= compare("swiglu", lambda y, w: experts._SwiGLU.apply(y, w, 1.5), swiglu, (b16(N, 320), torch.rand(N, **dev)))
    ends = torch.tensor([100, 100, 700, 1000], **dev)
    ok &= compare(
        "grouped product",
        lambda x, w: experts._grouped(x, w, ends),
        lambda x, w: torch.cat(
            [x[a:b] @ w[e].T for e, (a, b) in enumerate(((0, 100), (100, 100), (100, 700), (700, 1000)))]
        ),
        (b16(N, 256), b16(4, 320, 256)),
    )
    for B, T, masked in ((64, 1024, False), (4, 16384, False), (4, 16384, True)):
        q, kv, e = (
            b16(B, T, 8, 64).requires_grad_(),
            b16(B, T, 64).requires_grad_(),
            b16(B, T // 4, 64).requires_grad_(),
        )
        sink = torch.zeros(8, **dev, requires_grad=True)
        mask = (torch.rand(B, T, T // 4, **dev) < 0.1).to(torch.uint8) if masked else None
        run = lambda: attention._Attention.apply(q, kv, e, mask, sink, 0.125, 64, 4)
        g = torch.randn_like(q)
        forward = triton.testing.do_bench(run)
        both = triton.testing.do_bench(lambda: run().backward(g))
        print(f"attention {B} × {T} masked={masked}: forward {forward:.2f} ms, with backward {both:.2f} ms", flush=True)
    s = b16(65536, 4, 256).requires_grad_()
    fn, scale, base = torch.randn(24, 1024, **dev) * 0.03, torch.ones(3, **dev), torch.randn(24, **dev)

    def sublayer():
        y, post, comb = hyper.mhc_pre(s, fn, scale, base, 20, 1e-6, 1e-6)
        hyper.mhc_post(y, s, post, comb).backward(s)

    print(f"hyper-connection, 65,536 tokens, with backward: {triton.testing.do_bench(sublayer):.2f} ms", flush=True)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
