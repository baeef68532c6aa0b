"""SwiGLU experts in fp64, expert by expert, and honest kernels of other accuracy classes."""

import torch
import torch.nn.functional as F

from dsv4.kernels.experts.reference import clamped_swiglu
from dsv4.kernels.linear.contract import ACTIVATION_BLOCK
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.quantize.exact import simulated_fp8, values
from dsv4.kernels.quantize.weights import expert, to_float


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """min(g, limit) / (1 + exp(−min(g, limit))) · min(max(u, −limit), limit), fp64."""
    g = torch.where(gate > limit, limit, gate)
    return g / (1 + (-g).exp()) * torch.where(up.abs() > limit, torch.sign(up) * limit, up)


def exact_shared(x, w1, w3, w2, limit: float, simulate: bool) -> torch.Tensor:
    """fp64 [N, D]. simulate: inputs of both products rounded to E4M3 in blocks of 128."""
    rounded = (lambda t: simulated_fp8(t, ACTIVATION_BLOCK)) if simulate else (lambda t: t.double())
    x = rounded(x)
    h = gated(torch.einsum("nd,id->ni", x, values(w1)), torch.einsum("nd,id->ni", x, values(w3)), limit)
    return torch.einsum("ni,di->nd", rounded(h), values(w2))


def exact_experts(x, indices, routing, w13, w2, limit: float, simulate: bool) -> torch.Tensor:
    """fp64 [N, D]: the sum over all experts, each with the routing weight of every token, which is 0 where the token
    does not list it."""
    rounded = (lambda t: simulated_fp8(t, ACTIVATION_BLOCK)) if simulate else (lambda t: t.double())
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(w13.weight.shape[0]):
        mine = (indices == e).any(1)
        if not mine.any():
            continue
        size = torch.where(indices[mine] == e, routing[mine].double(), 0.0).sum(1, keepdim=True)
        both = torch.einsum("nd,id->ni", rounded(x[mine]), values(expert(w13, e)))
        I = both.shape[1] // 2
        h = size * gated(both[:, :I], both[:, I:], limit)
        out[mine] += torch.einsum("ni,di->nd", rounded(h), values(expert(w2, e)))
    return out


def kernel(x, indices, routing, w13, w2, limit: float, simulate: bool, after: bool = False) -> torch.Tensor:
    """An honest kernel: fp32 products, h and the results of w2 rounded to x's dtype, fp32 sums over the experts of a
    token. `after`: the routing weight multiplies the results of w2, as in the epilogue of a grouped product."""
    N, k = indices.shape
    each = torch.zeros(N, k, x.shape[1])
    rounded = (lambda t: simulated_fp8(t, ACTIVATION_BLOCK).float()) if simulate else (lambda t: t.float())
    for e in indices.unique().tolist():
        token, at = (indices == e).nonzero(as_tuple=True)
        gate, up = F.linear(rounded(x[token]), to_float(expert(w13, e))).chunk(2, -1)
        h, size = clamped_swiglu(gate, up, limit), routing[token, at].unsqueeze(1)
        h = (h if after else h * size).to(x.dtype)
        y = F.linear(rounded(h), to_float(expert(w2, e))).to(x.dtype).float()
        each[token, at] = y * size if after else y
    return each.sum(1)


def shared_kernel(x, w1, w3, w2, limit: float, simulate: bool) -> torch.Tensor:
    """An honest kernel: fp32 products, h and the result rounded to x's dtype."""
    rounded = (lambda t: simulated_fp8(t, ACTIVATION_BLOCK).float()) if simulate else (lambda t: t.float())
    gate, up = (F.linear(rounded(x), to_float(w)) for w in (w1, w3))
    return F.linear(rounded(clamped_swiglu(gate, up, limit).to(x.dtype)), to_float(w2)).to(x.dtype).float()


def shared_with_fp8(x, w1, w3, w2, limit: float, simulate: bool) -> torch.Tensor:
    """As `shared_kernel`, with activations rounded to E4M3 in blocks of 128 for every quantised weight."""
    return shared_kernel(x, w1, w3, w2, limit, w1.format is not WeightFormat.DENSE)


def weight_after_w2(x, indices, routing, w13, w2, limit: float, simulate: bool) -> torch.Tensor:
    """As `kernel`, with the routing weight in the epilogue of w2."""
    return kernel(x, indices, routing, w13, w2, limit, simulate, True)


def experts_with_fp8(x, indices, routing, w13: PackedWeight, w2, limit: float, simulate: bool) -> torch.Tensor:
    """As `kernel`, with activations rounded to E4M3 in blocks of 128 for every quantised weight."""
    return kernel(x, indices, routing, w13, w2, limit, w13.format is not WeightFormat.DENSE)
