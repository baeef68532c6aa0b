"""Random inputs of operations and compositions that have no contract, and of what their contracts leave out."""

from dataclasses import dataclass
from typing import Any

import torch

from dsv4.kernels.drawing import Draw

TOKENS = (1, 2, 9)  # implementations choose their way by such counts


@dataclass(frozen=True)
class Case:
    """One call. written: arguments that it changes in place, which are its results too.

    rule: 'sums' of numbers that both sides have alike; 'bits': equal ones; 'codes': rounded to FP8 or FP4 at the end,
    so that a value beside a boundary moves by a whole step; 'of codes': sums of such.
    """

    label: str
    arguments: list
    written: tuple[int, ...] = ()
    rule: str = "sums"


class Inputs(Draw):
    """Random inputs for N tokens of a model of that config; activations in `dtype`."""

    def __init__(self, config: Any, N: int, dtype: torch.dtype, seed: int):
        super().__init__(seed + N, dtype)
        self.config, self.N = config, N
        self.label = f"{N} tokens" + ("" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}")

    def turns(self) -> torch.Tensor:
        """Rotations complex64 [N, d/2] of the rotated dims."""
        return self.angles(self.config.qk_rope_head_dim // 2, self.N)
