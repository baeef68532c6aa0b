"""The quantisation simulation on a GPU, bit for bit as the reference."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import next_power, require_device
from dsv4.kernels.quantize import reference
from dsv4.kernels.quantize.triton_codes import fp4_blocks, fp8_blocks, narrow, widen

WIDEST = 32768  # columns of a block
TILE = 1024  # elements of a program


def simulate_fp8_blocks(x: torch.Tensor, block: int, keep: int = 0) -> torch.Tensor:
    return _simulate("simulate_fp8_blocks", x, block, keep, False)


def simulate_fp4_blocks(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    return _simulate("simulate_fp4_blocks", x, block, 0, True)


simulate_fp8_blocks.__doc__, simulate_fp4_blocks.__doc__ = (
    reference.simulate_fp8_blocks.__doc__,
    reference.simulate_fp4_blocks.__doc__,
)


def _simulate(name: str, x: torch.Tensor, block: int, keep: int, fp4: bool) -> torch.Tensor:
    require_device(name, x)
    K = x.shape[-1]
    if not 1 <= block <= WIDEST:
        raise UnsupportedInput(f"{name}: blocks of {block} columns; the triton backend takes 1 to {WIDEST}")
    if not 0 <= keep <= K:
        raise UnsupportedInput(f"{name}: {keep} of {K} columns cannot be kept")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    rows = x.reshape(-1, K)
    B = next_power(block)
    R = max(1, TILE // B)
    rounded, kept = triton.cdiv(K - keep, block), triton.cdiv(keep, block)
    groups = rows.shape[0] * (rounded + kept)
    _blocks[(triton.cdiv(groups, R),)](
        rows,
        y,
        groups,
        *rows.stride(),
        K,
        keep,
        block,
        rounded,
        rounded + kept,
        fp4,
        R,
        B,
        num_warps=min(8, max(2, R * B // 1024)),
    )
    return y


@triton.jit(do_not_specialize=["groups"])
def _blocks(
    X,
    Y,
    groups,
    row_stride,
    column,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    TOTAL: tl.constexpr,
    FP4: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """A tile is R blocks. A row has TOTAL blocks: ROUNDED blocks of the columns to round, then the kept columns in
    blocks."""
    group, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, B)
    row, block = group // TOTAL, (group % TOTAL).to(tl.int32)
    keeps = block >= ROUNDED
    c = tl.where(keeps, K - KEEP + (block - ROUNDED) * BLOCK, block * BLOCK)[:, None] + i[None, :]
    live = (group < groups)[:, None] & (i[None, :] < BLOCK) & (c < tl.where(keeps, K, K - KEEP)[:, None])
    x = widen(tl.load(X + row[:, None] * row_stride + c * column, mask=live, other=0.0))
    if FP4:
        y = fp4_blocks(x, B, R, B, B)
    else:
        y = fp8_blocks(x, B, R, B, B)
    tl.store(Y + row[:, None] * K + c, narrow(tl.where(keeps[:, None], x, y), Y.dtype.element_ty), mask=live)
