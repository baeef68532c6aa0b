"""Hadamard transform."""

import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.tables import table


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] · H_D · D^−0.5 in Sylvester's order, D a power of two; fp32 inside, result in x.dtype.

    It is its own inverse, and applied to queries and keys alike it leaves their products unchanged.
    """
    return (x.float() @ _matrix(x.device, x.shape[-1])).to(x.dtype)


@table
def _matrix(device: torch.device, D: int) -> torch.Tensor:
    if D < 1 or D & (D - 1):
        raise UnsupportedInput(f"the Hadamard transform needs a power of two; found {D} dims")
    H = torch.ones(1, 1, device=device)
    while H.shape[0] < D:  # H_2n = [[H, H], [H, −H]]
        H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), H)
    return H * D**-0.5
