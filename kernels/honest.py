"""Arithmetic of right kernels on real hardware, for the accuracy classes of contracts."""

import torch

STEP = 16  # columns that a tensor core adds at once
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
