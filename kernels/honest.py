"""Arithmetic of right kernels on real hardware, for the accuracy classes of contracts."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STEP = 16  # columns that a tensor core adds at once
LONG = 1024  # columns
BITS = 24  # of a sum in fp32
FP8_STEP, FP8_BITS = 32, 14  # of FP8 tensor cores of Hopper


def tensor_core_sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ_k x[n, k] · w[o, k] as tensor cores add it in fp32: [N, K], [O, K] → fp32 [N, O].

    Products of 16 columns are added at once, and each new sum is cut to 24 bits, not rounded (Fasi et al. 2021,
    "Numerical behavior of NVIDIA tensor cores", doi:10.7717/peerj-cs.330). The order is the same on every processor.
    """
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for a, b in zip(x.double().split(STEP, 1), w.double().T.contiguous().split(STEP)):
        mantissa, exponent = torch.frexp(total.addmm_(a, b))
        total = torch.ldexp((mantissa * 2.0**BITS).trunc_(), exponent - BITS)
    return total.float()


def fp8_sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ_k x[…, n, k] · w[…, o, k] as FP8 tensor cores of Hopper add it: [..., N, K], [..., O, K] → fp32 [..., N, O].

    Products are added in steps of 32 columns, each summand cut to 14 bits below the largest of its step (DeepSeek-V3,
    arXiv 2412.19437, section 3.3.2).
    """
    total = torch.zeros(*x.shape[:-1], w.shape[-2], 1, dtype=torch.float64)
    for a, b in zip(x.double().split(FP8_STEP, -1), w.double().split(FP8_STEP, -1)):
        terms = torch.cat((total, a.unsqueeze(-2) * b.unsqueeze(-3)), -1)
        unit = torch.exp2(torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent.double() - FP8_BITS)
        total = ((terms / unit).trunc() * unit).sum(-1, keepdim=True)
    return total.squeeze(-1).float()


class OrderedSums(TorchDispatchMode):
    """Inside, torch adds fp32 in host memory in one order on every processor: terms one after another, those of
    products over more than 1,024 columns 16 at a time, which takes a tenth as long and errs a quarter as much.

    A library adds in as many sums as the processor has lanes, 16 or 64 of them. Where long sums cancel, 16 sums err by
    a sixteenth of what one sum errs, and sixteen times the error is what acceptance allows: by such a limit a right
    kernel that keeps one sum is refused on some processors. Products and what is added to them, sums and means.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        """Else torch imports its compiler at the first call, which takes 3 s, to keep it out of here."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        handler = ORDERED.get(func.overloadpacket)
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if handler is None or first is None or first.dtype is not torch.float32 or first.device.type != "cpu":
            return func(*args, **(kwargs or {}))
        return handler(*args, **(kwargs or {}))


def ordered_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 [..., M, K] · [..., K, N] → [..., M, N], summed as `OrderedSums` adds."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    if a.shape[-1] > LONG:
        for columns, rows in zip(a.split(STEP, -1), b.split(STEP, -2)):
            total += columns @ rows
    else:
        for column, row in zip(a.split(1, -1), b.split(1, -2)):
            total.addcmul_(column, row)
    return total


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Σ over the last axis of fp32 [..., K], as `OrderedSums` adds."""
    total = x.new_zeros(x.shape[:-1])
    for term in x.unbind(-1):
        total += term
    return total


def _added(c, a, b, *, beta=1, alpha=1):
    return beta * c + alpha * ordered_product(a, b)


def _sum(x, dim=None, keepdim=False, *, dtype=None):
    axes = [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim or range(x.ndim))]
    rest = [d for d in range(x.ndim) if d not in axes]
    total = ordered_sum(x.permute(*rest, *axes).flatten(len(rest)) if axes else x.unsqueeze(-1)).to(dtype or x.dtype)
    return total.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdim else total


def _mean(x, dim=None, keepdim=False, *, dtype=None):
    total = _sum(x, dim, keepdim, dtype=dtype)
    return total / (x.numel() // max(1, total.numel()))


ORDERED = {
    torch.ops.aten.mm: ordered_product,
    torch.ops.aten.bmm: ordered_product,
    torch.ops.aten.addmm: _added,
    torch.ops.aten.baddbmm: _added,
    torch.ops.aten.sum: _sum,
    torch.ops.aten.mean: _mean,
}
