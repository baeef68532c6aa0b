"""Products of very many tokens in bf16: the weight is dequantised once, and cuBLAS multiplies.

From so many tokens on, writing a weight in bf16 and reading it again costs less than what cuBLAS is faster than
`triton_tiles`. E4M3 and E2M1 codes times powers of two are exact in bf16.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import dependent_launch, interpreting
from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.linear.triton_words import begin
from dsv4.kernels.quantize.triton_codes import decode_e2m1, decode_e4m3, decode_e8m0, narrow

TOKENS = 1024
COLUMNS, ROWS = 128, 16  # of a program


def takes(x: torch.Tensor, h: Held, out: torch.Tensor) -> bool:
    """Whether x [N, ·] meets this weight so."""
    exact = h.format == "bf16" or h.format in ("fp8", "mxfp4") and h.scale.dtype is torch.uint8
    whole = h.weight.dim() == 2 and not h.K % COLUMNS and not h.O % ROWS and not h.block[1] % 32
    many = x.shape[0] >= TOKENS and x.dtype is torch.bfloat16 and out.dtype is x.dtype
    return many and exact and whole and not interpreting()


def product(x: torch.Tensor, h: Held, out: torch.Tensor, groups: int = 1) -> None:
    """out [N, G·R] = x [N, G·K] · Wᵀ, group by group, of W [G·R, K]. Only if `takes`."""
    w, R = dequantised(h), h.O // groups
    flags = torch.backends.cuda.matmul
    before, flags.allow_bf16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction, False
    try:
        for g in range(groups):
            rows = slice(g * R, (g + 1) * R)
            torch.mm(x[:, g * h.K : (g + 1) * h.K], w[rows].t(), out=out[:, rows])
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


def dequantised(h: Held) -> torch.Tensor:
    """The weight in bf16 [O, K]."""
    if h.format == "bf16":
        return h.weight
    out = torch.empty(h.O, h.K, dtype=torch.bfloat16, device=h.weight.device)
    early = dependent_launch(out.device)
    _dequantise[(h.O // ROWS, h.K // COLUMNS)](
        h.weight.view(torch.uint8), h.scale, out, h.K, h.scale.shape[1], h.format, *h.block, ROWS, COLUMNS, early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out


@triton.jit
def _dequantise(
    W, S, OUT, K: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SCALES: of a row. MXFP4 has a scale for 32 columns of each row, FP8 one for each block [BO, BK]."""
    begin(EARLY)
    o = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    if FORMAT == "mxfp4":
        pair = tl.load(W + o * (K // 2) + tl.program_id(1) * (C // 2) + tl.arange(0, C // 2)[None, :])
        x = tl.interleave(decode_e2m1(pair & 15), decode_e2m1(pair >> 4))
        scale = tl.load(S + o * SCALES + c // 32)
    else:
        x, scale = decode_e4m3(tl.load(W + o * K + c)), tl.load(S + o // BO * SCALES + c // BK)
    tl.store(OUT + o * K + c, narrow(x * decode_e8m0(scale), tl.bfloat16))
