"""Device code of FP8 products for Hopper: activations and weights as E4M3 codes on wgmma.

A warp copies tiles of both by TMA into a ring; two warpgroups multiply. Tensor cores keep 13 to 22 bits of a sum, so
sums of 128 columns (the block of the scales of activations) are scaled and added up in fp32; while one warpgroup does
that, the other multiplies. The warpgroups share a tile by its tokens, or, where there are few tokens, by its columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.quantize.triton_codes import decode_e8m0

COLUMNS = gl.constexpr(128)  # of a stage: one block of scales
WAVE = gl.constexpr(64)  # tokens of one wgmma


@gluon.jit(do_not_specialize=["N", "stride"])
def product(
    X,
    W,
    W1,
    OUT,
    OUT1,
    SCALES,
    S,
    S1,
    N,
    stride,
    O: gl.constexpr,
    O1: gl.constexpr,
    K: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    T: gl.constexpr,
):
    """OUT [N, O] = codes X [N, K] · SCALES [K / 128, N] times codes W [O, K] · S [O / 128, K / 128] transposed. OUT1
    [N, O1] likewise, of W1 and S1, unless O1 is 0. ROWS: each row has a scale beside, of S1 [O] in fp32.

    X, W and OUT are descriptors; their blocks are [tokens, 128], [rows, 128] and [64, rows]. rows divide 128. T: tokens
    of a tile. X's block may have fewer if N is no more: beyond them anything is multiplied, and nothing is written.
    stride: from one row of SCALES to the next; there are as many of a row as whole tiles have tokens, beyond N
    anything. SPLIT: the tokens of a tile are 64, and each warpgroup takes every other block of columns; otherwise they
    are 128 or 256. GROUP: blocks of rows of one weight that are visited with all tokens before the next ones, so that
    both stay in the L2 cache. STAGES: an even number if SPLIT.
    """
    R: gl.constexpr = W.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(X.dtype, [STAGES, T, COLUMNS], X.layout)
    w_ring = gl.allocate_shared_memory(W.dtype, [STAGES, R, COLUMNS], W.layout)
    out = gl.allocate_shared_memory(OUT.dtype, [1 if SPLIT else 2, WAVE, R], OUT.layout)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = gl.allocate_shared_memory(gl.float32, [1, WAVE, R] if SPLIT else [1, 1, 1], PARTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 if SPLIT else 2)
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
    rings, barriers, sizes, scaling = (x_ring, w_ring), (full, empty, summed), (N, stride), (SCALES, S, S1)
    # The tuples are written out: of one with a name, numbers known at compile time would become values.
    gl.warp_specialize(
        [
            (
                multiply,
                (0, (OUT, OUT1), rings, out, parts, barriers, scaling, sizes, O, O1, K, SPLIT, GROUP, STAGES, ROWS),
            ),
            (
                multiply,
                (1, (OUT, OUT1), rings, out, parts, barriers, scaling, sizes, O, O1, K, SPLIT, GROUP, STAGES, ROWS),
            ),
            (copy_tiles, ((X, W, W1), rings, barriers, N, O, O1, K, SPLIT, GROUP, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def place(tile, N, R: gl.constexpr, T: gl.constexpr, GROUP: gl.constexpr):
    """(first token, first row) of a tile; rows of the second weight follow those of the first."""
    tokens = gl.cdiv(N, T)
    group, within = tile // (GROUP * tokens), tile % (GROUP * tokens)
    return within // GROUP * T, (group * GROUP + within % GROUP) * R


@gluon.jit
def in_ring(number, block, BLOCKS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """(stage, turn) of a block of columns of the tile that is `number` of a program. Each of two warpgroups that take
    every other block has stages of its own: one that skipped turns of a stage could not tell them apart."""
    if SPLIT:
        which = block % 2
        n = number * ((BLOCKS + 1 - which) // 2) + block // 2
        stage, turn = n % (STAGES // 2) * 2 + which, n // (STAGES // 2)
    else:
        n = number * BLOCKS + block
        stage, turn = n % STAGES, n // STAGES
    return stage, turn


@gluon.jit
def copy_tiles(
    descriptors, rings, barriers, N, O: gl.constexpr, O1: gl.constexpr, K: gl.constexpr, SPLIT: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles of weights are copied before earlier kernels have ended, as far as the ring goes; those of activations are
    not."""
    X, W, W1 = descriptors
    x_ring, w_ring = rings
    full, empty, _ = barriers
    T: gl.constexpr = x_ring.shape[1]
    R: gl.constexpr = W.block_type.shape[0]
    BLOCKS: gl.constexpr = K // COLUMNS
    AHEAD: gl.constexpr = STAGES if STAGES < BLOCKS else BLOCKS  # of the first tile: block i is in stage i
    first, row = place(gl.program_id(0), N, R, T, GROUP)
    for i in gl.static_range(AHEAD):
        mbarrier.expect(full.index(i), X.block_type.nbytes + W.block_type.nbytes)
        copy_weight(W, W1, row, i * COLUMNS, full.index(i), w_ring.index(i), O, O1)
    gdc_wait()
    for i in gl.static_range(AHEAD):
        copy_tokens(X, first, i * COLUMNS, full.index(i), x_ring.index(i))
    number = 0
    for tile in range(gl.program_id(0), gl.cdiv(N, T) * ((O + O1) // R), gl.num_programs(0)):
        first, row = place(tile, N, R, T, GROUP)
        # Of a variable that is AHEAD before the loop and 0 after a turn, Triton 3.6.0 and 3.7.1 make AHEAD.
        for block in range(gl.where(number == 0, AHEAD, 0), BLOCKS):
            stage, turn = in_ring(number, block, BLOCKS, SPLIT, STAGES)
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            mbarrier.expect(ready, X.block_type.nbytes + W.block_type.nbytes)
            copy_weight(W, W1, row, block * COLUMNS, ready, w_ring.index(stage), O, O1)
            copy_tokens(X, first, block * COLUMNS, ready, x_ring.index(stage))
        number += 1


@gluon.jit
def copy_tokens(X, first, column, ready, buffer):
    """Rows that a tensor does not have would be filled with zeros, which takes as long as copying them."""
    COPIED: gl.constexpr = X.block_type.shape[0]
    if COPIED < buffer.shape[0]:
        buffer = buffer.slice(0, COPIED)
    tma.async_copy_global_to_shared(X, [first, column], ready, buffer)


@gluon.jit
def copy_weight(W, W1, row, column, ready, buffer, O: gl.constexpr, O1: gl.constexpr):
    if O1 > 0 and row >= O:
        tma.async_copy_global_to_shared(W1, [row - O, column], ready, buffer)
    else:
        tma.async_copy_global_to_shared(W, [row, column], ready, buffer)


@gluon.jit
def multiply(
    WHICH: gl.constexpr, outs, rings, out, parts, barriers, scaling, sizes, O: gl.constexpr, O1: gl.constexpr,
    K: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The tiles of this program, as far as they are those of warpgroup WHICH."""
    x_ring, w_ring = rings
    full, empty, summed = barriers
    SCALES, S, S1 = scaling
    N, stride = sizes
    T: gl.constexpr = x_ring.shape[1]
    R: gl.constexpr = w_ring.shape[1]
    WAVES: gl.constexpr = 1 if SPLIT else T // (2 * WAVE)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    BLOCKS: gl.constexpr = K // COLUMNS
    STEP: gl.constexpr = 2 if SPLIT else 1
    FIRST: gl.constexpr = WHICH if SPLIT else 0
    MINE: gl.constexpr = 0 if SPLIT else WHICH * WAVES * WAVE  # first token within the tile
    gdc_wait()
    number = 0
    for tile in range(gl.program_id(0), gl.cdiv(N, T) * ((O + O1) // R), gl.num_programs(0)):
        token, row = place(tile, N, R, T, GROUP)
        token += MINE
        scales = S + row // 128 * BLOCKS
        if O1 > 0:
            scales = gl.where(row < O, scales, S1 + (row - O) // 128 * BLOCKS)
        at = SCALES + token + gl.arange(0, WAVE, gl.SliceLayout(1, SUMS))
        acc = gl.zeros([WAVE, R], gl.float32, SUMS)
        acc1 = acc
        # Scales of a block are loaded while the block before it is multiplied, and not touched until it has been.
        first = FIRST if FIRST < BLOCKS else 0
        of_token, of_weight = gl.load(at + first * stride), gl.load(scales + first)
        of_token1 = gl.load(at + first * stride + WAVE) if WAVES == 2 else of_token
        for block in range(FIRST, BLOCKS, STEP):
            stage, turn = in_ring(number, block, BLOCKS, SPLIT, STAGES)
            mbarrier.wait(full.index(stage), turn & 1)
            x, w = x_ring.index(stage), w_ring.index(stage).permute([1, 0])
            zero = gl.zeros([WAVE, R], gl.float32, SUMS)
            part = warpgroup_mma(x.slice(MINE, WAVE), w, zero, use_acc=False, is_async=True)
            scale, later = scale_of(of_weight), gl.minimum(block + STEP, BLOCKS - 1)
            factor, factor1 = of_token * scale, of_token1 * scale
            of_token, of_weight = gl.load(at + later * stride), gl.load(scales + later)
            if WAVES == 2:
                of_token1 = gl.load(at + later * stride + WAVE)
            part = warpgroup_mma_wait(0, deps=[part])
            if WAVES == 1:
                mbarrier.arrive(empty.index(stage), count=1)
            acc += part * factor[:, None]
            if WAVES == 2:
                # Registers of the first products are taken again: others would be spilled.
                part = warpgroup_mma(x.slice(MINE + WAVE, WAVE), w, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(empty.index(stage), count=1)
                acc1 += part * factor1[:, None]
        if ROWS:
            of_row = gl.load(S1 + row + gl.arange(0, R, gl.SliceLayout(0, SUMS)))
            acc, acc1 = acc * of_row[None, :], acc1 * of_row[None, :]
        if SPLIT:  # the second warpgroup's part of the sums goes to the first by shared memory
            turn = number & 1
            if WHICH == 1:
                mbarrier.wait(summed.index(1), turn ^ 1)
                parts.index(0).store(acc)
                mbarrier.arrive(summed.index(0), count=1)
            else:
                mbarrier.wait(summed.index(0), turn)
                acc += parts.index(0).load(SUMS)
                mbarrier.arrive(summed.index(1), count=1)
                write(outs, out.index(0), acc, token, row, O, O1)
        else:
            write(outs, out.index(WHICH), acc, token, row, O, O1)
            if WAVES == 2:
                write(outs, out.index(WHICH), acc1, token + WAVE, row, O, O1)
        number += 1
    tma.store_wait(0)


@gluon.jit
def scale_of(scale):
    """A scale in fp32 or E8M0 → fp32."""
    if scale.dtype != gl.float32:
        scale = decode_e8m0(scale)
    return scale


@gluon.jit
def write(outs, buffer, sums, token, row, O: gl.constexpr, O1: gl.constexpr):
    """Rows beyond the last token are left out by the copy."""
    OUT, OUT1 = outs
    tma.store_wait(0)  # what was in the buffer
    buffer.store(sums.to(OUT.dtype))
    fence_async_shared()
    if O1 > 0 and row >= O:
        tma.async_copy_shared_to_global(OUT1, [token, row - O], buffer)
    else:
        tma.async_copy_shared_to_global(OUT, [token, row], buffer)
