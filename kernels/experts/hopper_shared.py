"""Device code of the shared expert's tiles in the launches of `hopper`: FP8 weights in blocks of 128 × 128.

A stage of the ring holds 128 rows of a block of columns. Its codes are operands as they lie in shared memory, so x has
its columns in order. A tile of the gate and up projection is 128 rows of either, whose stages alternate; one of the
down projection is 128 rows, so that a token alone keeps more multiprocessors busy. Sums of 128 columns are scaled and
added up in fp32, block after block: a token has the same bits in tiles of any number of tokens.

`beside` are arguments of `hopper.product`: (W1, W3, S1, S3, YS, N, base).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv4.kernels.experts.hopper_sums import BLOCK, GROUPS, ROWS
from dsv4.kernels.linear.hopper import scale_of


@gluon.jit
def shared_tiles(beside, T: gl.constexpr, O: gl.constexpr):
    """How many tiles of 128 of O rows there are, for all tokens."""
    return 0 if beside[0] is None else gl.cdiv(beside[5], T) * (O // ROWS)


@gluon.jit
def shared_place(beside, tile, T: gl.constexpr):
    """(first row, first token, tokens, first row of x) of a tile. Tiles of the same rows come one after another."""
    N, base = beside[5], beside[6]
    groups = gl.cdiv(N, T)
    token = tile % groups * T
    return tile // groups * ROWS, token, gl.minimum(N - token, T), base + token


@gluon.jit
def copy_block(beside, fp8, held, row, k, half: gl.constexpr, stage):
    """Start copying block of columns k of 128 rows, of W3 if half is 1."""
    bar = held.index(stage)
    mbarrier.expect(bar, ROWS * BLOCK)
    if half == 0:
        tma.async_copy_global_to_shared(beside[0], [row, k * BLOCK], bar, fp8.index(stage))
    else:
        tma.async_copy_global_to_shared(beside[1], [row, k * BLOCK], bar, fp8.index(stage))


@gluon.jit
def copy_blocks_ahead(beside, fp8, held, program, tiles, T: gl.constexpr, AHEAD: gl.constexpr, HALVES: gl.constexpr):
    """Start copying the first AHEAD stages of a program that begins with one of these tiles."""
    if program < tiles:
        row, token, count, x_row = shared_place(beside, program, T)
        for i in gl.static_range(AHEAD):
            copy_block(beside, fp8, held, row, i // HALVES, i % HALVES, i)


@gluon.jit
def shared_products(
    n, beside, row, memory, barriers, K: gl.constexpr, GATED: gl.constexpr, T: gl.constexpr, D: gl.constexpr
):
    """Sums fp32 [128, T] of a tile, twice if it is GATED; and the number of the next four stages. n: number of the
    first four."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = held.shape[0]
    RING: gl.constexpr = STAGES // GROUPS
    BLOCKS: gl.constexpr = K // BLOCK
    APART: gl.constexpr = 0 if GATED else 1  # blocks of columns between two stages
    STEP: gl.constexpr = APART + 1
    zeros = gl.zeros([ROWS, T], gl.float32, D)
    acc, more = zeros, zeros
    first = beside[2] + row // 128 * BLOCKS
    second = beside[3] + row // 128 * BLOCKS if GATED else first
    # Scales of a block are loaded while the block before it is multiplied, and not touched until it has been.
    of_first, of_second = gl.load(first), gl.load(second + APART)
    for k in range(0, BLOCKS, 2 * STEP):
        turn = n // RING & 1
        for pair in gl.static_range(2):
            stage = n % RING * GROUPS + 2 * pair
            x = tokens.index(stage).permute((1, 0))
            mbarrier.wait(held.index(stage), turn)
            mbarrier.wait(ready.index(stage), turn)
            part = warpgroup_mma(fp8.index(stage), x, zeros, use_acc=False, is_async=True)
            mbarrier.wait(held.index(stage + 1), turn)
            mbarrier.wait(ready.index(stage + 1), turn)
            x = tokens.index(stage + APART).permute((1, 0))
            rest = warpgroup_mma(fp8.index(stage + 1), x, zeros, use_acc=False, is_async=True)
            factor = factors.index(stage).slice(0, T, dim=1).load(D) * scale_of(of_first)
            factor_1 = factors.index(stage + APART).slice(0, T, dim=1).load(D) * scale_of(of_second)
            later = gl.minimum(k + (pair + 1) * STEP, BLOCKS - STEP)
            of_first, of_second = gl.load(first + later), gl.load(second + later + APART)
            part, rest = warpgroup_mma_wait(0, deps=[part, rest])
            acc += part * factor
            if GATED:
                more += rest * factor_1
            else:
                acc += rest * factor_1
        FREED: gl.constexpr = free.shape[0] // RING
        for i in gl.static_range(FREED):
            mbarrier.arrive(free.index(n % RING * FREED + i))
        n += 1
    return acc, more, n


@gluon.jit
def put_shared(y, first, count, OUT, row, O: gl.constexpr, T: gl.constexpr):
    """Rows of the tokens of OUT fp32 [N, O]: columns row … row + 128. They are stored as they lie in registers, 32
    bytes of a row at a time: on the way to another layout they would need shared memory that there is not."""
    n, t = gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout)), gl.arange(0, T, gl.SliceLayout(0, y.type.layout))
    at = OUT + ((first + t).to(gl.int64) * O)[None, :] + (row + n)[:, None]
    gl.store(at, y, mask=(t < count)[None, :])
