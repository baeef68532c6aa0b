"""Device code of the shared expert's tiles in the launches of `hopper`: FP8 weights in blocks of 128 × 128.

A tile is 256 rows, as of MXFP4, of which each half of a block of columns fills a stage. Its codes are operands as they
lie in shared memory, so x has its columns in order. Sums of 128 columns are scaled and added up in fp32, block after
block: a token has the same bits in tiles of any number of tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv4.kernels.linear.hopper import scale_of

ROWS = gl.constexpr(128)  # of a stage
BLOCK = gl.constexpr(128)  # columns of a stage, and of a block of scales


@gluon.jit
def shared_tiles(beside, T: gl.constexpr, O: gl.constexpr):
    """How many tiles of 256 of O rows there are, for all tokens."""
    return 0 if beside[0] is None else gl.cdiv(beside[5], T) * (O // (2 * ROWS))


@gluon.jit
def shared_place(beside, tile, T: gl.constexpr, GATED: gl.constexpr):
    """(row of the first half, row of the second half in its weight, first token, tokens, first row of x) of a tile.
    Tiles of the same rows come one after another."""
    N, base = beside[5], beside[6]
    groups = gl.cdiv(N, T)
    row = tile // groups * (ROWS if GATED else 2 * ROWS)
    token = tile % groups * T
    return row, row if GATED else row + ROWS, token, gl.minimum(N - token, T), base + token


@gluon.jit
def copy_block(beside, blocks, held, row, other, k, half: gl.constexpr, stage):
    """Start copying one half of block of columns k of a tile."""
    bar = held.index(stage)
    mbarrier.expect(bar, ROWS * BLOCK)
    if half == 0:
        tma.async_copy_global_to_shared(beside[0], [row, k * BLOCK], bar, blocks.index(stage))
    else:
        tma.async_copy_global_to_shared(beside[1], [other, k * BLOCK], bar, blocks.index(stage))


@gluon.jit
def copy_blocks_ahead(beside, blocks, held, program, tiles, T: gl.constexpr, AHEAD: gl.constexpr, GATED: gl.constexpr):
    """Start copying the first AHEAD stages of a program that begins with one of these tiles."""
    if program < tiles:
        row, other, token, count, x_row = shared_place(beside, program, T, GATED)
        for i in gl.static_range(AHEAD):
            copy_block(beside, blocks, held, row, other, i // 2, i % 2, i)


@gluon.jit
def shared_products(i, beside, row, other, memory, barriers, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr):
    """Sums fp32 [128, T] of either half of a tile; and the number of the next stage. i: number of the first."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    BLOCKS: gl.constexpr = K // BLOCK
    zeros = gl.zeros([ROWS, T], gl.float32, D)
    acc, more = zeros, zeros
    first, second = beside[2] + row // 128 * BLOCKS, beside[3] + other // 128 * BLOCKS
    # Scales of a block are loaded while the block before it is multiplied, and not touched until it has been.
    of_first, of_second = gl.load(first), gl.load(second)
    for k in range(BLOCKS):
        stage, next_stage = i % STAGES, (i + 1) % STAGES
        x = tokens.index(stage).permute((1, 0))
        mbarrier.wait(held.index(stage), i // STAGES & 1)
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        part = warpgroup_mma(fp8.index(stage), x, zeros, use_acc=False, is_async=True)
        mbarrier.wait(held.index(next_stage), (i + 1) // STAGES & 1)
        mbarrier.wait(ready.index(next_stage), (i + 1) // STAGES & 1)
        rest = warpgroup_mma(fp8.index(next_stage), x, zeros, use_acc=False, is_async=True)
        factor = factors.index(stage).slice(0, T, dim=1).load(D)
        scale, scale_1, later = scale_of(of_first), scale_of(of_second), gl.minimum(k + 1, BLOCKS - 1)
        of_first, of_second = gl.load(first + later), gl.load(second + later)
        part, rest = warpgroup_mma_wait(0, deps=[part, rest])
        mbarrier.arrive(free.index(stage))
        mbarrier.arrive(free.index(next_stage))
        acc, more = acc + part * (factor * scale), more + rest * (factor * scale_1)
        i += 2
    return acc, more, i


@gluon.jit
def put_shared(y, first, count, OUT, row, O: gl.constexpr, T: gl.constexpr):
    """Rows of the tokens of OUT fp32 [N, O]: columns row … row + 128. They are stored as they lie in registers, 32
    bytes of a row at a time: on the way to another layout they would need shared memory that there is not."""
    n, t = gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout)), gl.arange(0, T, gl.SliceLayout(0, y.type.layout))
    at = OUT + ((first + t).to(gl.int64) * O)[None, :] + (row + n)[:, None]
    gl.store(at, y, mask=(t < count)[None, :])
