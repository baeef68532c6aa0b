"""Rotation out of place, differentiable: autograd keeps what it rotated. The way back rotates by the conjugate."""

import torch
import triton
import triton.language as tl

ROWS = 32


def rotate(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """As the reference, but returns a new tensor and leaves x alone. x [N, D] or [N, H, D]; cis [N, d/2] or [N, 1, d/2]."""
    if x.is_cuda:
        return _Rotate.apply(x, torch.view_as_real(cis), 1.0)
    half = cis.shape[-1]
    pairs = torch.view_as_complex(x[..., -2 * half:].float().unflatten(-1, (-1, 2)))
    return torch.cat((x[..., :-2 * half], torch.view_as_real(pairs * cis).flatten(-2).to(x.dtype)), -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cis, sign):
        x, cis = x.contiguous(), cis.contiguous()
        D, half = x.shape[-1], cis.shape[-2]
        M, y = x.numel() // D, torch.empty_like(x)
        _rotate[(triton.cdiv(M, ROWS),)](x, cis, y, M, x.numel() // D // (cis.numel() // (2 * half)), sign, D // 2, half,
                                         triton.next_power_of_2(D // 2), ROWS, num_warps=4)
        ctx.save_for_backward(cis)
        ctx.sign = sign
        return y

    @staticmethod
    def backward(ctx, grad):
        return _Rotate.apply(grad, ctx.saved_tensors[0], -ctx.sign), None, None


@triton.jit
def _rotate(X, CIS, Y, M, heads, sign, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    live = (row[:, None] < M) & (i[None, :] < PAIRS)
    turned = live & (i[None, :] >= PAIRS - HALF)
    at = row[:, None] * PAIRS * 2 + 2 * i[None, :]
    angle = (row // heads)[:, None] * HALF * 2 + 2 * (i[None, :] - (PAIRS - HALF))
    a = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(X + at + 1, mask=live, other=0.0).to(tl.float32)
    c = tl.load(CIS + angle, mask=turned, other=1.0)
    s = tl.load(CIS + angle + 1, mask=turned, other=0.0) * sign
    tl.store(Y + at, (a * c - b * s).to(Y.dtype.element_ty), mask=live)
    tl.store(Y + at + 1, (a * s + b * c).to(Y.dtype.element_ty), mask=live)
