"""silu(gate) · up."""

import torch
import torch.nn.functional as F


def silu_mul(gate: torch.Tensor, up: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """silu(gate + b) · (up + c): gate, up [N, I], biases ([I], [I]) or None → [N, I] in gate.dtype; fp32 inside, one
    cast."""
    g, u = gate.float(), up.float()
    if biases is not None:
        g, u = g + biases[0], u + biases[1]
    return (F.silu(g) * u).to(gate.dtype)
