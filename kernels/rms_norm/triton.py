"""RMS norm on a GPU: one kernel, a row held in registers."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import e4m3_blocks, fp8_blocks, narrow, widen
from dsv4.kernels.rms_norm import reference

WIDEST = 65536  # columns of a row
TILE = 2048  # elements of a program that takes several rows
MANY = 4096  # rows from which a program takes several
CODED = 128  # columns of a scale of codes


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _normed(x, weight, eps, 0)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor | None, eps: float, block: int) -> torch.Tensor:
    """`simulate_fp8_blocks` of `rms_norm` in one launch; block: a power of two."""
    return _normed(x, weight, eps, block)


def rms_norm_codes(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_fp8` in blocks of 128, of x [N, D], D a multiple of 128: E4M3 codes uint8 [N, D], and scales fp32
    [D / 128, N], with adjacent columns, which are written."""
    return _normed(x, weight, eps, CODED, scales), scales


def _normed(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, block: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """block: columns of a scale of FP8 that the result is rounded to; 0: it is not. scales: gets those, and the result
    is codes."""
    require_device("rms_norm", x, weight)
    D = x.shape[-1]
    if D > WIDEST:
        raise UnsupportedInput(f"rms_norm: a row of {D} columns; the triton backend takes at most {WIDEST}")
    y = torch.empty(x.shape, dtype=x.dtype if scales is None else torch.uint8, device=x.device)
    if not x.numel():
        return y
    rows = rows_of(x)
    M, (R, B, warps) = rows.shape[0], row_tile(rows.shape[0], D)
    weight = weight if weight is None or weight.stride(0) == 1 else weight.contiguous()
    pdl = dependent_launch(x.device)
    _rms_norm[(triton.cdiv(M, R),)](
        rows,
        rows if weight is None else weight,
        y,
        scales,
        M,
        rows.stride(0),
        0 if scales is None else scales.stride(0),
        eps,
        D,
        weight is not None,
        R,
        max(B, block),
        pdl,
        block,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return y


rms_norm.__doc__ = reference.rms_norm.__doc__


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [M, D] with adjacent columns: a view if its strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def row_tile(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows of a program, columns padded to a power of two, warps). Few rows get a program each, so that more
    processors work."""
    B = next_power(columns)
    R = max(1, TILE // B) if rows >= MANY else 1
    return R, B, min(16, max(1, R * B // 512))


@triton.jit
def normed(x, eps, D: tl.constexpr):
    """Tile [R, B] of rows of D columns (zeros beyond) → x · rsqrt(mean(x²) + eps), not rounded."""
    # y = x32 * x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit(do_not_specialize=["M", "scales_stride"])
def _rms_norm(
    X,
    W,
    Y,
    SCALES,
    M,
    stride,
    scales_stride,
    eps,
    D: tl.constexpr,
    WEIGHED: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weights are loaded before the wait for the kernel that computes x."""
    row, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, B)
    live, weight = (row[:, None] < M) & (i[None, :] < D), 1.0
    if WEIGHED:
        weight = widen(tl.load(W + i, mask=i < D, other=0.0))[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = widen(tl.load(X + row[:, None] * stride + i[None, :], mask=live, other=0.0))
    # y = y * weight
    y = narrow(normed(x, eps, D) * weight, X.dtype.element_ty)
    if SCALES is not None:
        codes, scales = e4m3_blocks(tl.reshape(widen(y), [R, B // BLOCK, BLOCK]))
        block = tl.arange(0, B // BLOCK)[None, :]
        tl.store(SCALES + block * scales_stride + row[:, None], scales, mask=(row[:, None] < M) & (block < D // BLOCK))
        y = tl.reshape(codes, [R, B])
    elif BLOCK > 0:
        y = narrow(fp8_blocks(widen(y), D, R, B, BLOCK), Y.dtype.element_ty)
    tl.store(Y + row[:, None] * D + i[None, :], y, mask=live)
