"""A sum over ranks that is left to the kernel that reads it."""

from typing import NamedTuple

import torch

from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.kernels.experts.triton_combine import ExpertRows


class Unsummed(NamedTuple):
    """This rank's part [N, d] of a sum over ranks in dtype, which takes `exchange.sums`. One kernel exchanges it, on
    every rank the same one: `sum`, or a kernel that goes on with the sum."""

    part: torch.Tensor | ExpertRows
    dtype: torch.dtype
    exchange: OneShot

    def sum(self) -> torch.Tensor:
        """The sum [N, d]."""
        return self.exchange.sum(self.part, self.dtype)


def sum_now(x: torch.Tensor | Unsummed) -> torch.Tensor:
    """x, summed over ranks where it is not yet."""
    return x.sum() if isinstance(x, Unsummed) else x
