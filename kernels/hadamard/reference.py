"""Hadamard transform."""

import torch

from dsv4.kernels.errors import UnsupportedInput

_MATRICES: dict[tuple[int, torch.device], torch.Tensor] = {}


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] · H_D · D^−0.5 in Sylvester's order, D a power of two; fp32 inside, result in x.dtype.

    It is its own inverse, and applied to queries and keys alike it leaves their products unchanged.
    """
    D = x.shape[-1]
    H = _MATRICES.get((D, x.device))
    if H is None:
        if D < 1 or D & (D - 1):
            raise UnsupportedInput(f"the Hadamard transform needs a power of two; found {D} dims")
        H = torch.ones(1, 1, device=x.device)
        while H.shape[0] < D:  # H_2n = [[H, H], [H, −H]]
            H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=x.device), H)
        H = _MATRICES[D, x.device] = H * D**-0.5
    return (x.float() @ H).to(x.dtype)
