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


@gluon.jit(do_not_specialize=["N"])
def product(
    X,
    XS,
    W,
    W1,
    OUT,
    OUT1,
    S,
    S1,
    N,
    O: gl.constexpr,
    O1: gl.constexpr,
    K: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    EACH: gl.constexpr,
    ROWS: gl.constexpr,
    T: gl.constexpr,
):
    """OUT [N, O] = codes X [N, K] · scales XS [K / 128, N] times codes W [O, K] · S [O / 128, K / 128] transposed. OUT1
    [N, O1] likewise, of W1 and S1, unless O1 is 0. ROWS: each row has a scale beside, of S1 [O] in fp32.

    X, XS, W and OUT are descriptors; their blocks are [tokens, 128], [1, T], [rows, 128] and [64, rows]. rows divide
    128. T: tokens of a tile. X's block may have fewer if N is no more: beyond them anything is multiplied, and nothing
    is written. SPLIT: the tokens of a tile are 64, and each warpgroup takes every other stage; otherwise they are 128
    or 256. GROUP: blocks of rows of one weight that are visited with all tokens before the next ones, so that both stay
    in the L2 cache. STAGES: an even number if SPLIT. EACH: blocks of columns of a stage, 1 or, if SPLIT and K / 128 is
    even, 2: a stage has two barriers, which take time to make and to wait for.
    """
    R: gl.constexpr = W.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(X.dtype, [STAGES * EACH, T, COLUMNS], X.layout)
    w_ring = gl.allocate_shared_memory(W.dtype, [STAGES * EACH, R, COLUMNS], W.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * EACH, 1, T], XS.layout)
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
    rings, barriers, scales = (x_ring, w_ring, factors), (full, empty, summed), (S, S1)
    # The tuples are written out: of one with a name, numbers known at compile time would become values.
    gl.warp_specialize(
        [
            (
                multiply,
                (0, (OUT, OUT1), rings, out, parts, barriers, scales, N, O, O1, K, SPLIT, GROUP, STAGES, EACH, ROWS),
            ),
            (
                multiply,
                (1, (OUT, OUT1), rings, out, parts, barriers, scales, N, O, O1, K, SPLIT, GROUP, STAGES, EACH, ROWS),
            ),
            (copy_tiles, ((X, XS, W, W1), rings, barriers, N, O, O1, K, SPLIT, GROUP, STAGES, EACH, ROWS)),
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
def in_ring(number, part, PARTS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """(stage, turn) of a stage's part of the columns of the tile that is `number` of a program. Each of two warpgroups
    that take every other part has stages of its own: one that skipped turns of a stage could not tell them apart."""
    if SPLIT:
        which = part % 2
        n = number * ((PARTS + 1 - which) // 2) + part // 2
        stage, turn = n % (STAGES // 2) * 2 + which, n // (STAGES // 2)
    else:
        n = number * PARTS + part
        stage, turn = n % STAGES, n // STAGES
    return stage, turn


@gluon.jit
def copy_tiles(
    descriptors, rings, barriers, N, O: gl.constexpr, O1: gl.constexpr, K: gl.constexpr, SPLIT: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Tiles of weights are copied before earlier kernels have ended, as far as the ring goes; those of activations are
    not, nor those of weights whose ROWS have scales, which the kernel before makes."""
    X, XS, W, W1 = descriptors
    full, empty, _ = barriers
    T: gl.constexpr = rings[0].shape[1]
    R: gl.constexpr = W.block_type.shape[0]
    PARTS: gl.constexpr = K // (COLUMNS * EACH)
    AHEAD: gl.constexpr = STAGES if STAGES < PARTS else PARTS  # of the first tile: part i is in stage i
    first, row = place(gl.program_id(0), N, R, T, GROUP)
    if ROWS:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        copy_weight(W, W1, row, i, full.index(i), rings, i, O, O1, X.block_type.nbytes + XS.block_type.nbytes, EACH)
    gdc_wait()
    for i in gl.static_range(AHEAD):
        copy_tokens(X, XS, first, i, full.index(i), rings, i, EACH)
    number = 0
    for tile in range(gl.program_id(0), gl.cdiv(N, T) * ((O + O1) // R), gl.num_programs(0)):
        first, row = place(tile, N, R, T, GROUP)
        # Of a variable that is AHEAD before the loop and 0 after a turn, Triton 3.6.0 and 3.7.1 make AHEAD.
        for part in range(gl.where(number == 0, AHEAD, 0), PARTS):
            stage, turn = in_ring(number, part, PARTS, SPLIT, STAGES)
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            copy_weight(W, W1, row, part, ready, rings, stage, O, O1, X.block_type.nbytes + XS.block_type.nbytes, EACH)
            copy_tokens(X, XS, first, part, ready, rings, stage, EACH)
        number += 1


@gluon.jit
def copy_tokens(X, XS, first, part, ready, rings, stage, EACH: gl.constexpr):
    """Rows that a tensor does not have would be filled with zeros, which takes as long as copying them."""
    COPIED: gl.constexpr = X.block_type.shape[0]
    for i in gl.static_range(EACH):
        buffer, block = rings[0].index(stage * EACH + i), part * EACH + i
        if COPIED < buffer.shape[0]:
            buffer = buffer.slice(0, COPIED)
        tma.async_copy_global_to_shared(X, [first, block * COLUMNS], ready, buffer)
        tma.async_copy_global_to_shared(XS, [block, first], ready, rings[2].index(stage * EACH + i))


@gluon.jit
def copy_weight(
    W, W1, row, part, ready, rings, stage, O: gl.constexpr, O1: gl.constexpr, BESIDE: gl.constexpr, EACH: gl.constexpr
):  # fmt: skip
    """And say how much a stage waits for. BESIDE: bytes of a block of activations."""
    mbarrier.expect(ready, EACH * (W.block_type.nbytes + BESIDE))
    for i in gl.static_range(EACH):
        buffer, column = rings[1].index(stage * EACH + i), (part * EACH + i) * COLUMNS
        if O1 > 0 and row >= O:
            tma.async_copy_global_to_shared(W1, [row - O, column], ready, buffer)
        else:
            tma.async_copy_global_to_shared(W, [row, column], ready, buffer)


@gluon.jit
def multiply(
    WHICH: gl.constexpr, outs, rings, out, parts, barriers, scales, N, O: gl.constexpr, O1: gl.constexpr,
    K: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """The tiles of this program, as far as they are those of warpgroup WHICH."""
    x_ring, w_ring, factors = rings
    full, empty, summed = barriers
    S, S1 = scales
    T: gl.constexpr = x_ring.shape[1]
    R: gl.constexpr = w_ring.shape[1]
    WAVES: gl.constexpr = 1 if SPLIT else T // (2 * WAVE)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    BLOCKS: gl.constexpr = K // COLUMNS
    PARTS: gl.constexpr = BLOCKS // EACH
    STEP: gl.constexpr = 2 if SPLIT else 1
    FIRST: gl.constexpr = WHICH if SPLIT else 0
    MINE: gl.constexpr = 0 if SPLIT else WHICH * WAVES * WAVE  # first token within the tile
    if ROWS:
        gdc_wait()  # else only scales of weights are read but what has been copied
    number = 0
    for tile in range(gl.program_id(0), gl.cdiv(N, T) * ((O + O1) // R), gl.num_programs(0)):
        token, row = place(tile, N, R, T, GROUP)
        token += MINE
        of_weight = S + row // 128 * BLOCKS
        if O1 > 0:
            of_weight = gl.where(row < O, of_weight, S1 + (row - O) // 128 * BLOCKS)
        acc = gl.zeros([WAVE, R], gl.float32, SUMS)
        acc1 = acc
        # Scales of weights are loaded while the stage before is multiplied, and not touched until it has been.
        scale, scale1 = next_scales(of_weight, FIRST, PARTS, EACH)
        for part in range(FIRST, PARTS, STEP):
            stage, turn = in_ring(number, part, PARTS, SPLIT, STAGES)
            mbarrier.wait(full.index(stage), turn & 1)
            at = stage * EACH
            x, w, factor = x_ring.index(at), w_ring.index(at).permute([1, 0]), factors.index(at)
            zero = gl.zeros([WAVE, R], gl.float32, SUMS)
            sums = warpgroup_mma(x.slice(MINE, WAVE), w, zero, use_acc=False, is_async=True)
            if EACH == 2:
                x1, w1 = x_ring.index(at + 1), w_ring.index(at + 1).permute([1, 0])
                sums1 = warpgroup_mma(x1.slice(MINE, WAVE), w1, zero, use_acc=False, is_async=True)
            by, by1 = scale_of(scale), scale_of(scale1)
            scale, scale1 = next_scales(of_weight, part + STEP, PARTS, EACH)
            of_token = factor.slice(MINE, WAVE, dim=1).permute([1, 0]).load(SUMS) * by
            if EACH == 2:
                of_token1 = factors.index(at + 1).slice(MINE, WAVE, dim=1).permute([1, 0]).load(SUMS) * by1
                sums = warpgroup_mma_wait(1, deps=[sums])
                acc += sums * of_token
                sums1 = warpgroup_mma_wait(0, deps=[sums1])
                mbarrier.arrive(empty.index(stage), count=1)
                acc += sums1 * of_token1
            elif WAVES == 1:
                sums = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(empty.index(stage), count=1)
                acc += sums * of_token
            else:
                of_token1 = factor.slice(MINE + WAVE, WAVE, dim=1).permute([1, 0]).load(SUMS) * by
                sums = warpgroup_mma_wait(0, deps=[sums])
                acc += sums * of_token
                # Registers of the first products are taken again: others would be spilled.
                sums = warpgroup_mma(x.slice(MINE + WAVE, WAVE), w, sums, use_acc=False, is_async=True)
                sums = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(empty.index(stage), count=1)
                acc1 += sums * of_token1
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
def next_scales(of_weight, part, PARTS: gl.constexpr, EACH: gl.constexpr):
    """Scales of the weight's blocks of a part; of the last part again where there is none."""
    at = of_weight + gl.minimum(part, PARTS - 1) * EACH
    return gl.load(at), gl.load(at + (EACH - 1))


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
