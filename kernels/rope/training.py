"""Rotation out of place, differentiable: autograd keeps the rotated values. The backward pass rotates by the
conjugate."""

import torch
import triton
import triton.language as tl

ROWS = 32


def rotate(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Computes what the reference does, but returns a new tensor and does not change x. x [N, D] or [N, H, D]; cis [N,
    d/2] or [N, 1, d/2]."""
    if x.is_cuda:
        return _Rotate.apply(x, torch.view_as_real(cis), 1.0)
    half = cis.shape[-1]
    pairs = torch.view_as_complex(x[..., -2 * half :].float().unflatten(-1, (-1, 2)))
    return torch.cat((x[..., : -2 * half], torch.view_as_real(pairs * cis).flatten(-2).to(x.dtype)), -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cis, sign):
        x, cis = x.contiguous(), cis.contiguous()
        D, half = x.shape[-1], cis.shape[-2]
        M, y = x.numel() // D, torch.empty_like(x)
        _rotate[(triton.cdiv(M, ROWS),)](
            x,
            cis,
            y,
            M,
            x.numel() // D // (cis.numel() // (2 * half)),
            sign,
            D,
            2 * half,
            triton.next_power_of_2(D),
            ROWS,
            num_warps=4,
        )
        ctx.save_for_backward(cis)
        ctx.sign = sign
        return y

    @staticmethod
    def backward(ctx, grad):
        return _Rotate.apply(grad, ctx.saved_tensors[0], -ctx.sign), None, None


@triton.jit
def _rotate(X, CIS, Y, M, heads, sign, D: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    live = (row[:, None] < M) & (i[None, :] < D)
    turned = live & (i[None, :] >= D - TURNED)
    x = tl.load(X + row[:, None] * D + i[None, :], mask=live, other=0.0).to(tl.float32)
    cis = tl.load(CIS + (row // heads)[:, None] * TURNED + i[None, :] - (D - TURNED), mask=turned, other=0.0)
    # columns that are not rotated are rotated by 1 + 0i
    cis = tl.where(turned, cis, (i[None, :] % 2 == 0).to(tl.float32))
    # whole rows are loaded: every other element would be twice the traffic
    a, b = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    c, s = tl.split(tl.reshape(cis, [ROWS, BLOCK // 2, 2]))
    s *= sign
    y = tl.reshape(tl.join(a * c - b * s, a * s + b * c), [ROWS, BLOCK])
    tl.store(Y + row[:, None] * D + i[None, :], y.to(Y.dtype.element_ty), mask=live)
