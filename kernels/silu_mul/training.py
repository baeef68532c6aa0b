"""The gate of whole sequences, differentiable: nothing wider than the inputs is kept for the backward pass."""

import torch
import torch.nn.functional as F

from dsv4.kernels.silu_mul import reference


def silu_mul(gate: torch.Tensor, up: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    if biases is not None:
        gate, up = ((x + bias).to(x.dtype) for x, bias in zip((gate, up), biases))
    return F.silu(gate) * up


silu_mul.__doc__ = reference.silu_mul.__doc__
