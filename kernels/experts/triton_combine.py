"""The sum over a token's experts, of rows that were computed pair by pair."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import dependent_launch, next_power
from dsv4.kernels.linear.triton_words import begin
from dsv4.kernels.quantize.triton_codes import narrow, widen

COLUMNS = 1024  # of a program, at most


class ExpertRows(NamedTuple):
    """What experts give each token, not yet added up: rows [N·k, d] of the pairs of a token and one of its experts
    indices int64 [N, k], of which those of expert −1 were not written; shared [N, d] of the shared expert, or None."""

    rows: torch.Tensor
    indices: torch.Tensor
    shared: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sum: [N, d]."""
        return self.indices.shape[0], self.rows.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.rows.dtype

    def combine(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum [N, d], taken in fp32 and cast once to dtype."""
        (N, d), device = self.shape, self.rows.device
        out = torch.empty(N, d, dtype=dtype, device=device)
        block, early = min(COLUMNS, next_power(d)), dependent_launch(device)
        combine_experts[(N, triton.cdiv(d, block))](
            *self, out, d, self.indices.shape[1], block, early, num_warps=4, launch_pdl=early
        )
        return out


@triton.jit
def combined(Y, INDICES, YS, token, column, valid, D: tl.constexpr, EACH: tl.constexpr):
    """Σ over a token's EACH rows of Y [P, D], one after the other in fp32, and its row of YS [N, D] unless None: fp32
    at columns `column`, where `valid`. A row whose expert in INDICES [N, EACH] is −1 was not written, and adds
    nothing. token: int64, one, as many as columns, or [T, 1] of a tile [T, columns] like `valid`."""
    total = tl.zeros(valid.shape, tl.float32)
    for slot in tl.static_range(EACH):
        pair = token * EACH + slot
        y = widen(
            tl.load(Y + pair * D + column, mask=valid, other=0.0)
        )  # whatever its expert: no load waits for another
        total += tl.where(tl.load(INDICES + pair) >= 0, y, 0.0)
    if YS is not None:
        total += widen(tl.load(YS + token * D + column, mask=valid, other=0.0))
    return total


@triton.jit
def combine_experts(Y, INDICES, YS, OUT, D: tl.constexpr, EACH: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr):
    """OUT [N, D] = `combined` of each token."""
    begin(EARLY)
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    total = combined(Y, INDICES, YS, token, i, i < D, D, EACH)
    tl.store(OUT + token * D + i, narrow(total, OUT.dtype.element_ty), mask=i < D)
