"""mHC over many tokens, differentiable.

Plain autograd would hold the streams many times over and launch thousands of kernels of 16 numbers a token. Three steps
are fused instead: Sinkhorn's iteration (its denominators are kept, and the backward pass multiplies by them), the
collapse of the streams, and their mixing. On a host processor autograd runs through the reference.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.hyper_connections import reference


def statistics(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """Computes `reference.stream_statistics`, with operands in the streams' dtype. → fp32 [N, M]."""
    if not streams.is_cuda:
        return reference.stream_statistics(streams, fn, norm_eps)
    return _Statistics.apply(streams.flatten(1), fn.to(streams.dtype), norm_eps)


def mhc_pre(streams, fn, scale, base, iters: int, eps: float, norm_eps: float):
    n = streams.shape[1]
    m = statistics(streams, fn, norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = _Sinkhorn.apply(logits, iters, eps) if streams.is_cuda else reference.sinkhorn(logits, iters, eps)
    return _collapse(streams, pre), post, comb


def mhc_post(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    if not streams.is_cuda:
        return reference.mhc_post(out, streams, post, comb)
    return _Post.apply(out, streams, post, comb)


def mhc_head(streams, fn, scale, base, eps: float, norm_eps: float) -> torch.Tensor:
    pre = torch.sigmoid(statistics(streams, fn, norm_eps) * scale + base) + eps
    return _collapse(streams, pre)


mhc_pre.__doc__, mhc_post.__doc__, mhc_head.__doc__ = (
    reference.mhc_pre.__doc__,
    reference.mhc_post.__doc__,
    reference.mhc_head.__doc__,
)


def _collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return _Collapse.apply(streams, pre) if streams.is_cuda else reference.collapse(streams, pre)


class _Statistics(torch.autograd.Function):
    """m = (fn·x)·r, r = rsqrt(mean(x²) + eps). dx = (r·dm)·fn − x·r³/K·Σ dm·(fn·x)."""

    @staticmethod
    def forward(ctx, x, fn, eps):
        x = x.contiguous()
        N, K = x.shape
        raw = torch.mm(x, fn.t(), out_dtype=torch.float32)
        r = torch.empty(N, 1, dtype=torch.float32, device=x.device)
        _inverse_rms[(N,)](x, r, K, eps, triton.next_power_of_2(K), num_warps=4)
        ctx.save_for_backward(x, fn, raw, r)
        return raw * r

    @staticmethod
    def backward(ctx, grad):
        x, fn, raw, r = ctx.saved_tensors
        N, K = x.shape
        scaled = (grad * r).to(x.dtype)
        dx = torch.mm(scaled, fn)
        coefficient = (grad * raw).sum(1, keepdim=True) * r.pow(3) * (-1 / K)
        _add_scaled[(N,)](dx, x, coefficient, K, triton.next_power_of_2(K), num_warps=4)
        return dx, torch.mm(scaled.t(), x), None


@triton.jit
def _inverse_rms(X, R, K, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(X + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    tl.store(R + row, tl.rsqrt(tl.sum(x * x, 0) / K + eps))


@triton.jit
def _add_scaled(Y, X, C, K, BLOCK: tl.constexpr):
    """Y[row] += C[row]·X[row]."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = tl.load(Y + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    y += tl.load(C + row) * tl.load(X + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    tl.store(Y + row * K + i, y.to(Y.dtype.element_ty), mask=i < K)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, iters, eps):
        N, n, _ = logits.shape
        logits = logits.contiguous()
        comb = torch.empty_like(logits)
        held = torch.empty(2 * iters - 1, N, n, dtype=torch.float32, device=logits.device)
        soft = torch.empty_like(logits)
        _sinkhorn[(triton.cdiv(N, 64),)](logits, comb, soft, held, N, eps, iters, n, 64, num_warps=4)
        ctx.save_for_backward(comb, soft, held)
        ctx.iters = iters
        return comb

    @staticmethod
    def backward(ctx, grad):
        comb, soft, held = ctx.saved_tensors
        out = torch.empty_like(comb)
        N, n, _ = comb.shape
        _sinkhorn_back[(triton.cdiv(N, 64),)](
            grad.contiguous(), comb, soft, held, out, N, ctx.iters, n, 64, num_warps=4
        )
        return out, None, None


@triton.jit
def _sinkhorn(LOGITS, COMB, SOFT, HELD, N, eps, iters, n: tl.constexpr, BLOCK: tl.constexpr):
    token, i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, n)
    at = token[:, None, None] * n * n + i[None, :, None] * n + i[None, None, :]
    live, side = token[:, None, None] < N, token[:, None] * n + i[None, :]
    x = tl.load(LOGITS + at, mask=live, other=0.0)
    x = tl.exp(x - tl.max(x, 2)[:, :, None])
    c = x / tl.sum(x, 2)[:, :, None]
    tl.store(SOFT + at, c, mask=live)
    c += eps
    d = tl.sum(c, 1) + eps
    tl.store(HELD + side, d, mask=token[:, None] < N)
    c = c / d[:, None, :]
    for step in range(1, iters):
        d = tl.sum(c, 2) + eps
        tl.store(HELD + (2 * step - 1) * N * n + side, d, mask=token[:, None] < N)
        c = c / d[:, :, None]
        d = tl.sum(c, 1) + eps
        tl.store(HELD + 2 * step * N * n + side, d, mask=token[:, None] < N)
        c = c / d[:, None, :]
    tl.store(COMB + at, c, mask=live)


@triton.jit
def _sinkhorn_back(GRAD, COMB, SOFT, HELD, OUT, N, iters, n: tl.constexpr, BLOCK: tl.constexpr):
    """With C' = C / d and d = ΣC + eps: dC = (dC' − Σ dC'·C') / d, and C = C'·d."""
    token, i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, n)
    at = token[:, None, None] * n * n + i[None, :, None] * n + i[None, None, :]
    live, side = token[:, None, None] < N, token[:, None] * n + i[None, :]
    g = tl.load(GRAD + at, mask=live, other=0.0)
    c = tl.load(COMB + at, mask=live, other=0.0)
    for back in range(1, iters):
        step = iters - back
        d = tl.load(HELD + 2 * step * N * n + side, mask=token[:, None] < N, other=1.0)
        g = (g - tl.sum(g * c, 1)[:, None, :]) / d[:, None, :]
        c = c * d[:, None, :]
        d = tl.load(HELD + (2 * step - 1) * N * n + side, mask=token[:, None] < N, other=1.0)
        g = (g - tl.sum(g * c, 2)[:, :, None]) / d[:, :, None]
        c = c * d[:, :, None]
    d = tl.load(HELD + side, mask=token[:, None] < N, other=1.0)
    g = (g - tl.sum(g * c, 1)[:, None, :]) / d[:, None, :]
    s = tl.load(SOFT + at, mask=live, other=0.0)
    tl.store(OUT + at, s * (g - tl.sum(g * s, 2)[:, :, None]), mask=live)


class _Collapse(torch.autograd.Function):
    """y = Σ_j pre[j]·h[j]."""

    @staticmethod
    def forward(ctx, streams, pre):
        streams, pre = streams.contiguous(), pre.contiguous()
        N, n, d = streams.shape
        y = streams.new_empty(N, d)
        _collapse_forward[(N,)](streams, pre, y, d, n, triton.next_power_of_2(d), num_warps=2)
        ctx.save_for_backward(streams, pre)
        return y

    @staticmethod
    def backward(ctx, grad):
        streams, pre = ctx.saved_tensors
        N, n, d = streams.shape
        ds, dpre = torch.empty_like(streams), torch.empty_like(pre)
        _collapse_back[(N,)](streams, pre, grad.contiguous(), ds, dpre, d, n, triton.next_power_of_2(d), num_warps=2)
        return ds, dpre


@triton.jit
def _collapse_forward(S, PRE, Y, d, n: tl.constexpr, BLOCK: tl.constexpr):
    t, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(n):
        y += tl.load(PRE + t * n + j) * tl.load(S + (t * n + j) * d + x, mask=x < d, other=0.0).to(tl.float32)
    tl.store(Y + t * d + x, y.to(Y.dtype.element_ty), mask=x < d)


@triton.jit
def _collapse_back(S, PRE, G, DS, DPRE, d, n: tl.constexpr, BLOCK: tl.constexpr):
    t, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    g = tl.load(G + t * d + x, mask=x < d, other=0.0).to(tl.float32)
    for j in tl.static_range(n):
        h = tl.load(S + (t * n + j) * d + x, mask=x < d, other=0.0).to(tl.float32)
        tl.store(DPRE + t * n + j, tl.sum(g * h, 0))
        tl.store(DS + (t * n + j) * d + x, (tl.load(PRE + t * n + j) * g).to(DS.dtype.element_ty), mask=x < d)


class _Post(torch.autograd.Function):
    """h'[k] = post[k]·out + Σ_j C[j, k]·h[j]."""

    @staticmethod
    def forward(ctx, out, streams, post, comb):
        out, streams, post, comb = out.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous()
        N, n, d = streams.shape
        mixed = torch.empty_like(streams)
        _post_forward[(N,)](out, streams, post, comb, mixed, d, n, triton.next_power_of_2(d), num_warps=2)
        ctx.save_for_backward(out, streams, post, comb)
        return mixed

    @staticmethod
    def backward(ctx, grad):
        out, streams, post, comb = ctx.saved_tensors
        N, n, d = streams.shape
        dout, ds, dpost, dcomb = (torch.empty_like(t) for t in (out, streams, post, comb))
        _post_back[(N,)](
            out,
            streams,
            post,
            comb,
            grad.contiguous(),
            dout,
            ds,
            dpost,
            dcomb,
            d,
            n,
            triton.next_power_of_2(d),
            num_warps=2,
        )
        return dout, ds, dpost, dcomb


@triton.jit
def _post_forward(OUT, S, POST, COMB, MIXED, d, n: tl.constexpr, BLOCK: tl.constexpr):
    t, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    out = tl.load(OUT + t * d + x, mask=x < d, other=0.0).to(tl.float32)
    for k in tl.static_range(n):
        y = tl.load(POST + t * n + k) * out
        for j in tl.static_range(n):
            h = tl.load(S + (t * n + j) * d + x, mask=x < d, other=0.0).to(tl.float32)
            y += tl.load(COMB + (t * n + j) * n + k) * h
        tl.store(MIXED + (t * n + k) * d + x, y.to(MIXED.dtype.element_ty), mask=x < d)


@triton.jit
def _post_back(OUT, S, POST, COMB, G, DOUT, DS, DPOST, DCOMB, d, n: tl.constexpr, BLOCK: tl.constexpr):
    t, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    out = tl.load(OUT + t * d + x, mask=x < d, other=0.0).to(tl.float32)
    dout = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(n):
        g = tl.load(G + (t * n + k) * d + x, mask=x < d, other=0.0).to(tl.float32)
        dout += tl.load(POST + t * n + k) * g
        tl.store(DPOST + t * n + k, tl.sum(g * out, 0))
    tl.store(DOUT + t * d + x, dout.to(DOUT.dtype.element_ty), mask=x < d)
    for j in tl.static_range(n):
        h = tl.load(S + (t * n + j) * d + x, mask=x < d, other=0.0).to(tl.float32)
        dh = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(n):
            g = tl.load(G + (t * n + k) * d + x, mask=x < d, other=0.0).to(tl.float32)
            tl.store(DCOMB + (t * n + j) * n + k, tl.sum(g * h, 0))
            dh += tl.load(COMB + (t * n + j) * n + k) * g
        tl.store(DS + (t * n + j) * d + x, dh.to(DS.dtype.element_ty), mask=x < d)
