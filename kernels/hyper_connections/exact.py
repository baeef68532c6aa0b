"""Hyper-connections in fp64, and honest kernels whose products are in TF32."""

import torch

from dsv4.kernels.hyper_connections import reference


def statistics(streams, fn, norm_eps: float) -> torch.Tensor:
    """fp64 [N, M]: the products of fn [M, n·d] with the streams [N, n, d], stream by stream, over the root mean square
    of all of them."""
    N, n, d = streams.shape
    x, rows = streams.double(), fn.double().view(-1, n, d)
    dots = sum(x[:, j] @ rows[:, j].T for j in range(n))
    square = (x * x).sum((1, 2)) / (n * d)
    return dots / (square + norm_eps).sqrt().unsqueeze(1)


def stochastic(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Sinkhorn in scaled form: C[j, k] = K[j, k] / (a[j]·b[k]) with K = softmax over k, plus eps.

    A column step is b[k] ← Σ_j K[j, k] / a[j] + eps·b[k], a row step likewise: only a and b change. logits fp64
    [N, n, n].
    """
    kernel = (logits - logits.logsumexp(-1, keepdim=True)).exp() + eps
    a, b = torch.ones_like(kernel[..., 0]), torch.ones_like(kernel[..., 0])
    for step in range(iters):
        if step:
            a = torch.einsum("tjk,tk->tj", kernel, 1 / b) + eps * a
        b = torch.einsum("tjk,tj->tk", kernel, 1 / a) + eps * b
    return kernel / (a.unsqueeze(-1) * b.unsqueeze(-2))


def gate(x: torch.Tensor) -> torch.Tensor:
    """σ(x), exact in relative terms for large negative x."""
    return torch.where(x < 0, x.exp() / (1 + x.exp()), 1 / (1 + (-x).exp()))


def mhc_pre(streams, fn, scale, base, iters: int, eps: float, norm_eps: float):
    """y, post and comb in fp64, as `mhc_pre`."""
    n = streams.shape[1]
    parts = statistics(streams, fn, norm_eps).split((n, n, n * n), 1)
    pre, post, comb = (
        m * s + b for m, s, b in zip(parts, scale.double(), base.double().split((n, n, n * n)), strict=True)
    )
    y = ((gate(pre) + eps).unsqueeze(-1) * streams.double()).sum(1)
    return y, 2 * gate(post), stochastic(comb.unflatten(1, (n, n)), iters, eps)


def mhc_post(out, streams, post, comb) -> torch.Tensor:
    """New streams in fp64: old stream j goes to new stream k with weight comb[j, k]."""
    old, comb = streams.double(), comb.double()
    mixed = sum(comb[:, j].unsqueeze(-1) * old[:, j].unsqueeze(1) for j in range(old.shape[1]))
    return mixed + post.double().unsqueeze(-1) * out.double().unsqueeze(1)


def mhc_head(streams, fn, scale, base, eps: float, norm_eps: float) -> torch.Tensor:
    """The head's input in fp64."""
    weights = gate(statistics(streams, fn, norm_eps) * scale.double() + base.double()) + eps
    return (weights.unsqueeze(-1) * streams.double()).sum(1)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to 10 bits of mantissa, halves away from zero, as tensor cores take it."""
    return ((x.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _statistics_tf32(streams, fn, norm_eps: float) -> torch.Tensor:
    x = streams.flatten(1).float()
    r = x.square().mean(-1, keepdim=True).add(norm_eps).rsqrt()
    return (tf32(x) @ tf32(fn).T) * r


def mhc_pre_tf32(streams, fn, scale, base, iters: int, eps: float, norm_eps: float):
    """An honest kernel whose products of streams and fn are in TF32."""
    n = streams.shape[1]
    pre, post, comb = reference.mix(_statistics_tf32(streams, fn, norm_eps), scale, base, n, iters, eps)
    return reference.collapse(streams, pre), post, comb


def mhc_head_tf32(streams, fn, scale, base, eps: float, norm_eps: float) -> torch.Tensor:
    """Likewise for the head."""
    return reference.collapse(streams, torch.sigmoid(_statistics_tf32(streams, fn, norm_eps) * scale + base) + eps)
