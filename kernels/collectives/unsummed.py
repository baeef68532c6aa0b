"""A sum over ranks, or over a token's experts, that is left to the kernel that reads it."""

from typing import NamedTuple

import torch

from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.kernels.experts.triton_combine import ExpertRows

MERGED = 64  # tokens up to which a kernel that merges a sublayer's result adds up its experts' rows


class Unsummed(NamedTuple):
    """This rank's part [N, d] of a sum over ranks in dtype, which takes `exchange.sums`. One kernel exchanges it, on
    every rank the same one: `sum`, or a kernel that goes on with the sum. exchange: None where there is one rank; part
    then is `ExpertRows`."""

    part: torch.Tensor | ExpertRows
    dtype: torch.dtype
    exchange: OneShot | None

    def sum(self) -> torch.Tensor:
        """The sum [N, d]."""
        if self.exchange is None:
            assert isinstance(self.part, ExpertRows), "one rank's numbers are their sum"
            return self.part.combine(self.dtype)
        return self.exchange.sum(self.part, self.dtype)

    def to(self, device: torch.device) -> torch.Tensor:
        """The sum, taken here, on another device."""
        return self.sum().to(device)


def sum_now(x: torch.Tensor | Unsummed) -> torch.Tensor:
    """x, summed where it is not yet."""
    return x.sum() if isinstance(x, Unsummed) else x
