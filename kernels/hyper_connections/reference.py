"""Manifold-constrained hyper-connections (mHC), all in fp32.

h streams a token (hc_mult = n). Before a sublayer the streams collapse into its input;
after it, its output is spread over the streams and the old streams are mixed by a
doubly stochastic matrix, which Sinkhorn's iteration makes.
"""

import torch
import torch.nn.functional as F
from einops import rearrange


def stream_statistics(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """m = (fn · x) · rsqrt(mean(x²) + norm_eps) for x = flatten(streams).

    streams [N, n, d]; fn fp32 [M, n·d]. Returns fp32 [N, M].
    """
    x = streams.flatten(1).float()
    r = x.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_()
    return F.linear(x, fn).mul_(r)


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Doubly stochastic C from logits [N, n, n] (C[j, k]: old stream j → new stream k).

    Softmax over k plus eps, one column step, then iters−1 × {row step, column step}; eps in
    every denominator. It ends on a column step, so columns sum to 1 − O(eps) and rows only
    as far as the iteration has converged.
    """
    C = torch.softmax(logits, -1) + eps
    C = C / (C.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        C = C / (C.sum(-1, keepdim=True) + eps)
        C = C / (C.sum(-2, keepdim=True) + eps)
    return C


def mix(m: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, iters: int, eps: float):
    """Weights of one sublayer from its statistics m [N, 2n + n²].

    scale fp32 [3]; base fp32 [2n + n²]. Returns pre [N, n], post [N, n], comb [N, n, n], fp32:
    pre = σ(m·scale₀ + base) + eps, post = 2σ(m·scale₁ + base), comb = sinkhorn(m·scale₂ + base).
    """
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn(rearrange(m[:, 2 * n :] * scale[2] + base[2 * n :], "t (j k) -> t j k", j=n), iters, eps)
    return pre, post, comb


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """y = Σ_j pre[j]·h[j]: streams [N, n, d], pre fp32 [N, n] → [N, d] in streams.dtype."""
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def mhc_pre(streams, fn, scale, base, iters: int, eps: float, norm_eps: float):
    """Everything before a sublayer: its input and the weights that merge its output back.

    streams [N, n, d]; fn fp32 [2n + n², n·d]; scale fp32 [3]; base fp32 [2n + n²].
    Returns y [N, d] in streams.dtype (not yet normalised), post fp32 [N, n], comb fp32 [N, n, n].
    """
    n = streams.shape[1]
    pre, post, comb = mix(stream_statistics(streams, fn, norm_eps), scale, base, n, iters, eps)
    return collapse(streams, pre), post, comb


def mhc_post(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """h'[k] = post[k]·out + Σ_j comb[j, k]·h[j] (Cᵀh: the sum runs over the first index).

    out [N, d]; streams [N, n, d]; post fp32 [N, n]; comb fp32 [N, n, n]. Returns [N, n, d] in
    streams.dtype, computed in fp32.
    """
    spread = post.unsqueeze(-1) * out.unsqueeze(1).float()
    return torch.baddbmm(spread, rearrange(comb, "t j k -> t k j"), streams.float()).to(streams.dtype)


def mhc_head(streams, fn, scale, base, eps: float, norm_eps: float) -> torch.Tensor:
    """The learned collapse before the final norm: y = Σ_j (σ(m[j]·scale + base[j]) + eps)·h[j].

    streams [N, n, d]; fn fp32 [n, n·d]; scale fp32 [1]; base fp32 [n]. No Sinkhorn, no post.
    """
    pre = torch.sigmoid(stream_statistics(streams, fn, norm_eps) * scale + base) + eps
    return collapse(streams, pre)
