"""RMS norm of many rows, differentiable: one kernel each way."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.rms_norm import reference

PROGRAMS = 528  # programs of the backward pass, each of which sums the weight's gradient over its rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _RMSNorm.apply(x, weight, eps) if x.is_cuda else reference.rms_norm(x, weight, eps)


rms_norm.__doc__ = reference.rms_norm.__doc__


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        D = x.shape[-1]
        M, y = x.numel() // D, torch.empty_like(x)
        rows, block = max(1, 2048 // triton.next_power_of_2(D)), triton.next_power_of_2(D)
        _forward[(triton.cdiv(M, rows),)](
            x, x if weight is None else weight, y, M, D, eps, weight is not None, rows, block, num_warps=4
        )
        ctx.save_for_backward(x, weight)
        ctx.shape = eps, M, D, rows, block
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        eps, M, D, rows, block = ctx.shape
        dx = torch.empty_like(x)
        part = torch.empty(PROGRAMS if weight is not None else 1, D, dtype=torch.float32, device=x.device)
        _backward[(PROGRAMS,)](
            x,
            x if weight is None else weight,
            grad.contiguous(),
            dx,
            part,
            M,
            D,
            eps,
            PROGRAMS,
            weight is not None,
            rows,
            block,
            num_warps=4,
        )
        return dx, None if weight is None else part.sum(0).to(weight.dtype), None


@triton.jit
def _forward(X, W, Y, M, D, eps, WEIGHED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, live = row[:, None] * D + i[None, :], (row[:, None] < M) & (i[None, :] < D)
    x = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if WEIGHED:
        y *= tl.load(W + i, mask=i < D, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=live)


@triton.jit
def _backward(X, W, G, DX, DW, M, D, eps, programs, WEIGHED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """With g = dy·w: dx = r·(g − x·r²·mean(g·x)); dw = Σ dy·x·r."""
    i = tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), programs):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at, live = row[:, None] * D + i[None, :], (row[:, None] < M) & (i[None, :] < D)
        x = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(G + at, mask=live, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        if WEIGHED:
            dw += tl.sum(g * x * r, 0)
            g *= tl.load(W + i, mask=i < D, other=0.0).to(tl.float32)[None, :]
        dx = r * (g - x * r * r * (tl.sum(g * x, 1) / D)[:, None])
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=live)
    if WEIGHED:
        tl.store(DW + tl.program_id(0) * D + i, dw, mask=i < D)
