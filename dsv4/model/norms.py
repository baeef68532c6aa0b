"""RMS normalisation with a weight."""

import torch

from dsv4.model.linear import parameter
from dsv4.model.module import Module


class RMSNorm(Module):
    """y = w · x · rsqrt(mean(x²) + eps), fp32 inside, one cast at the end."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, op):
        super().__init__()
        self.weight = parameter(dim, dtype=dtype)
        self.eps, self.op = eps, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] → same shape and dtype."""
        return self.op.rms_norm(x, self._parameters["weight"], self.eps)
