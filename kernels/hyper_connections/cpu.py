"""mHC for a few tokens on a host processor.

Sinkhorn's 2·iters − 1 steps on a 4×4 matrix are over 100 tensor operations of 16 numbers,
each costing more than the arithmetic of the whole iteration. Here the iteration runs on
Python floats (fp64) in scaled form. With C[j,k] = K[j,k] / (a[j]·b[k]) the row step
C ← C / (rowsum + eps) is exactly a[j] ← Σ_k K[j,k]/b[k] + eps·a[j], and the column step
the same with roles exchanged, so only 8 numbers move. Agreement with the reference is
limited by the reference's fp32 rounding (~1e-7).
"""

from math import exp

import torch
import torch.nn.functional as F

from dsv4.kernels.hyper_connections import reference

MAX_TOKENS = 4  # beyond this the tensor form is faster
FLOOR = -700.0  # of a sigmoid's argument: below it exp(-x) overflows, and the sigmoid is 0 in fp32 long before


def mhc_pre(streams, fn, scale, base, iters: int, eps: float, norm_eps: float):
    n = streams.shape[1]
    if n != 4 or not 0 < streams.shape[0] <= MAX_TOKENS:
        return reference.mhc_pre(streams, fn, scale, base, iters, eps, norm_eps)
    x = streams.flatten(1).float()
    scale, base, width = scale.tolist(), base.tolist(), x.shape[1]
    weights = []
    for projected, row in zip(F.linear(x, fn).tolist(), x.unbind()):
        r = (torch.dot(row, row).item() / width + norm_eps) ** -0.5
        weights.append(_mix_token(projected, [r * s for s in scale], base, iters, eps))
    pre, post, comb = torch.split_with_sizes(torch.tensor(weights), (4, 4, 16), 1)
    y = torch.mm(pre, streams[0].float()).to(streams.dtype) if len(weights) == 1 else reference.collapse(streams, pre)
    return y, post, comb.view(-1, 4, 4)


def mhc_post(out, streams, post, comb) -> torch.Tensor:
    if out.shape[0] != 1:
        return reference.mhc_post(out, streams, post, comb)
    mixed = torch.mm(comb[0].t(), streams[0].float())
    return mixed.addmm_(post.t(), out.float()).to(streams.dtype).unsqueeze(0)


def mhc_head(streams, fn, scale, base, eps: float, norm_eps: float) -> torch.Tensor:
    if streams.shape[0] != 1:
        return reference.mhc_head(streams, fn, scale, base, eps, norm_eps)
    x, scale = streams.flatten(1).float(), scale.item()
    r = (torch.dot(x[0], x[0]).item() / x.shape[1] + norm_eps) ** -0.5
    pre = [_sigmoid(m * (r * scale) + b) + eps for m, b in zip(F.linear(x, fn)[0].tolist(), base.tolist())]
    return torch.mm(torch.tensor([pre]), streams[0].float()).to(streams.dtype)


def _sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x if x > FLOOR else -FLOOR))


mhc_pre.__doc__, mhc_post.__doc__, mhc_head.__doc__ = (
    reference.mhc_pre.__doc__,
    reference.mhc_post.__doc__,
    reference.mhc_head.__doc__,
)


def _row(m: list[float], base: list[float], i: int, s: float, eps: float):
    """Row of the comb matrix before Sinkhorn: softmax of four logits, plus eps."""
    x0, x1, x2, x3 = (
        m[i] * s + base[i],
        m[i + 1] * s + base[i + 1],
        m[i + 2] * s + base[i + 2],
        m[i + 3] * s + base[i + 3],
    )
    top = max(x0, x1, x2, x3)
    e0, e1, e2, e3 = exp(x0 - top), exp(x1 - top), exp(x2 - top), exp(x3 - top)
    total = e0 + e1 + e2 + e3
    return e0 / total + eps, e1 / total + eps, e2 / total + eps, e3 / total + eps


def _mix_token(m: list[float], scale: list[float], base: list[float], iters: int, e: float) -> list[float]:
    """pre, post and comb of one token as 4 + 4 + 16 floats; m before the factor r, which `scale` carries."""
    s0, s1, s2 = scale
    pre = [1 / (1 + exp(-x if (x := m[j] * s0 + base[j]) > FLOOR else -FLOOR)) + e for j in (0, 1, 2, 3)]
    post = [2 / (1 + exp(-x if (x := m[j] * s1 + base[j]) > FLOOR else -FLOOR)) for j in (4, 5, 6, 7)]
    k00, k01, k02, k03 = _row(m, base, 8, s2, e)
    k10, k11, k12, k13 = _row(m, base, 12, s2, e)
    k20, k21, k22, k23 = _row(m, base, 16, s2, e)
    k30, k31, k32, k33 = _row(m, base, 20, s2, e)
    a0 = a1 = a2 = a3 = 1.0
    b0, b1 = k00 + k10 + k20 + k30 + e, k01 + k11 + k21 + k31 + e
    b2, b3 = k02 + k12 + k22 + k32 + e, k03 + k13 + k23 + k33 + e
    for _ in range(iters - 1):
        v0, v1, v2, v3 = 1 / b0, 1 / b1, 1 / b2, 1 / b3
        a0 = k00 * v0 + k01 * v1 + k02 * v2 + k03 * v3 + e * a0
        a1 = k10 * v0 + k11 * v1 + k12 * v2 + k13 * v3 + e * a1
        a2 = k20 * v0 + k21 * v1 + k22 * v2 + k23 * v3 + e * a2
        a3 = k30 * v0 + k31 * v1 + k32 * v2 + k33 * v3 + e * a3
        u0, u1, u2, u3 = 1 / a0, 1 / a1, 1 / a2, 1 / a3
        b0 = k00 * u0 + k10 * u1 + k20 * u2 + k30 * u3 + e * b0
        b1 = k01 * u0 + k11 * u1 + k21 * u2 + k31 * u3 + e * b1
        b2 = k02 * u0 + k12 * u1 + k22 * u2 + k32 * u3 + e * b2
        b3 = k03 * u0 + k13 * u1 + k23 * u2 + k33 * u3 + e * b3
    u0, u1, u2, u3, v0, v1, v2, v3 = 1 / a0, 1 / a1, 1 / a2, 1 / a3, 1 / b0, 1 / b1, 1 / b2, 1 / b3
    return (
        pre
        + post
        + [
            k00 * u0 * v0,
            k01 * u0 * v1,
            k02 * u0 * v2,
            k03 * u0 * v3,
            k10 * u1 * v0,
            k11 * u1 * v1,
            k12 * u1 * v2,
            k13 * u1 * v3,
            k20 * u2 * v0,
            k21 * u2 * v1,
            k22 * u2 * v2,
            k23 * u2 * v3,
            k30 * u3 * v0,
            k31 * u3 * v1,
            k32 * u3 * v2,
            k33 * u3 * v3,
        ]
    )
