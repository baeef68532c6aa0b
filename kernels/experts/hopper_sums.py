"""Device code of `hopper`: sums of MXFP4 tiles, for each number of tokens of a tile.

Codes of a stage are made in registers while those of the stage before are multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4.kernels.experts.hopper_codes import e4m3_words, operand, scales_of, scales_of_any

ROWS = gl.constexpr(128)  # of a half
BLOCK = gl.constexpr(128)  # columns of a stage, and of a scale of x
MOST = gl.constexpr(64)  # tokens of a group
GROUPS = gl.constexpr(4)  # scales of the weight in a row of a stage, and stages whose scales are copied at once


@gluon.jit
def products(
    n, top, other, tables, memory, barriers, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr, A: gl.constexpr
):
    """Sums fp32 [128, T] of either half of a tile, without the powers of two of the rows, of one group; and the number
    of the next four stages. n: number of the first four since the program began. top, other: as `largest` gives them.
    tables: see `hopper_codes`."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    RING: gl.constexpr = free.shape[0]
    zeros = gl.zeros([ROWS, T], gl.float32, D)
    acc, more, last = zeros, zeros, n + K // BLOCK // GROUPS - 1
    a, b = halves(n % RING, n // RING & 1, 0, memory, barriers, top, other, tables)
    for k in range(K // BLOCK // GROUPS):
        for block in gl.static_range(GROUPS):
            stage = n % RING * GROUPS + block
            x = tokens.index(stage).permute((1, 0))
            left, right = operand(a[0], a[1], A), operand(b[0], b[1], A)
            part = warpgroup_mma(left, x, zeros, use_acc=False, is_async=True)
            rest = warpgroup_mma(right, x, zeros, use_acc=False, is_async=True)
            if block == 0:
                mbarrier.arrive(free.index((n + RING - 1) % RING), pred=k > 0)
            # Codes of the next stage are made meanwhile; after the last stage those of an old one, so that nothing is
            # waited for. The codes before are named in the wait: their registers are read until then.
            old = (a[0], a[1], b[0], b[1])
            m = n if block < GROUPS - 1 else gl.minimum(n + 1, last)
            a, b = halves(m % RING, m // RING & 1, (block + 1) % GROUPS, memory, barriers, top, other, tables)
            factor = factors.index(stage).slice(0, T, dim=1).load(D)
            part, rest, _, _, _, _ = warpgroup_mma_wait(0, deps=[part, rest, old[0], old[1], old[2], old[3]])
            acc, more = acc + part * factor, more + rest * factor
        n += 1
    mbarrier.arrive(free.index(last % RING))
    return ((acc, more),), n


@gluon.jit
def halves(slot, turn, block: gl.constexpr, memory, barriers, top, other, tables):
    """`e4m3_words` of both halves of stage `block` of four, when it has come."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    stage = slot * GROUPS + block
    mbarrier.wait(held.index(stage), turn)
    first = e4m3_words(codes.index(2 * stage), scales_of(scales.index(2 * slot), block), top, tables)
    second = e4m3_words(codes.index(2 * stage + 1), scales_of(scales.index(2 * slot + 1), block), other, tables)
    mbarrier.wait(ready.index(stage), turn)
    return first, second


@gluon.jit
def products_of_many(
    n, top, other, tables, memory, barriers, K: gl.constexpr, T: gl.constexpr, D: gl.constexpr, A: gl.constexpr
):
    """As `products`, stage by stage, and each is freed by itself: of 64 tokens, the sums leave few registers."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    zeros = gl.zeros([ROWS, T], gl.float32, D)
    i = n * GROUPS
    acc, more, last = zeros, zeros, i + K // BLOCK - 1
    a, b = halves_of_any(i, 0, memory, barriers, top, other, tables)
    for k in range(K // BLOCK):
        stage = i % STAGES
        x = tokens.index(stage).permute((1, 0))
        left, right = operand(a[0], a[1], A), operand(b[0], b[1], A)
        part = warpgroup_mma(left, x, zeros, use_acc=False, is_async=True)
        rest = warpgroup_mma(right, x, zeros, use_acc=False, is_async=True)
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=k > 0)
        old, i = (a[0], a[1], b[0], b[1]), i + 1
        a, b = halves_of_any(gl.minimum(i, last), (k + 1) % GROUPS, memory, barriers, top, other, tables)
        factor = factors.index(stage).slice(0, T, dim=1).load(D)
        part, rest, _, _, _, _ = warpgroup_mma_wait(0, deps=[part, rest, old[0], old[1], old[2], old[3]])
        acc, more = acc + part * factor, more + rest * factor
    mbarrier.arrive(free.index(last % STAGES))
    return ((acc, more),), n + K // BLOCK // GROUPS


@gluon.jit
def halves_of_any(i, block, memory, barriers, top, other, tables):
    """As `halves`, of stage number i, whose `block` is not known at compile time."""
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    stage, slot = i % STAGES, i // GROUPS % (scales.shape[0] // 2)
    mbarrier.wait(held.index(stage), i // STAGES & 1)
    first = e4m3_words(codes.index(2 * stage), scales_of_any(scales.index(2 * slot), block), top, tables)
    second = e4m3_words(codes.index(2 * stage + 1), scales_of_any(scales.index(2 * slot + 1), block), other, tables)
    mbarrier.wait(ready.index(stage), i // STAGES & 1)
    return first, second


@gluon.jit
def products_of_two(n, top, other, tables, memory, barriers, K: gl.constexpr, D: gl.constexpr, A: gl.constexpr):
    """As `products`, for two groups of 64 tokens: sums fp32 [128, 64] of either half, for each group.

    The codes of one half multiply both groups, while those of the other half are made. More codes, beside the sums, do
    not fit in registers. Stages are freed one by one.
    """
    codes, scales, tokens, factors, fp8 = memory
    held, ready, free = barriers
    STAGES: gl.constexpr = free.shape[0]
    RING: gl.constexpr = scales.shape[0] // 2
    zeros = gl.zeros([ROWS, MOST], gl.float32, D)
    acc, more, acc_1, more_1, parts = zeros, zeros, zeros, zeros, (zeros, zeros)
    i = n * GROUPS
    last = i + K // BLOCK - 1
    mbarrier.wait(held.index(i % STAGES), i // STAGES & 1)
    a = e4m3_words(codes.index(2 * (i % STAGES)), scales_of(scales.index(2 * (n % RING)), 0), top, tables)
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
    for k in range(K // BLOCK):
        stage = i % STAGES
        x, factor = tokens.index(stage), factors.index(stage)
        parts = start(a, x, parts, A)
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=k > 0)
        scale = scales_of_any(scales.index(2 * (i // GROUPS % RING) + 1), k % GROUPS)
        b = e4m3_words(codes.index(2 * stage + 1), scale, other, tables)
        i += 1
        j = gl.minimum(i, last)  # as in `products`
        # Without a wait here, codes would be made behind the one for the products.
        mbarrier.wait(held.index(j % STAGES), j // STAGES & 1)
        acc, acc_1, parts = add(acc, acc_1, parts, a, factor, D)
        parts = start(b, x, parts, A)
        scale = scales_of_any(scales.index(2 * (j // GROUPS % RING)), (k + 1) % GROUPS)
        a = e4m3_words(codes.index(2 * (j % STAGES)), scale, top, tables)
        mbarrier.wait(ready.index(j % STAGES), j // STAGES & 1)
        more, more_1, parts = add(more, more_1, parts, b, factor, D)
    mbarrier.arrive(free.index(last % STAGES))
    return ((acc, more), (acc_1, more_1)), n + K // BLOCK // GROUPS


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
