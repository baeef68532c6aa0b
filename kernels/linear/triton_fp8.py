"""Products of many tokens on FP8 tensor cores: activations as the official quantisation rounds them, in E4M3 with a
scale a block of 128 columns, times FP8 weights in blocks of 128 × 128.

Both operands are E4M3 codes, so the products are those that `triton_tiles` takes of the same numbers in bf16, at up to
twice the rate. Two kernels do it: `hopper.product`, whose warps copy or multiply, and `_product`, which the compiler
pipelines; the interpreter runs only the latter. `linear` uses neither before they are timed (`scripts/tune_fp8.py`).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.kernels.descriptors import described
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import capability, dependent_launch, interpreting, processors
from dsv4.kernels.linear import hopper
from dsv4.kernels.linear.triton_tiles import swizzle
from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.linear.triton_words import launch_dependents, wait_for_dependencies
from dsv4.kernels.quantize.triton_codes import (
    INTERPRETED,
    decode_e4m3,
    decode_e8m0,
    e4m3_bytes,
    e4m3_exponent,
    magnitude,
    narrow,
    power_of_two,
    widen,
)

BLOCK = 128  # columns of a scale of activations, rows and columns of one of weights
ROWS_QUANTISED = 8  # blocks of a program that quantises
PIPELINED = 128, 128, 8, 4  # of `_product`: tokens, rows of the weight, warps, tiles of 128 columns loaded ahead
SHARED = 227 << 10  # bytes of shared memory a program may have on capability 9
MOST_STAGES = 16


class Tile(NamedTuple):
    """What a program of `hopper.product` computes at a time: tokens × rows of the weight. split: its two warpgroups
    take every other block of columns of 64 tokens, instead of half the tokens."""

    tokens: int
    rows: int
    split: bool

    def stages(self, out: torch.dtype) -> int:
        """Tiles of 128 columns that fit in shared memory, beside those of the result and the sums that pass between the
        warpgroups; as many for each warpgroup if split."""
        result = 64 * self.rows * (out.itemsize + 4 if self.split else 2 * out.itemsize)
        stages = min(MOST_STAGES, (SHARED - result - (1 << 10)) // ((self.tokens + self.rows) * BLOCK))
        return stages // 2 * 2 if self.split else stages


@cache
def tile_for(N: int, O: int, programs: int) -> Tile:
    """The tile whose rounds of programs take the least time, counted as the bytes that a program copies; a tile costs
    as much as 32 tokens or rows more."""
    tokens = (64,) if N <= 64 else (128,) if N <= 128 else (128, 256)
    tiles = [Tile(t, rows, t == 64) for t in tokens for rows in (128, 64, 32) if t < 256 or rows == 128]
    rounds = lambda tile: triton.cdiv(triton.cdiv(N, tile.tokens) * (O // tile.rows), programs)
    return min(tiles, key=lambda tile: rounds(tile) * (tile.tokens + tile.rows + 32))


def takes(h: Held, device: torch.device) -> bool:
    """Whether these kernels multiply with this weight, on that device."""
    whole = h.block == (BLOCK, BLOCK) and not h.K % BLOCK and not h.O % BLOCK and not h.weight.data_ptr() % 16
    return h.format == "fp8" and whole and h.weight.dim() == 2 and (interpreting() or capability(device)[0] == 9)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] → E4M3 codes uint8 [N, K] and the exponents of their scales int8 [K / 128, N]: x rounded is
    code · 2^exponent, as `simulate_fp8_blocks` has it."""
    N, K = x.shape
    codes = torch.empty(N, K, dtype=torch.uint8, device=x.device)
    exponents = torch.empty(K // BLOCK, N, dtype=torch.int8, device=x.device)
    dependent = dependent_launch(x.device)
    _quantise[(triton.cdiv(N * (K // BLOCK), ROWS_QUANTISED),)](
        x, x.stride(0), codes, exponents, N, K, ROWS_QUANTISED, dependent, num_warps=4, launch_pdl=dependent
    )
    return codes, exponents


@triton.jit(do_not_specialize=["N"])
def _quantise(X, x_stride, CODES, EXPONENTS, N, K: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr):
    launch_dependents(EARLY)
    pair, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, 128)
    row, block = pair // (K // 128), pair % (K // 128)
    live = row < N
    c = block[:, None] * 128 + i[None, :]
    wait_for_dependencies(EARLY)
    x = widen(tl.load(X + row[:, None] * x_stride + c, mask=live[:, None], other=0.0))
    exponent = e4m3_exponent(tl.max(magnitude(x), 1))
    codes = e4m3_bytes(x * power_of_two(-exponent)[:, None])
    tl.store(CODES + row[:, None] * K + c, codes, mask=live[:, None])
    tl.store(EXPONENTS + block * N + row, exponent.to(tl.int8), mask=live)


def product(codes: torch.Tensor, exponents: torch.Tensor, h: Held, out: torch.Tensor, tile: Tile | None = None) -> None:
    """out [N, O] = x · Wᵀ of x as `quantised` gives it. Raises UnsupportedInput unless `takes`."""
    _check(h, codes.device)
    N, device = codes.shape[0], codes.device
    tile = tile or tile_for(N, h.O, processors(device))
    blocks = h.O // tile.rows
    group = min(8, blocks & -blocks)
    x = described(codes.view(torch.float8_e4m3fn), tile.tokens, BLOCK)
    w, y = described(h.weight, tile.rows, BLOCK), described(out, 64, tile.rows)
    hopper.product[(min(triton.cdiv(N, tile.tokens) * blocks, processors(device)),)](
        x, w, y, exponents, h.scale, N, N, h.O, h.K, tile.split, group, tile.stages(out.dtype), num_warps=4,
        maxnreg=168, launch_pdl=dependent_launch(device),
    )  # fmt: skip


def _check(h: Held, device: torch.device) -> None:
    if not takes(h, device):
        raise UnsupportedInput(
            f"FP8 products take FP8 weights in blocks of 128 × 128 and whole blocks, on capability 9; this one is "
            f"{h.format} [{h.O}, {h.K}] in blocks of {h.block}"
        )


def pipelined_product(
    codes: torch.Tensor,
    exponents: torch.Tensor,
    h: Held,
    out: torch.Tensor,
    tile: tuple[int, int, int, int] = PIPELINED,
) -> None:
    """`product` by `_product`."""
    _check(h, codes.device)
    N, (tokens, rows, warps, ahead) = codes.shape[0], tile
    _product[(triton.cdiv(N, tokens) * (h.O // rows),)](
        codes, exponents, N, h.weight.view(torch.uint8), h.scale, out, h.O, h.K, tokens, rows, num_warps=warps,
        num_stages=ahead,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def _product(X, EXPONENTS, N, W, S, Y, O: tl.constexpr, K: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """R rows of the weight lie within one block of 128."""
    token_block, row_block = swizzle(tl.program_id(0), O // R, tl.cdiv(N, T), 8)
    t, o, i = token_block * T + tl.arange(0, T), row_block * R + tl.arange(0, R), tl.arange(0, 128)
    token = tl.minimum(t, N - 1)
    x_at, w_at = X + token.to(tl.int64)[:, None] * K + i[None, :], W + o.to(tl.int64)[:, None] * K + i[None, :]
    acc = tl.zeros([T, R], tl.float32)
    for block in range(K // 128):
        x, w = tl.load(x_at + block * 128), tl.load(w_at + block * 128)
        exponent = tl.load(EXPONENTS + block * N + token).to(tl.int32)
        scale = tl.load(S + (row_block * R // 128) * (K // 128) + block)
        if S.dtype.element_ty != tl.float32:
            scale = decode_e8m0(scale)
        if INTERPRETED:  # the interpreter has no product of FP8
            part = tl.dot(decode_e4m3(x), tl.trans(decode_e4m3(w)), input_precision="ieee")
        else:
            part = tl.dot(x.to(tl.float8e4nv, bitcast=True), tl.trans(w.to(tl.float8e4nv, bitcast=True)))
        acc += part * (power_of_two(exponent) * scale)[:, None]
    live = (t < N)[:, None]
    tl.store(Y + t.to(tl.int64)[:, None] * O + o[None, :], narrow(acc, Y.dtype.element_ty), mask=live)
