"""Packed cache rows as bf16, for attention that reads each of them many times."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.cache_rows import PAGE
from dsv4.kernels.cache_rows.triton import load_fp8_rows
from dsv4.kernels.launch import capability, dependent_launch
from dsv4.kernels.linear.triton_words import begin
from dsv4.kernels.quantize.triton_codes import narrow

ROWS = 16  # of a program


def unpacked(data: torch.Tensor, D: int, rope: int, words: bool) -> torch.Tensor:
    """Pages of KV_FP8 uint8 [..., pages, page bytes] → rows bf16 [..., pages · 64, D], exactly; words: as in
    `load_fp8_rows`. Rows that were never written hold anything."""
    *batch, pages, _ = data.shape
    out = torch.empty(*batch, pages * PAGE, D, dtype=torch.bfloat16, device=data.device)
    runs, early = out.numel() // (pages * PAGE * D), dependent_launch(data.device)
    _unpack[(pages * PAGE // ROWS, runs)](
        data, data.stride(0) if batch else 0, out, data.stride(-2), D, rope, max(64, triton.next_power_of_2(D)), words,
        capability(data.device) >= (8, 9), ROWS, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


@triton.jit
def _unpack(
    DATA, run, OUT, PAGE_BYTES: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, DP: tl.constexpr,
    WORDS: tl.constexpr, HARDWARE: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    x = load_fp8_rows(DATA + tl.program_id(1).to(tl.int64) * run, row, PAGE_BYTES, D, ROPE, DP, WORDS, HARDWARE)
    d, before = tl.arange(0, DP)[None, :], tl.program_id(1).to(tl.int64) * (tl.num_programs(0) * R)
    tl.store(OUT + (before + row)[:, None] * D + d, narrow(x, tl.bfloat16), mask=d < D)
