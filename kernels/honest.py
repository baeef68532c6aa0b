"""Arithmetic of right kernels on real hardware, for the accuracy classes of contracts."""

import torch

STEP = 16  # columns that a tensor core adds at once
BITS = 24  # of a sum in fp32


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
