"""Rotation of whole sequences, out of place and differentiable: the rows that would be stored in a cache are passed to
attention directly."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.rotary_rows import reference
from dsv4.kernels.rotary_rows.triton import halves, put, turned

ROWS = 32


class Whole:
    """Replaces a layer's cache of keys or of values: the rows [B, T, KV, D] of whole sequences."""

    rows: torch.Tensor


def rotary_rows(q, k, v, biases, cis, keys: Whole, values: Whole, start) -> torch.Tensor:
    """Computes what the reference does, for sequences that begin at position 0: keys and values are left in `keys` and
    `values`. start: [B]."""
    B, (N, half) = start.shape[0], cis.shape
    if biases is not None:
        q, k, v = ((x + bias).to(x.dtype) for x, bias in zip((q, k, v), biases))
    q, k = (_turn(x.view(N, -1, 2 * half), cis) for x in (q, k))
    keys.rows, values.rows = k.view(B, N // B, -1, 2 * half), v.view(B, N // B, -1, 2 * half)
    return q.view(B, N // B, -1, 2 * half)


def _turn(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """x [N, heads, D] in its own dtype."""
    return _Turn.apply(x, torch.view_as_real(cis), 1.0) if x.is_cuda else reference.rotate_halves(x, cis).to(x.dtype)


class _Turn(torch.autograd.Function):
    """The backward pass rotates by the conjugate."""

    @staticmethod
    def forward(ctx, x, cis, sign):
        x, cis = x.contiguous(), cis.contiguous()
        (N, heads, D), y = x.shape, torch.empty_like(x)
        P = triton.next_power_of_2(D // 2)
        _turn_rows[(triton.cdiv(N * heads, ROWS),)](x, cis, y, N * heads, heads, sign, D, P, ROWS, num_warps=4)
        ctx.save_for_backward(cis)
        ctx.sign = sign
        return y

    @staticmethod
    def backward(ctx, grad):
        return _Turn.apply(grad, ctx.saved_tensors[0], -ctx.sign), None, None


@triton.jit
def _turn_rows(X, CIS, Y, M, heads, sign, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """R rows of M = N · heads."""
    row, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, P)
    live = (row[:, None] < M) & (i[None, :] < D // 2)
    a, b = halves(X, X, row, i, live, D, 0, D, False)
    # rotation by the conjugate is mirroring, rotating, mirroring back
    u, v = turned(a, b * sign, CIS, row // heads, i, live, D)
    put(Y, row, u, v * sign, i, live, D)
