"""Linear maps of GQA models: with biases, and several of one input in one call."""

import torch

from dsv4.loaders.cuts import Cut
from dsv4.model.linear import Linear, RMSNorm, Storage, parameter
from dsv4.model.module import fuses
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import Ranks


class Projection(Linear):
    """y = W x, or W x + b. cut: the rows or columns of W that this one of `ranks` holds. Who holds rows holds their
    part of b too. Who holds columns holds all of b, and b is added once, after the sum over ranks."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        storage: Storage,
        bias: torch.dtype | None,
        numerics: Numerics,
        op,
        cut: Cut,
        ranks: Ranks,
    ):
        super().__init__(out_features, in_features, storage, numerics, op, cut=cut)
        self.bias, self.ranks = None if bias is None else parameter(out_features, dtype=bias), ranks
        self.summed = self.cut is not None and self.cut.axis == 1
        if self.bias is not None and self.cut is not None and not self.summed:
            self.cuts = {**self.cuts, "bias": self.cut}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] → [N, out] in x.dtype. in, out: this rank's columns and rows of W; where columns are cut, the
        result is the sum over ranks, taken in fp32 before the cast."""
        bias = self._parameters.get("bias")
        y = self.ranks.sum(super().forward(x, exact=True)) if self.summed else super().forward(x)
        return (y if bias is None else y + bias).to(x.dtype)


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
