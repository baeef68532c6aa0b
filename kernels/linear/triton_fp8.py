"""Products of many tokens on FP8 tensor cores: activations as the official quantisation rounds them, in E4M3 with a
scale a block of 128 columns, times FP8 weights in blocks of 128 × 128.

Both operands are E4M3 codes, so the products are those that `triton_tiles` takes of the same numbers in bf16, at up to
twice the rate.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.kernels.descriptors import described
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import capability, dependent_launch, processors
from dsv4.kernels.linear import hopper
from dsv4.kernels.linear.hopper_weights import Unfit, largest_scales
from dsv4.kernels.linear.triton_weights import Held
from dsv4.kernels.linear.triton_words import begin, launch_dependents, wait_for_dependencies
from dsv4.kernels.quantize.coded import BLOCK, scales_of
from dsv4.kernels.quantize.triton_codes import decode_e2m1, e4m3_blocks, e4m3_bytes, power_of_two, widen
from dsv4.kernels.rms_norm.triton import rms_norm_codes

# Blocks of a program that quantises, and of one where there are at least MANY_BLOCKS (`scripts/tune_fp8.py` on an H200:
# 8,192 columns, 64 tokens 6.3 and 6.8 µs, 4,096 tokens 44.6 and 29.4).
ROWS_QUANTISED, ROWS_OF_MANY, MANY_BLOCKS = 8, 32, 1 << 14
SHARED = 227 << 10  # bytes of shared memory a program may have on capability 9
FP4_ROWS, FP4_COLUMNS = 16, 512  # of a program that recodes
MOST_STAGES = 16
FEWEST_PAIRS = 6  # stages of two blocks of columns, if they have so many
FEW = (16, 32)  # tokens that are copied, where there are no more
# Whether two weights share a launch (`scripts/tune_fp8.py` on an H200: 1024 and 512 rows of 4,096 columns, 16 tokens 22
# µs apart and 15 together; 2048 and 2048 25 and 16).
PAIRED = True


class Tile(NamedTuple):
    """What a program of `hopper.product` computes at a time: tokens × rows of the weight. split: its two warpgroups
    take every other block of columns of 64 tokens, instead of half of 128 or 256 tokens."""

    tokens: int
    rows: int
    split: bool

    def stages(self, out: torch.dtype, blocks: int) -> tuple[int, int]:
        """Stages of the ring, and blocks of columns of a stage, of `blocks` in all: what fits in shared memory beside
        the result and the sums that pass between the warpgroups; as many stages for each warpgroup if split."""
        result = 64 * self.rows * (out.itemsize + 4 if self.split else 2 * out.itemsize)
        fit = (SHARED - result - (1 << 10)) // ((self.tokens + self.rows) * BLOCK + self.tokens * 4)
        if self.split and not blocks % 2 and fit >= 2 * FEWEST_PAIRS:
            return min(MOST_STAGES, fit) // 4 * 2, 2
        return (fit // 2 * 2 if self.split else fit), 1


# Tiles, and the time of one beside the others' (`scripts/tune_fp8.py` on an H200: µs for 4096 columns, without the 6
# that any takes).
TIMES = {
    Tile(64, 32, True): 4.6,
    Tile(64, 64, True): 5.1,
    Tile(64, 128, True): 7.9,
    Tile(128, 128, False): 14.2,
    Tile(256, 128, False): 23.4,
}


@cache
def tile_for(N: int, O: int, programs: int) -> Tile:
    """The tile whose rounds of programs take the least time. The smallest reads the tokens most often: it is only for
    weights that no other tile divides among as many programs."""
    tiles = lambda tile: triton.cdiv(N, tile.tokens) * (O // tile.rows)
    return min(
        (tile for tile in TIMES if tile.rows > 32 or tiles(tile) <= programs),
        key=lambda tile: triton.cdiv(tiles(tile), programs) * TIMES[tile],
    )


def takes(h: Held, device: torch.device) -> bool:
    """Whether these kernels multiply with this weight, on that device."""
    return blocked(h) and capability(device)[0] == 9


def blocked(h: Held) -> bool:
    """Whether a weight is one FP8 matrix of whole blocks of 128 × 128, each with a scale, that can be copied."""
    return h.format == "fp8" and h.block == (BLOCK, BLOCK) and _whole(h)


def takes_fp4(h: Held, device: torch.device) -> bool:
    """Whether they do so with what `of_fp4` makes of this weight. The first call for a weight reads all of it, and
    waits for the result."""
    fits = h.format == "mxfp4" and _whole(h) and capability(device)[0] == 9
    return fits and not isinstance(largest_scales(h), Unfit)


def _whole(h: Held) -> bool:
    return not h.K % BLOCK and not h.O % BLOCK and not h.weight.data_ptr() % 16 and h.weight.dim() == 2


class Coded(NamedTuple):
    """E4M3 codes [O, K]; ones uint8 [O / 128, K / 128]: scales of blocks, which are 1; scale fp32 [O]: of each row."""

    codes: torch.Tensor
    ones: torch.Tensor
    scale: torch.Tensor


def of_fp4(h: Held) -> Coded:
    """An MXFP4 weight [O, K] exactly. Raises UnsupportedInput unless `takes_fp4`: E2M1 numbers under their scales are
    E4M3 numbers only where the scales of a row are near each other."""
    tops = largest_scales(h)
    if isinstance(tops, Unfit):
        raise UnsupportedInput(f"FP4 weights become E4M3 codes under one scale a row; {tops.reason}")
    device = h.weight.device
    codes = torch.empty(h.O, h.K, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(h.O, dtype=torch.float32, device=device)
    ones = torch.empty(h.O // BLOCK, h.K // BLOCK, dtype=torch.uint8, device=device)
    early = dependent_launch(device)
    _recode[(h.O // FP4_ROWS, h.K // FP4_COLUMNS)](
        h.weight.view(torch.uint8), h.scale, tops, codes.view(torch.uint8), scale, ones, h.K, FP4_ROWS, FP4_COLUMNS,
        early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return Coded(codes, ones, scale)


def quantised(x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K], normalised unless `norm` is None → E4M3 codes uint8 [N, K] and their scales fp32 [K / 128, N], as
    `scales_of`: x rounded is code · scale, as `simulate_fp8_blocks` has it."""
    if norm is not None:
        return rms_norm_codes(x, norm, eps, scales_of(x))
    N, K = x.shape
    codes = torch.empty(N, K, dtype=torch.uint8, device=x.device)
    scales, dependent, blocks = scales_of(x), dependent_launch(x.device), N * (K // BLOCK)
    rows = ROWS_OF_MANY if blocks >= MANY_BLOCKS else ROWS_QUANTISED
    _quantise[(triton.cdiv(blocks, rows),)](
        x,
        x.stride(0),
        codes,
        scales,
        scales.stride(0),
        N,
        K,
        rows,
        dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return codes, scales


@triton.jit
def _recode(
    W, S, TOPS, CODES, SCALES, ONES, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """R rows of C columns."""
    begin(EARLY)
    o, part = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    at = o.to(tl.int64)[:, None]
    pair = tl.load(W + at * (K // 2) + part * (C // 2) + tl.arange(0, C // 2)[None, :])
    scale = tl.load(S + at * (K // 32) + part * (C // 32) + tl.arange(0, C // 32)[None, :]).to(tl.int32)
    top = tl.load(TOPS + o).to(tl.int32) - 6  # 6 · 2^6 is below 448, the largest number
    # A group of zeros may have any scale.
    shift = power_of_two(tl.maximum(tl.minimum(scale - top[:, None], 6), -126))
    x = tl.reshape(tl.interleave(decode_e2m1(pair & 15), decode_e2m1(pair >> 4)), [R, C // 32, 32])
    codes = tl.reshape(e4m3_bytes(x * shift[:, :, None]), [R, C])
    tl.store(CODES + at * K + part * C + tl.arange(0, C)[None, :], codes)
    if part == 0:
        tl.store(SCALES + o, power_of_two(top - 127))
    if tl.program_id(0) % (128 // R) == 0:
        block = part * (C // 128) + tl.arange(0, C // 128)
        tl.store(ONES + tl.program_id(0) * R // 128 * (K // 128) + block, block * 0 + 127)


@triton.jit(do_not_specialize=["N", "stride"])
def _quantise(X, x_stride, CODES, SCALES, stride, N, K: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr):
    launch_dependents(EARLY)
    pair, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, 128)
    row, block = pair // (K // 128), pair % (K // 128)
    live = row < N
    c = block[:, None] * 128 + i[None, :]
    wait_for_dependencies(EARLY)
    x = widen(tl.load(X + row[:, None] * x_stride + c, mask=live[:, None], other=0.0))
    codes, scales = e4m3_blocks(x)
    tl.store(CODES + row[:, None] * K + c, codes, mask=live[:, None])
    tl.store(SCALES + block * stride + row, scales, mask=live)


def products(codes: torch.Tensor, scales: torch.Tensor, weights: Sequence[Held], outs: Sequence[torch.Tensor]) -> None:
    """outs[i] [N, O_i] = x · W_iᵀ of x as `quantised` gives it: if PAIRED, two weights a launch where they are alike.
    Raises UnsupportedInput unless `takes` or `takes_fp4`."""
    left = list(zip(weights, outs, strict=True))
    while left:
        h, out = left.pop(0)
        kind = lambda h, out: (h.format, h.scale.dtype, out.dtype)
        alike = lambda other: h.format == "fp8" and kind(*other) == kind(h, out)
        at = next((i for i, other in enumerate(left) if PAIRED and alike(other)), None)
        product(codes, scales, h, out, None, *([] if at is None else left.pop(at)))


def product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    h: Held,
    out: torch.Tensor,
    tile: Tile | None = None,
    h1: Held | None = None,
    out1: torch.Tensor | None = None,
) -> None:
    """out [N, O] = x · Wᵀ of x as `quantised` gives it, and out1 of a second weight whose scales and result have the
    dtypes of the first's. Raises UnsupportedInput unless `takes`, or of one weight `takes_fp4`."""
    both = (h,) if h1 is None else (h, h1)
    fp4 = h1 is None and takes_fp4(h, codes.device)
    for each in both if not fp4 else ():
        _check(each, codes.device)
    (N, K), device, O1 = codes.shape, codes.device, 0 if h1 is None else h1.O
    given, scale, scale1 = of_fp4(h) if fp4 else (h.weight, h.scale, both[-1].scale)
    tile = tile or tile_for(N, h.O + O1, processors(device))
    blocks = (h.O + O1) // tile.rows
    alike = (h.O | O1) // tile.rows
    group = min(8, alike & -alike)  # a group lies in one weight
    copied = next((n for n in FEW if N <= n < tile.tokens), tile.tokens)
    x, xs = described(codes.view(torch.float8_e4m3fn), copied, BLOCK), described(scales, 1, tile.tokens)
    ws = [described(w, tile.rows, BLOCK) for w in (given, *(each.weight for each in both[1:]))]
    ys = [described(y, 64, tile.rows) for y in ((out,) if out1 is None else (out, out1))]
    hopper.product[(min(triton.cdiv(N, tile.tokens) * blocks, processors(device)),)](
        x, xs, ws[0], ws[-1], ys[0], ys[-1], scale, scale1, N, h.O, O1, K,
        tile.split, group, *tile.stages(out.dtype, K // BLOCK), fp4, tile.tokens, num_warps=4, maxnreg=168,
        launch_pdl=dependent_launch(device),
    )  # fmt: skip


def _check(h: Held, device: torch.device) -> None:
    if not takes(h, device):
        raise UnsupportedInput(
            f"FP8 products take FP8 weights in blocks of 128 × 128 and whole blocks, on capability 9; this one is "
            f"{h.format} [{h.O}, {h.K}] in blocks of {h.block}"
        )
