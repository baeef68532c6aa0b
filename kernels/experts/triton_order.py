"""Pairs (token, expert) in the order of their experts, in blocks of at most T pairs of one expert.

`order` int32 [P]: pair numbers (token · k + slot), those of an expert side by side and in their own order. `table`
int32 [1 + 3·BLOCKS]: how many entries of the following three lists are valid, then each block's expert (−1 for none),
its first place in `order`, and its number of pairs. Pairs whose expert is −1, of another rank, would come first in
`order`, are in no block, and their places hold anything.

While one program sorts, others may quantise the tokens, so that the products need not quantise them for each tile.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import dependent_launch, next_power
from dsv4.kernels.linear.reference import ACTIVATION_BLOCK
from dsv4.kernels.linear.triton_words import begin
from dsv4.kernels.quantize.triton import simulate_fp8_blocks
from dsv4.kernels.quantize.triton_codes import fp8_blocks, narrow, widen

FEW = 512  # pairs that one program sorts
TILE = 1024  # columns that another program quantises


def blocks_of(P: int, E: int, T: int) -> int:
    """The most blocks that P pairs of E experts can make."""
    return min(P, P // T + E) if P <= FEW else P // T + E


def sort_pairs(
    indices: torch.Tensor, E: int, T: int, x: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """indices int64 [N, k], contiguous → (order, table, and x [N, d] after FP8 in blocks of 128).

    One launch; two for many pairs and x.
    """
    P = indices.numel()
    blocks = blocks_of(P, E, T)
    order = torch.empty(P, dtype=torch.int32, device=indices.device)
    table = torch.empty(1 + 3 * blocks, dtype=torch.int32, device=indices.device)
    early = dependent_launch(indices.device)
    if P > FEW:
        _sort_many[(E,)](indices, order, table, P, blocks, E, T, 1024, early, num_warps=4, launch_pdl=early)
        return order, table, None if x is None else simulate_fp8_blocks(x, ACTIVATION_BLOCK)
    listed = torch.empty(P, dtype=torch.int32, device=indices.device)
    rounded = None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles, K = (0, 1) if x is None else (x.shape[0] * triton.cdiv(x.shape[1], TILE), x.shape[1])
    _sort_few[(1 + tiles,)](
        indices,
        order,
        table,
        listed,
        P,
        blocks,
        x,
        0 if x is None else x.stride(0),
        rounded,
        K,
        next_power(P),
        min(32, next_power(P)),
        T,
        TILE,
        ACTIVATION_BLOCK,
        early,
        num_warps=8 if P > 128 else 4,
        launch_pdl=early,
    )
    return order, table, rounded


@triton.jit(do_not_specialize=["P", "blocks"])
def _sort_few(
    INDICES,
    ORDER,
    TABLE,
    LIST,
    P,
    blocks,
    X,
    x_stride,
    ROUNDED,
    K: tl.constexpr,
    B: tl.constexpr,
    CHUNK: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    if tl.program_id(0) == 0:
        _sort(INDICES, ORDER, TABLE, LIST, P, blocks, B, CHUNK, T)
    elif X is not None:
        tile, TILES = tl.program_id(0) - 1, (K + TILE - 1) // TILE
        row, i = (tile // TILES).to(tl.int64), tile % TILES * TILE + tl.arange(0, TILE)
        x = widen(tl.load(X + row * x_stride + i, mask=i < K, other=0.0))
        y = tl.reshape(fp8_blocks(tl.reshape(x, [1, TILE]), TILE, 1, TILE, BLOCK), [TILE])
        tl.store(ROUNDED + row * K + i, narrow(y, ROUNDED.dtype.element_ty), mask=i < K)


@triton.jit
def _sort(INDICES, ORDER, TABLE, LIST, P, blocks, B: tl.constexpr, CHUNK: tl.constexpr, T: tl.constexpr):
    """All pairs against all, CHUNK at a time: a pair's place is the number of those before it. LIST int32 [P]: experts
    by place."""
    p = tl.arange(0, B)
    live = p < P
    key = _key(tl.load(INDICES + p, mask=live, other=0), p, B)
    place = tl.zeros([B], tl.int32)
    for start in range(0, P, CHUNK):
        q = start + tl.arange(0, CHUNK)
        other = tl.where(q < P, _key(tl.load(INDICES + q, mask=q < P, other=0), q, B), 2147483647)
        place += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
    tl.store(ORDER + place, p, mask=live)
    tl.store(LIST + place, key // B - 1, mask=live)
    tl.debug_barrier()  # other threads read the list than wrote it
    e = tl.load(LIST + p, mask=live, other=-2)
    before, after = (
        tl.load(LIST + p - 1, mask=live & (p > 0), other=-2),
        tl.load(LIST + p + 1, mask=p + 1 < P, other=-2),
    )
    opening = tl.associative_scan(tl.where(e != before, p, 0), 0, _larger)
    end = tl.associative_scan(tl.where(e != after, p + 1, B), 0, _smaller, reverse=True)
    head = live & (e >= 0) & ((p - opening) % T == 0)
    block = tl.cumsum(head.to(tl.int32), 0) - 1
    tl.store(TABLE, tl.sum(head.to(tl.int32), 0))
    tl.store(TABLE + 1 + block, e, mask=head)
    tl.store(TABLE + 1 + blocks + block, p, mask=head)
    tl.store(TABLE + 1 + 2 * blocks + block, tl.minimum(end - p, T), mask=head)


@triton.jit
def _key(e, p, B: tl.constexpr):
    """Orders pairs p < B by their experts e ≥ −1, and those of an expert by their number."""
    return (e.to(tl.int32) + 1) * B + p


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["P", "blocks"])
def _sort_many(INDICES, ORDER, TABLE, P, blocks, E, T: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """A program for each expert. Its blocks begin at ⌊pairs of lower experts / T⌋ + expert, which leaves room for all
    blocks, some of it empty."""
    begin(EARLY)
    e = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    equal, lower = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for start in range(0, P, CHUNK):
        found = tl.load(INDICES + start + i, mask=start + i < P, other=1 << 30).to(tl.int32)
        equal += (found == e).to(tl.int32)
        lower += (found < e).to(tl.int32)
    count, less = tl.sum(equal, 0), tl.sum(lower, 0)
    place = less
    for start in range(0, P, CHUNK):
        found = tl.load(INDICES + start + i, mask=start + i < P, other=1 << 30).to(tl.int32) == e
        at = place + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(ORDER + at, start + i, mask=found)
        place += tl.sum(found.to(tl.int32), 0)
    opening = tl.where(e == 0, 0, less // T + e)  # `less` has pairs of no expert, and no block is left unwritten
    end = tl.where(e == E - 1, blocks, (less + count) // T + e + 1)
    for start in range(opening, end, CHUNK):
        block = start + i
        first = (block - opening) * T
        tl.store(TABLE + 1 + block, tl.where(first < count, e, -1), mask=block < end)
        tl.store(TABLE + 1 + blocks + block, less + first, mask=block < end)
        tl.store(TABLE + 1 + 2 * blocks + block, tl.minimum(count - first, T), mask=block < end)
    if e == 0:
        tl.store(TABLE, blocks)
