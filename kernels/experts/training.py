"""Experts over many tokens, differentiable: tokens sorted by expert, one grouped product for all of them."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsv4.kernels.experts import reference
from dsv4.kernels.linear.reference import ACTIVATION_BLOCK
from dsv4.kernels.linear.training import linear
from dsv4.kernels.quantize.training import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import PackedWeight


def experts(x, indices, routing, w13: PackedWeight, w2: PackedWeight, limit: float, simulate: bool) -> torch.Tensor:
    N, k = indices.shape
    E = w13.weight.shape[0]
    chosen, order = torch.sort(indices.flatten(), stable=True)  # sorted place → (token, slot)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(N * k, device=x.device))
    # bincount would wait for the device
    ends = torch.searchsorted(chosen, torch.arange(E, device=x.device), right=True)
    rows = _Spread.apply(simulate_fp8_blocks(x, ACTIVATION_BLOCK) if simulate else x, order // k, place, k)
    h = _swiglu(_grouped(rows, w13.weight, ends), routing.flatten()[order], limit)
    if simulate:
        h = simulate_fp8_blocks(h, ACTIVATION_BLOCK)
    return _Gather.apply(_grouped(h, w2.weight, ends), order // k, place, k)


def shared_expert(
    x, w1: PackedWeight, w3: PackedWeight, w2: PackedWeight, limit: float, simulate: bool
) -> torch.Tensor:
    if simulate:
        x = simulate_fp8_blocks(x, ACTIVATION_BLOCK)
    y = torch.cat((linear(x, w1), linear(x, w3)), -1)
    h = _swiglu(y, None, limit)
    return linear(simulate_fp8_blocks(h, ACTIVATION_BLOCK) if simulate else h, w2)


experts.__doc__, shared_expert.__doc__ = reference.experts.__doc__, reference.shared_expert.__doc__


def _grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [M, K] sorted by expert, the rows of expert e ending at ends[e]; weight [E, O, K] → [M, O]."""
    weight = weight.to(rows.dtype)
    if rows.is_cuda and rows.dtype is torch.bfloat16:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends.int())
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, w) for part, w in zip(rows.split(counts), weight.unbind())])


class _Spread(torch.autograd.Function):
    """Rows of x at `token`; the backward pass sums a token's k rows instead of adding atomically."""

    @staticmethod
    def forward(ctx, x, token, place, k):
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).view(-1, ctx.k, grad.shape[1]).sum(1), None, None, None


class _Gather(torch.autograd.Function):
    """Sum of a token's k rows; the backward pass is a gather."""

    @staticmethod
    def forward(ctx, rows, token, place, k):
        ctx.save_for_backward(token)
        return rows.index_select(0, place).view(-1, k, rows.shape[1]).sum(1)

    @staticmethod
    def backward(ctx, grad):
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None, None


def _swiglu(y: torch.Tensor, weight: torch.Tensor | None, limit: float) -> torch.Tensor:
    """weight · silu(min(gate, limit)) · clamp(up, ±limit): y [M, 2I] (gate, then up), weight fp32 [M] or None → [M,
    I]."""
    if y.is_cuda:
        return _SwiGLU.apply(y, weight, limit)
    gate, up = y.float().chunk(2, -1)
    h = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return (h if weight is None else h * weight.unsqueeze(-1)).to(y.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weight, limit):
        y = y.contiguous()
        M, I2 = y.shape
        h = y.new_empty(M, I2 // 2)
        _swiglu_forward[(M,)](
            y,
            y if weight is None else weight,
            h,
            I2 // 2,
            limit,
            weight is not None,
            triton.next_power_of_2(I2 // 2),
            num_warps=2,
        )
        ctx.save_for_backward(y, weight)
        ctx.limit = limit
        return h

    @staticmethod
    def backward(ctx, grad):
        y, weight = ctx.saved_tensors
        dy, dw = torch.empty_like(y), None if weight is None else torch.empty_like(weight)
        I = y.shape[1] // 2
        _swiglu_back[(y.shape[0],)](
            y,
            y if weight is None else weight,
            grad.contiguous(),
            dy,
            dy if weight is None else dw,
            I,
            ctx.limit,
            weight is not None,
            triton.next_power_of_2(I),
            num_warps=2,
        )
        return dy, dw, None


@triton.jit
def _swiglu_forward(Y, WEIGHT, OUT, I, limit, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    r, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    g = tl.minimum(tl.load(Y + r * 2 * I + x, mask=x < I, other=0.0).to(tl.float32), limit)
    u = tl.load(Y + r * 2 * I + I + x, mask=x < I, other=0.0).to(tl.float32)
    h = g / (1 + tl.exp(-g)) * tl.minimum(tl.maximum(u, -limit), limit)
    if WEIGHED:
        h *= tl.load(WEIGHT + r)
    tl.store(OUT + r * I + x, h.to(OUT.dtype.element_ty), mask=x < I)


@triton.jit
def _swiglu_back(Y, WEIGHT, G, DY, DW, I, limit, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    r, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    raw = tl.load(Y + r * 2 * I + x, mask=x < I, other=0.0).to(tl.float32)
    up = tl.load(Y + r * 2 * I + I + x, mask=x < I, other=0.0).to(tl.float32)
    grad = tl.load(G + r * I + x, mask=x < I, other=0.0).to(tl.float32)
    g, u = tl.minimum(raw, limit), tl.minimum(tl.maximum(up, -limit), limit)
    s = 1 / (1 + tl.exp(-g))
    if WEIGHED:
        tl.store(DW + r, tl.sum(grad * g * s * u, 0))
        grad *= tl.load(WEIGHT + r)
    dg = tl.where(raw <= limit, grad * u * s * (1 + g * (1 - s)), 0.0)
    du = tl.where((up >= -limit) & (up <= limit), grad * g * s, 0.0)
    tl.store(DY + r * 2 * I + x, dg.to(DY.dtype.element_ty), mask=x < I)
    tl.store(DY + r * 2 * I + I + x, du.to(DY.dtype.element_ty), mask=x < I)
