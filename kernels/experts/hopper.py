"""Device code of MXFP4 experts on Hopper's FP8 tensor cores, for activations in E4M3 (official numerics).

A product is W · xᵀ: a tile is 256 rows of an expert's weight times at most T tokens. Both operands are E4M3 codes, so
products are exact. Those of the weight are made in registers (`hopper_codes`); those of x come through shared memory. A
scale of x is that of 128 columns, so sums of 128 columns are scaled and added up in fp32. Tensor cores keep some 13
to 22 bits of a sum.

One warp copies ahead, through a ring of stages of 128 columns. Two warpgroups multiply: each has 64 rows of either half
of a tile. In the gate and up projection the halves are gate and up rows of the same 128 channels. More than 64 tokens
are two groups, of which each half's codes are made once.

The shared expert's tiles, of FP8 weights, come before those of the routed ones (`hopper_shared`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.experts.hopper_codes import LINES, lanes_tables
from dsv4.kernels.experts.hopper_results import gate, put, restored, turned
from dsv4.kernels.experts.hopper_shared import (
    copy_block,
    copy_blocks_ahead,
    put_shared,
    shared_place,
    shared_products,
    shared_tiles,
)
from dsv4.kernels.experts.hopper_sums import BLOCK, GROUPS, MOST, ROWS, products, products_of_many, products_of_two
from dsv4.kernels.experts.triton_decode import after

WORDS = gl.constexpr(16)  # of the weight's codes in a row of a stage


@gluon.jit
def block_of(TABLE, blocks, b):
    """(expert, first place in the order, pairs, first row of x) of block b. `TABLE` may be read while an earlier kernel
    runs, so not from an L1 cache."""
    at = TABLE + 1 + b
    e, first = gl.load(at, cache_modifier=".cg"), gl.load(at + blocks, cache_modifier=".cg")
    return e, first, gl.load(at + 2 * blocks, cache_modifier=".cg"), gl.load(at + 3 * blocks, cache_modifier=".cg")


@gluon.jit
def copy_weights(W, S, codes, scales, ready, row, apart, k, stage, group):
    """Start copying the codes of stage number k of a tile, and with each fourth stage the scales of four."""
    SIZE: gl.constexpr = 2 * ROWS * 4 * WORDS  # bytes
    bar = ready.index(stage)
    if k % GROUPS == 0:
        mbarrier.expect(bar, SIZE + 2 * ROWS * 4 * GROUPS)
        tma.async_copy_global_to_shared(S, [row, k], bar, scales.index(2 * group))
        tma.async_copy_global_to_shared(S, [row + apart, k], bar, scales.index(2 * group + 1))
    else:
        mbarrier.expect(bar, SIZE)
    tma.async_copy_global_to_shared(W, [row, k * WORDS], bar, codes.index(2 * stage))
    tma.async_copy_global_to_shared(W, [row + apart, k * WORDS], bar, codes.index(2 * stage + 1))


@gluon.jit
def copy_tokens(X, XS, tokens, factors, ready, row, k, stage):
    """Start copying the codes of x of stage number k of a tile, and their scales."""
    bar = ready.index(stage)
    mbarrier.expect(bar, tokens.shape[1] * BLOCK + factors.shape[2] * 4)
    tma.async_copy_global_to_shared(X, [row, k * BLOCK], bar, tokens.index(stage))
    tma.async_copy_global_to_shared(XS, [k, row], bar, factors.index(stage))


@gluon.jit
def wait_free(free, i, STAGES: gl.constexpr):
    """Wait until stage number i of a program may be filled again, with the first of the stages that are freed at
    once."""
    AT_ONCE: gl.constexpr = STAGES // free.shape[0]
    if i % AT_ONCE == 0:
        mbarrier.wait(free.index(i % STAGES // AT_ONCE), (i // STAGES + 1) & 1)


@gluon.jit
def copies(
    W, S, X, XS, TABLE, blocks, beside, memory, barriers, O: gl.constexpr, K: gl.constexpr, O_S: gl.constexpr,
    K_S: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The warp that copies: for each tile of this program, a stage after the other."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = held.shape[0]
    RING: gl.constexpr = scales.shape[0] // 2
    TILES: gl.constexpr = O // (2 * ROWS)
    HEIGHT: gl.constexpr = ROWS if GATED else 2 * ROWS
    APART: gl.constexpr = O // 2 if GATED else ROWS
    T: gl.constexpr = tokens.shape[1]
    HALVES: gl.constexpr = 2 if GATED else 1  # stages of a block of columns of the shared expert
    AHEAD: gl.constexpr = 0 if GATED else min(STAGES, K // BLOCK)
    AHEAD_S: gl.constexpr = min(STAGES, HALVES * K_S // BLOCK)
    program, programs = gl.program_id(0), gl.num_programs(0)
    shared = shared_tiles(beside, T, O_S)
    own = after(shared)
    # Weights are no results.
    if beside[0] is not None:
        copy_blocks_ahead(beside, fp8, held, program, shared, T, AHEAD_S, HALVES)
    if GATED:
        gdc_wait()
    tiles = gl.load(TABLE, cache_modifier=".cg") * TILES
    if AHEAD > 0:
        # The table is complete: the kernel before this one has read it.
        if program >= shared and own < tiles:
            e, first, count, x_row = block_of(TABLE, blocks, own // TILES)
            row = e * O + own % TILES * HEIGHT
            for k in gl.static_range(AHEAD):
                copy_weights(W, S, codes, scales, held, row, APART, k, k, k // GROUPS)
        gdc_wait()
    i, ahead = 0, gl.where(program < shared, AHEAD_S, AHEAD)
    if beside[0] is not None:
        for tile in range(program, shared, programs):
            row, token, count, x_row = shared_place(beside, tile, T)
            for k in range(K_S // BLOCK):
                for half in gl.static_range(HALVES):
                    stage = i % STAGES
                    if i >= ahead:
                        wait_free(free, i, STAGES)
                        copy_block(beside, fp8, held, row, k, half, stage)
                    if half == 0:
                        copy_tokens(X, XS, tokens, factors, ready, x_row, k, stage)
                    else:
                        mbarrier.arrive(ready.index(stage))  # both halves multiply the same tokens
                    i += 1
    for tile in range(own, tiles, programs):
        e, first, count, x_row = block_of(TABLE, blocks, tile // TILES)
        row = e * O + tile % TILES * HEIGHT
        for k in range(K // BLOCK):
            stage = i % STAGES
            if i >= ahead:
                wait_free(free, i, STAGES)
                copy_weights(W, S, codes, scales, held, row, APART, k, stage, i // GROUPS % RING)
            copy_tokens(X, XS, tokens, factors, ready, x_row, k, stage)
            i += 1


@gluon.jit
def results(
    TOP, order, beside, out, limit, memory, barriers, O: gl.constexpr, K: gl.constexpr, O_S: gl.constexpr,
    K_S: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, T: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The warpgroups that multiply, tile by tile."""
    if GATED:
        gdc_wait()
        gdc_launch_dependents()
    TABLE, ORDER, ROUTING, blocks = order
    N: gl.constexpr = min(T, MOST)
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, D, 4)
    TILES: gl.constexpr = O // (2 * ROWS)
    HEIGHT: gl.constexpr = ROWS if GATED else 2 * ROWS
    APART: gl.constexpr = O // 2 if GATED else ROWS
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles, n, shared = gl.load(TABLE, cache_modifier=".cg") * TILES, 0, shared_tiles(beside, T, O_S)
    if beside[0] is not None:
        for tile in range(program, shared, programs):
            row, token, count, x_row = shared_place(beside, tile, T)
            acc, more, n = shared_products(n, beside, row, memory, barriers, K_S, GATED, T, D)
            if GATED:
                gate(acc, more, token, count, x_row, None, None, out, row, limit, WIDTH, T, DTYPE)
            else:
                put_shared(acc, token, count, beside[4], row, O, T)
    own = after(shared)
    if tiles > own:
        tables = lanes_tables()
        top, other = largest(TOP, TABLE, own, O, TILES, HEIGHT, APART)
        for tile in range(own, tiles, programs):
            if T > MOST:
                sums, n = products_of_two(n, top, other, tables, memory, barriers, K, D, A)
            elif T == MOST:
                sums, n = products_of_many(n, top, other, tables, memory, barriers, K, T, D, A)
            else:
                sums, n = products(n, top, other, tables, memory, barriers, K, T, D, A)
            # What the next tile needs is loaded while results are stored.
            e, first, count, x_row = block_of(TABLE, blocks, tile // TILES)
            next_top, next_other = largest(TOP, TABLE, gl.minimum(tile + programs, tiles - 1), O, TILES, HEIGHT, APART)
            row = tile % TILES * HEIGHT
            for group in gl.static_range(T // N):
                at, left, x_at = first + group * N, count - group * N, x_row + group * N
                acc, more = restored(sums[group][0], top, D), restored(sums[group][1], other, D)
                if GATED:
                    if T > MOST:
                        acc, more = turned(acc, DTYPE), turned(more, DTYPE)
                    gate(acc, more, at, left, x_at, ORDER, ROUTING, out, row, limit, WIDTH, N, DTYPE)
                else:
                    put(acc, at, left, ORDER, out[0], row, O, N)
                    put(more, at, left, ORDER, out[0], row + ROWS, O, N)
            top, other = next_top, next_other


@gluon.jit
def largest(TOP, TABLE, tile, O: gl.constexpr, TILES: gl.constexpr, HEIGHT: gl.constexpr, APART: gl.constexpr):
    """int32 [128] of either half of a tile: bytes of the rows' largest scales."""
    e = gl.load(TABLE + 1 + tile // TILES, cache_modifier=".cg").to(gl.int64)
    at = TOP + (e * O + tile % TILES * HEIGHT) + gl.arange(0, ROWS, LINES)
    return gl.load(at).to(gl.int32), gl.load(at + APART).to(gl.int32)


@gluon.jit(do_not_specialize=["blocks", "stride", "N", "base"])
def product(
    W, S, X, XS, TOP, TABLE, ORDER, ROUTING, OUT, SCALE, W1, W3, S1, S3, YS, N, base, blocks, stride, limit,
    O: gl.constexpr, K: gl.constexpr, O_S: gl.constexpr, K_S: gl.constexpr, WIDTH: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Products of experts' matrices [O, K] with their tokens, of which programs take tiles in turn.

    W, S: all matrices, words of codes int32 [E·O, K / 8] and words of scales int32 [E·O, K / 128], 128 rows a copy.
    X, XS, TABLE: codes, scales and table of `hopper_order.arrange`, T rows a copy. TOP uint8 [E, O]: see
    `largest_scales`. ORDER: see `triton_order`; None: pairs are in order.

    GATED: rows are those of gates, then of ups. OUT uint8 [rows of X, WIDTH] and SCALE fp32 [WIDTH / 128, `stride`] are
    x of the next product: routing weight · SwiGLU, after roundings to DTYPE, in E4M3. ROUTING fp32 [P]. Otherwise OUT
    is [P, O], a row a pair, in its dtype.

    W1, W3 unless None: codes of the shared expert's gate and up rows [O_S, K_S], 128 × 128 a copy; not GATED, W1 of its
    down projection alone. S1, S3: scales of blocks, fp32 or E8M0. x of its N tokens is in rows `base` … of X, and its
    results are in OUT and SCALE too; not GATED, in YS fp32 [N, O].

    The kernel after the gated one may start early, and copies weights while this one ends. Weights of the shared expert
    are copied before any earlier kernel has ended.
    """
    # Four stages are freed at once, with their scales. With larger tiles so many do not fit: each is freed by itself,
    # and as scales of four stages outlive their stage, their ring holds up to three stages more.
    AT_ONCE: gl.constexpr = GROUPS if T < MOST else 1
    RING: gl.constexpr = (STAGES + 2 * (GROUPS - AT_ONCE)) // GROUPS
    # The same memory holds codes of either kind.
    FP8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    fp8 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, BLOCK], FP8)
    codes = fp8._reinterpret(gl.int32, [2 * STAGES, ROWS, WORDS], W.layout)
    scales = gl.allocate_shared_memory(gl.int32, [2 * RING, ROWS, GROUPS], S.layout)
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, T, BLOCK], X.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, XS.block_type.shape[1]], XS.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES // AT_ONCE, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(held.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
        if stage % AT_ONCE == 0:
            mbarrier.init(free.index(stage // AT_ONCE), count=1)
    memory, barriers = (codes, scales, tokens, factors, fp8), (held, ready, free)
    order, out, beside = (TABLE, ORDER, ROUTING, blocks), (OUT, SCALE, stride), (W1, W3, S1, S3, YS, N, base)
    gl.warp_specialize(
        [
            (results, (TOP, order, beside, out, limit, memory, barriers, O, K, O_S, K_S, WIDTH, GATED, T, DTYPE)),
            (copies, (W, S, X, XS, TABLE, blocks, beside, memory, barriers, O, K, O_S, K_S, GATED)),
        ],
        [1],
        [24],
    )
