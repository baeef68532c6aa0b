"""What the products of `hopper` read of their tokens: E4M3 codes row by row in the order of experts, and their scales.

Rows of a block lie side by side. Blocks begin at multiples of four rows, because copies of scales begin at multiples of
16 bytes; rows between them hold anything.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.kernels.experts.triton_order import FEW, blocks_of, sort_pairs
from dsv4.kernels.launch import dependent_launch, next_power
from dsv4.kernels.linear.triton_words import begin
from dsv4.kernels.quantize.triton_codes import (
    e4m3_bytes,
    e4m3_exponent,
    magnitude,
    power_of_two,
    widen,
)

BLOCK = 128  # columns of a scale
APART = 4  # rows between the first rows of two blocks are a multiple of it
COLUMNS, HEIGHT = 512, 8  # columns and rows of a program that quantises, at most
CHUNK = 1024  # blocks that are listed at once
PAIRS = 16  # that all pairs are compared with at once


def rows_of(P: int, blocks: int) -> int:
    """Rows that P pairs in so many blocks need."""
    return (P + APART * blocks + APART - 1) // APART * APART


def place_of(column: torch.Tensor) -> torch.Tensor:
    """Places of columns 0 … 127 of a block of 128.

    An instruction multiplies 32 columns. Thread q of four has columns 4q … 4q + 3 and 16 + 4q … of each; it reads
    columns 32q … 32q + 31 of the weight, which are 16 bytes, and uses 8 of them in each of four instructions.
    """
    group, eight, half, i = column >> 5, column >> 3 & 3, column >> 2 & 1, column & 3
    return 32 * eight + 16 * half + 4 * group + i


class Arranged(NamedTuple):
    """order int32 [P] as of `triton_order`, or None where pairs are in order; and what `arrange` gives."""

    order: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor
    own: int


def sort_and_arrange(x: torch.Tensor, indices: torch.Tensor, E: int, T: int, beside: bool) -> Arranged:
    """Pairs of x [N, K] and experts int64 [N, k], 0 … E − 1 or −1, in blocks of T. One launch for up to FEW pairs."""
    (N, K), P = x.shape, indices.numel()
    if N == 1:
        return Arranged(None, *arrange(x, indices, None, None, T, beside))
    if P > FEW:
        order, table, _ = sort_pairs(indices, E, T)
        return Arranged(order, *arrange(x, indices, order, table, T, beside))
    blocks = blocks_of(P, E, T)
    codes, scales, listed, own = _empty(x, P, blocks, beside)
    order = torch.empty(P, dtype=torch.int32, device=x.device)
    early, columns, each = dependent_launch(x.device), COLUMNS if K % COLUMNS == 0 else BLOCK, indices.shape[1]
    _sort_and_arrange[(1 + N, K // columns)](
        x, x.stride(0), indices, order, listed, codes.view(torch.uint8), scales, P, own, blocks, len(codes), each, K, T,
        columns, next_power(P), next_power(E + 2), next_power(each), min(PAIRS, next_power(P)), beside, early,
        num_warps=8 if P > 128 else 4, launch_pdl=early,
    )  # fmt: skip
    return Arranged(order, codes, scales, listed, own)


def arrange(
    x: torch.Tensor,
    indices: torch.Tensor,
    order: torch.Tensor | None,
    table: torch.Tensor | None,
    T: int,
    beside: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """x [N, K], experts int64 [N, k] and what `sort_pairs` gives for blocks of T → (codes float8_e4m3fn [rows, K],
    scales fp32 [K / 128, rows], table int32 [1 + 4·BLOCKS], rows of the pairs). Without an order and a table each pair
    is a block.

    A pair's row of codes has its columns by `place_of`, and scales are those of `simulate_fp8_blocks`. `beside` them,
    all tokens follow in their order, with their columns in order, for an expert of every token. The table has no blocks
    of no expert between others. Beside what `triton_order` says of it, it lists the first row of each block.
    """
    (N, K), P, each = x.shape, indices.numel(), indices.shape[1]
    blocks = P if table is None else (table.numel() - 1) // 3
    codes, scales, listed, own = _empty(x, P, blocks, beside)
    height, early = min(HEIGHT, T), dependent_launch(x.device)
    columns = COLUMNS if K % COLUMNS == 0 else BLOCK
    programs = 1 + blocks * triton.cdiv(T, height) + (triton.cdiv(N, height) if beside else 0)
    _arrange[(programs, K // columns)](
        x, x.stride(0), indices, order, table, listed, codes.view(torch.uint8), scales, N, own, blocks, len(codes),
        each, K, T, height, columns, CHUNK, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return codes, scales, listed, own


def _empty(x: torch.Tensor, P: int, blocks: int, beside: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """What `arrange` gives, before it is written."""
    (N, K), own = x.shape, rows_of(P, blocks)
    rows = own + (triton.cdiv(N, APART) * APART if beside else 0)
    codes = torch.empty(rows, K, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(K // BLOCK, rows, dtype=torch.float32, device=x.device)
    return codes, scales, torch.empty(1 + 4 * blocks, dtype=torch.int32, device=x.device), own


@triton.jit(do_not_specialize=["P", "own", "blocks", "rows"])
def _sort_and_arrange(
    X, x_stride, INDICES, ORDER, LISTED, CODES, SCALES, P, own, blocks, rows, EACH: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, B: tl.constexpr, BINS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: one that lists, and those of each token, which count the pairs before theirs. Bin e + 1 is of expert
    e, and the last of no pair."""
    begin(EARLY)
    p, bin = tl.arange(0, B), tl.arange(0, BINS)
    of = tl.where(p < P, tl.load(INDICES + p, mask=p < P, other=0).to(tl.int32) + 1, BINS - 1)
    counts = tl.where(bin < BINS - 1, tl.histogram(of, BINS), 0)
    made = tl.where(bin > 0, (counts + T - 1) // T, 0)
    lower, blocks_before = tl.cumsum(counts, 0) - counts, tl.cumsum(made, 0) - made
    if tl.program_id(0) == 0:
        if tl.program_id(1) == 0:
            earlier = tl.zeros([B], tl.int32)
            for start in range(0, P, CHUNK):
                q = start + tl.arange(0, CHUNK)
                other = tl.load(INDICES + q, mask=q < P, other=-2).to(tl.int32) + 1
                earlier += tl.sum(((other[None, :] == of[:, None]) & (q[None, :] < p[:, None])).to(tl.int32), 1)
            place, block = tl.gather(lower, of, 0) + earlier, tl.gather(blocks_before, of, 0) + earlier // T
            tl.store(ORDER + place, p, mask=p < P)
            head, at = (p < P) & (of > 0) & (earlier % T == 0), LISTED + 1 + block
            tl.store(LISTED, tl.sum(made, 0))
            tl.store(at, of - 1, mask=head)
            tl.store(at + blocks, place, mask=head)
            tl.store(at + 2 * blocks, tl.minimum(tl.gather(counts, of, 0) - earlier, T), mask=head)
            tl.store(at + 3 * blocks, _row(place, block), mask=head)
    else:
        token = (tl.program_id(0) - 1).to(tl.int64)
        slot = tl.arange(0, SLOTS)
        pair = token.to(tl.int32) * EACH + slot
        mine = tl.load(INDICES + pair, mask=slot < EACH, other=-1).to(tl.int32) + 1
        earlier = tl.sum(((of[None, :] == mine[:, None]) & (p[None, :] < pair[:, None])).to(tl.int32), 1)
        here = bin[None, :] == mine[:, None]
        first = tl.sum(tl.where(here, lower[None, :], 0), 1) + earlier // T * T
        row = _row(first, tl.sum(tl.where(here, blocks_before[None, :], 0), 1) + earlier // T) + earlier % T
        c = tl.program_id(1) * C + tl.arange(0, C)
        x = tl.reshape(widen(tl.load(X + token * x_stride + c)), [C // 128, 128])
        exponent = e4m3_exponent(tl.max(magnitude(x), 1))
        codes, scale = e4m3_bytes(x * power_of_two(-exponent)[:, None]), power_of_two(exponent)
        at = tl.program_id(1) * (C // 128) + tl.arange(0, C // 128)
        if BESIDE:
            tl.store(CODES + (own + token) * K + c, tl.reshape(codes, [C]))
            tl.store(SCALES + at * rows + own + token, scale)
        codes = tl.reshape(tl.permute(tl.reshape(codes, [C // 128, 4, 8, 4]), (0, 2, 1, 3)), [C])
        row, live = tl.where(mine > 0, row, 0).to(tl.int64)[:, None], (mine > 0)[:, None]
        tl.store(CODES + row * K + c[None, :], tl.broadcast_to(codes[None, :], [SLOTS, C]), mask=live)
        tl.store(SCALES + at[None, :] * rows + row, tl.broadcast_to(scale[None, :], [SLOTS, C // 128]), mask=live)


@triton.jit(do_not_specialize=["N", "own", "blocks", "rows"])
def _arrange(
    X, x_stride, INDICES, ORDER, TABLE, LISTED, CODES, SCALES, N, own, blocks, rows, EACH: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: one that lists, those of R rows of a block, and those of R tokens beside the pairs."""
    begin(EARLY)
    found = blocks if TABLE is None else tl.load(TABLE)
    token = (tl.program_id(0) - 1 - blocks * (T // R)) * R
    if tl.program_id(0) == 0:
        if tl.program_id(1) == 0:
            _list(INDICES, TABLE, LISTED, found, blocks, CHUNK)
    elif token >= 0:
        n = token + tl.arange(0, R)
        at = X + n.to(tl.int64) * x_stride
        _quantise(at, CODES, SCALES, own + n, n < N, rows, K, R, C, False)
    else:
        tile = tl.program_id(0) - 1
        b, t = tile // (T // R), tile % (T // R) * R + tl.arange(0, R)
        if b < found:
            if TABLE is None:
                first, count = b, 1
            else:
                first, count = tl.load(TABLE + 1 + blocks + b), tl.load(TABLE + 1 + 2 * blocks + b)  # 0 of no expert
            if tile % (T // R) * R < count:
                if ORDER is None:
                    pair = tl.where(t < count, first + t, 0).to(tl.int64)
                else:
                    pair = tl.load(ORDER + first + t, mask=t < count, other=0).to(tl.int64)
                at = X + pair // EACH * x_stride
                _quantise(at, CODES, SCALES, _row(first, b) + t, t < count, rows, K, R, C, True)


@triton.jit
def _row(first, b):
    """First row of block b, whose pairs begin at place `first`."""
    return (first + 3) // 4 * 4 + 4 * b


@triton.jit
def _list(INDICES, TABLE, LISTED, found, blocks, CHUNK: tl.constexpr):
    total = 0
    for start in range(0, found, CHUNK):
        b = start + tl.arange(0, CHUNK)
        if TABLE is None:
            e = tl.load(INDICES + b, mask=b < found, other=-1).to(tl.int32)
            first, count = b, tl.full([CHUNK], 1, tl.int32)
        else:
            e = tl.load(TABLE + 1 + b, mask=b < found, other=-1)
            first = tl.load(TABLE + 1 + blocks + b, mask=b < found, other=0)
            count = tl.load(TABLE + 1 + 2 * blocks + b, mask=b < found, other=0)
        live = (e >= 0).to(tl.int32)
        at = LISTED + total + tl.cumsum(live, 0)
        tl.store(at, e, mask=e >= 0)
        tl.store(at + blocks, first, mask=e >= 0)
        tl.store(at + 2 * blocks, count, mask=e >= 0)
        tl.store(at + 3 * blocks, _row(first, b), mask=e >= 0)
        total += tl.sum(live, 0)
    tl.store(LISTED, total)


@triton.jit
def _quantise(
    X, CODES, SCALES, row, live, rows, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PLACED: tl.constexpr
):
    """C columns of the rows X [R] points to; by `place_of` if PLACED."""
    c = tl.program_id(1) * C + tl.arange(0, C)
    x = widen(tl.load(X[:, None] + c[None, :], mask=live[:, None], other=0.0))
    x = tl.reshape(x, [R, C // 128, 128])
    exponent = e4m3_exponent(tl.max(magnitude(x), 2))
    x *= power_of_two(-exponent)[:, :, None]
    codes = e4m3_bytes(x)
    if PLACED:
        codes = tl.permute(tl.reshape(codes, [R, C // 128, 4, 8, 4]), (0, 1, 3, 2, 4))
    tl.store(CODES + row.to(tl.int64)[:, None] * K + c[None, :], tl.reshape(codes, [R, C]), mask=live[:, None])
    block = tl.program_id(1) * (C // 128) + tl.arange(0, C // 128)
    tl.store(SCALES + block[None, :] * rows + row[:, None], power_of_two(exponent), mask=live[:, None])
