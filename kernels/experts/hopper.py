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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.experts.hopper_codes import BASE, LINES, SPREAD, e4m3_words, operand
from dsv4.kernels.experts.hopper_shared import (
    copy_block,
    copy_blocks_ahead,
    put_shared,
    shared_place,
    shared_products,
    shared_tiles,
)
from dsv4.kernels.experts.triton_decode import after, swiglu
from dsv4.kernels.quantize.triton_codes import e4m3_exponent, magnitude, narrow, power_of_two, rounded, widen

ROWS = gl.constexpr(128)  # of a half
BLOCK = gl.constexpr(128)  # columns of a stage, and of a scale of x
WORDS = gl.constexpr(16)  # of the weight's codes in a row of a stage
MOST = gl.constexpr(64)  # tokens of a group
GROUPS = gl.constexpr(4)  # scales of the weight in a row of a stage, and stages whose scales are copied at once

# [tokens, rows of a half] of results, as they are stored
BYTE_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
BF16_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
# [rows of a half, tokens of a group]: of two tokens a thread has the 16 rows whose codes it stores
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [32, 0], [64, 0], [0, 32]],
        lane_bases=[[4, 0], [8, 0], [16, 0], [0, 1], [0, 2]],
        warp_bases=[[0, 4], [0, 8], [0, 16]],
        block_bases=[],
        shape=[128, 64],
    )
)


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
def copies(
    W, S, X, XS, TABLE, blocks, beside, memory, barriers, O: gl.constexpr, K: gl.constexpr, O_S: gl.constexpr,
    K_S: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The warp that copies: for each tile of this program, a stage after the other."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    RING: gl.constexpr = scales.shape[0] // 2
    TILES: gl.constexpr = O // (2 * ROWS)
    HEIGHT: gl.constexpr = ROWS if GATED else 2 * ROWS
    APART: gl.constexpr = O // 2 if GATED else ROWS
    T: gl.constexpr = tokens.shape[1]
    AHEAD: gl.constexpr = 0 if GATED else min(STAGES, K // BLOCK)
    AHEAD_S: gl.constexpr = 0 if GATED else min(STAGES, 2 * K_S // BLOCK)
    if GATED:
        gdc_wait()
    program, programs = gl.program_id(0), gl.num_programs(0)
    shared = shared_tiles(beside, T, O_S)
    tiles, own = gl.load(TABLE, cache_modifier=".cg") * TILES, after(shared)
    if AHEAD > 0:
        # Weights are no results. The table is complete: the kernel before this one has read it.
        if beside[0] is not None:
            copy_blocks_ahead(beside, fp8, held, program, shared, T, AHEAD_S, GATED)
        if program >= shared and own < tiles:
            e, first, count, x_row = block_of(TABLE, blocks, own // TILES)
            row = e * O + own % TILES * HEIGHT
            for k in gl.static_range(AHEAD):
                copy_weights(W, S, codes, scales, held, row, APART, k, k, k // GROUPS)
    if not GATED:
        gdc_wait()
    i, ahead = 0, gl.where(program < shared, AHEAD_S, AHEAD)
    if beside[0] is not None:
        for tile in range(program, shared, programs):
            row, other, token, count, x_row = shared_place(beside, tile, T, GATED)
            for k in range(K_S // BLOCK):
                for half in gl.static_range(2):
                    stage = i % STAGES
                    if i >= ahead:
                        mbarrier.wait(free.index(stage), (i // STAGES + 1) & 1)
                        copy_block(beside, fp8, held, row, other, k, half, stage)
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
                # As scales of four stages outlive their stage, their ring holds up to three stages more.
                mbarrier.wait(free.index(stage), (i // STAGES + 1) & 1)
                copy_weights(W, S, codes, scales, held, row, APART, k, stage, i // GROUPS % RING)
            copy_tokens(X, XS, tokens, factors, ready, x_row, k, stage)
            i += 1


@gluon.jit
def products(i, top, other, memory, barriers, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr, A: gl.constexpr):
    """Sums fp32 [128, T] of either half of a tile, without the powers of two of the rows, of one group; and the number
    of the next stage. i: number of the first stage since the program began. top, other: as `largest` gives them."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    RING: gl.constexpr = scales.shape[0] // 2
    zeros = gl.zeros([ROWS, T], gl.float32, D)
    acc, more, last = zeros, zeros, i + K // BLOCK - 1
    mbarrier.wait(held.index(i % STAGES), i // STAGES & 1)
    a, b = halves(codes, scales, i % STAGES, i // GROUPS % RING, 0, top, other)
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
    for k in range(K // BLOCK):
        stage = i % STAGES
        x = tokens.index(stage).permute((1, 0))
        left, right = operand(a[0], a[1], A), operand(b[0], b[1], A)
        part = warpgroup_mma(left, x, zeros, use_acc=False, is_async=True)
        rest = warpgroup_mma(right, x, zeros, use_acc=False, is_async=True)
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=k > 0)
        # Codes of the next stage are made meanwhile; after the last stage that one's again, so that nothing is waited
        # for. The old ones are named in the wait: their registers are read until then.
        old, i = (a[0], a[1], b[0], b[1]), i + 1
        j = gl.minimum(i, last)
        mbarrier.wait(held.index(j % STAGES), j // STAGES & 1)
        a, b = halves(codes, scales, j % STAGES, j // GROUPS % RING, (k + 1) % GROUPS, top, other)
        mbarrier.wait(ready.index(j % STAGES), j // STAGES & 1)
        factor = factors.index(stage).slice(0, T, dim=1).load(D)
        part, rest, _, _, _, _ = warpgroup_mma_wait(0, deps=[part, rest, old[0], old[1], old[2], old[3]])
        acc, more = acc + part * factor, more + rest * factor
    mbarrier.arrive(free.index(last % STAGES))
    return ((acc, more),), i


@gluon.jit
def products_of_two(i, top, other, memory, barriers, K: gl.constexpr, D: gl.constexpr, A: gl.constexpr):
    """As `products`, for two groups of 64 tokens: sums fp32 [128, 64] of either half, for each group.

    The codes of one half multiply both groups, while those of the other half are made. More codes, beside the sums, do
    not fit in registers.
    """
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    RING: gl.constexpr = scales.shape[0] // 2
    zeros = gl.zeros([ROWS, MOST], gl.float32, D)
    acc, more, acc_1, more_1, parts, last = zeros, zeros, zeros, zeros, (zeros, zeros), i + K // BLOCK - 1
    mbarrier.wait(held.index(i % STAGES), i // STAGES & 1)
    a = e4m3_words(codes.index(2 * (i % STAGES)), scales.index(2 * (i // GROUPS % RING)), top, 0)
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
    for k in range(K // BLOCK):
        stage = i % STAGES
        x, factor = tokens.index(stage), factors.index(stage)
        parts = start(a, x, parts, A)
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=k > 0)
        b = e4m3_words(codes.index(2 * stage + 1), scales.index(2 * (i // GROUPS % RING) + 1), other, k % GROUPS)
        i += 1
        j = gl.minimum(i, last)  # as in `products`
        # Without a wait here, codes would be made behind the one for the products.
        mbarrier.wait(held.index(j % STAGES), j // STAGES & 1)
        acc, acc_1, parts = add(acc, acc_1, parts, a, factor, D)
        parts = start(b, x, parts, A)
        a = e4m3_words(codes.index(2 * (j % STAGES)), scales.index(2 * (j // GROUPS % RING)), top, (k + 1) % GROUPS)
        mbarrier.wait(ready.index(j % STAGES), j // STAGES & 1)
        more, more_1, parts = add(more, more_1, parts, b, factor, D)
    mbarrier.arrive(free.index(last % STAGES))
    return ((acc, more), (acc_1, more_1)), i


@gluon.jit
def start(words, x, parts, A: gl.constexpr):
    """Start multiplying one half's codes, as `e4m3_words` gives them, with both groups of x [128, 128]. `parts` are
    the products before, whose registers are taken again."""
    codes = operand(words[0], words[1], A)
    first = warpgroup_mma(codes, x.slice(0, MOST).permute((1, 0)), parts[0], use_acc=False, is_async=True)
    second = warpgroup_mma(codes, x.slice(MOST, MOST).permute((1, 0)), parts[1], use_acc=False, is_async=True)
    return first, second


@gluon.jit
def add(acc, acc_1, parts, words, factor, D: gl.constexpr):
    """Both groups' sums of one half, with the products that are under way, and those products. factor fp32 [1, 128].

    Sums are named in waits so that they are made there: later they would need the registers of the next products.
    """
    part = warpgroup_mma_wait(1, deps=[parts[0]])
    acc += part * factor.slice(0, MOST, dim=1).load(D)
    part_1, acc, _, _ = warpgroup_mma_wait(0, deps=[parts[1], acc, words[0], words[1]])
    acc_1 += part_1 * factor.slice(MOST, MOST, dim=1).load(D)
    return acc, warpgroup_mma_wait(0, deps=[acc_1]), (part, part_1)


@gluon.jit
def halves(codes, scales, stage, group, block, top, other):
    """`e4m3_words` of both halves."""
    first = e4m3_words(codes.index(2 * stage), scales.index(2 * group), top, block)
    return first, e4m3_words(codes.index(2 * stage + 1), scales.index(2 * group + 1), other, block)


@gluon.jit
def results(
    TOP, order, beside, out, limit, memory, barriers, O: gl.constexpr, K: gl.constexpr, O_S: gl.constexpr,
    K_S: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr, T: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The warpgroups that multiply, tile by tile."""
    TABLE, ORDER, ROUTING, blocks = order
    N: gl.constexpr = min(T, MOST)
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, D, 4)
    TILES: gl.constexpr = O // (2 * ROWS)
    HEIGHT: gl.constexpr = ROWS if GATED else 2 * ROWS
    APART: gl.constexpr = O // 2 if GATED else ROWS
    program, programs = gl.program_id(0), gl.num_programs(0)
    tiles, i, shared = gl.load(TABLE, cache_modifier=".cg") * TILES, 0, shared_tiles(beside, T, O_S)
    if beside[0] is not None:
        for tile in range(program, shared, programs):
            row, other, token, count, x_row = shared_place(beside, tile, T, GATED)
            acc, more, i = shared_products(i, beside, row, other, memory, barriers, K_S, T, D)
            if GATED:
                gate(acc, more, token, count, x_row, None, None, out, row, limit, WIDTH, T, DTYPE)
            else:
                put_shared(acc, token, count, beside[4], row, O, T)
                put_shared(more, token, count, beside[4], other, O, T)
    own = after(shared)
    if tiles > own:
        top, other = largest(TOP, TABLE, own, O, TILES, HEIGHT, APART)
        for tile in range(own, tiles, programs):
            if T > MOST:
                sums, i = products_of_two(i, top, other, memory, barriers, K, D, A)
            else:
                sums, i = products(i, top, other, memory, barriers, K, T, D, A)
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


@gluon.jit
def restored(y, top, D: gl.constexpr):
    """y times the power of two by which a row's codes are too small."""
    exponent = gl.convert_layout(top, gl.SliceLayout(1, D), assert_trivial=True) - (127 + SPREAD - BASE)
    return y * power_of_two(exponent)[:, None]


@gluon.jit
def turned(y, DTYPE: gl.constexpr):
    """y rounded to DTYPE, with 2 tokens a thread, not 16: what is known of each token takes registers, and beside them
    are the sums of the other group."""
    return widen(gl.convert_layout(narrow(y, DTYPE), TURNED))


@gluon.jit
def gate(
    g, up, first, count, x_row, ORDER, ROUTING, out, row, limit, WIDTH: gl.constexpr, T: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """routing weight · swiglu, rounded to E4M3 with a scale for the tile's 128 columns: codes and scales, as x of the
    next product. Codes are by places; without routing weights, which is the shared expert, they are in order."""
    OUT, SCALE, stride = out
    n = gl.arange(0, T, gl.SliceLayout(0, g.type.layout))
    # y is in x.dtype; h = clamped_swiglu(gate, up, limit).mul_(weights).to(x.dtype)
    h = swiglu(rounded(g, DTYPE), rounded(up, DTYPE), limit)
    if ROUTING is not None:
        h *= gl.load(ROUTING + pairs(ORDER, first, n, count), mask=n < count, other=0.0)[None, :]
    h = rounded(h, DTYPE)
    exponent = e4m3_exponent(gl.max(magnitude(h), 0))
    gl.store(SCALE + row // BLOCK * stride + x_row + n, power_of_two(exponent), mask=n < count)
    codes = (h * power_of_two(-exponent)[None, :]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    codes = gl.permute(codes, (1, 0))
    if ROUTING is not None:
        codes = gl.permute(gl.reshape(codes, [T, 4, 8, 4]), (0, 2, 1, 3))
    codes = gl.convert_layout(gl.reshape(codes, [T, ROWS]), BYTE_ROWS)
    t, c = gl.arange(0, T, gl.SliceLayout(1, BYTE_ROWS)), gl.arange(0, ROWS, gl.SliceLayout(0, BYTE_ROWS))
    at = OUT + (x_row + t).to(gl.int64)[:, None] * WIDTH
    gl.store(at + (row + c)[None, :], codes, mask=(t < count)[:, None])


@gluon.jit
def pairs(ORDER, first, n, count):
    """Numbers of the pairs at places first + n; without an order a pair's number is its place. Nothing makes these
    warps wait for earlier kernels but the tokens that they multiplied, so an L1 cache may be older."""
    if ORDER is None:
        pair = gl.where(n < count, first + n, 0)
    else:
        pair = gl.load(ORDER + first + n, mask=n < count, other=0, cache_modifier=".cg")
    return pair


@gluon.jit
def put(y, first, count, ORDER, OUT, row, O: gl.constexpr, T: gl.constexpr):
    """Rows of the pairs of OUT [P, O]: columns row … row + 128."""
    y = gl.convert_layout(gl.permute(narrow(y, OUT.dtype.element_ty), (1, 0)), BF16_ROWS)
    t, c = gl.arange(0, T, gl.SliceLayout(1, BF16_ROWS)), gl.arange(0, ROWS, gl.SliceLayout(0, BF16_ROWS))
    pair = pairs(ORDER, first, t, count).to(gl.int64)
    gl.store(OUT + (pair * O)[:, None] + (row + c)[None, :], y, mask=(t < count)[:, None])


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

    W1, W3 unless None: codes of the shared expert's gate and up rows, 128 × 128 a copy; not GATED, both of its down
    projection. O_S: rows of both halves of its tiles, K_S their columns. S1, S3: scales of blocks, fp32 or E8M0. x of
    its N tokens is in rows `base` … of X, and its results are those of OUT and SCALE; not GATED, YS fp32 [N, O].

    The kernel after the gated one may start early, and copies weights while this one ends.
    """
    RING: gl.constexpr = (STAGES + 2 * GROUPS - 2) // GROUPS
    # The same memory holds codes of either kind.
    FP8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    fp8 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, BLOCK], FP8)
    codes = fp8._reinterpret(gl.int32, [2 * STAGES, ROWS, WORDS], W.layout)
    scales = gl.allocate_shared_memory(gl.int32, [2 * RING, ROWS, GROUPS], S.layout)
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, T, BLOCK], X.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, XS.block_type.shape[1]], XS.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(held.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    if GATED:
        gdc_wait()
        gdc_launch_dependents()
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
