"""Linear maps of GQA models: with biases, and several of one input in one call."""

import torch

from dsv4.model.linear import Linear, RMSNorm, Storage, parameter
from dsv4.model.module import fuses
from dsv4.model.numerics import Numerics


class Projection(Linear):
    """y = W x, or W x + b."""

    def __init__(
        self, out_features: int, in_features: int, storage: Storage, bias: torch.dtype | None, numerics: Numerics, op
    ):
        super().__init__(out_features, in_features, storage, numerics, op)
        self.bias = None if bias is None else parameter(out_features, dtype=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] → [N, out] in x.dtype."""
        y, bias = super().forward(x), self._parameters.get("bias")
        return y if bias is None else (y + bias).to(y.dtype)


def maps(
    op, x: torch.Tensor, norm: RMSNorm, *modules: Projection
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...] | None]:
    """Projections of norm(x), x [N, d], and the biases that must still be added to them (None: none)."""
    if not fuses(op, "linears", norm, *modules):
        y = norm(x)
        return tuple(m(y) for m in modules), None
    packed = tuple(m.packed() for m in modules)
    found = op.linears(x, norm.weight, norm.eps, packed, (False,) * len(modules), (None,) * len(modules))
    return found, None if modules[0].bias is None else tuple(m.bias for m in modules)
