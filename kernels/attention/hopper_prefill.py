"""Device code of attention over listed rows for many queries, on Hopper: 64 heads of a query at a time.

It computes what `triton_tiles.attend` does, of bf16 rows of 512. Four warps copy rows ahead; two warpgroups multiply.
Keys come in pairs of tiles: each warpgroup has the logits of one tile, and half the columns of the output, to which
both tiles contribute. While one warpgroup takes exponentials, the other multiplies. A tile lies in shared memory as two
halves of its columns, each of which is refilled as soon as its last product has read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.attention.hopper import LOG2E, rows_of

KEYS = gl.constexpr(64)  # of a tile
HALF = gl.constexpr(256)  # columns of a half
# Halves of tiles in shared memory, in the order in which they are needed and become free.
A_LEFT, B_RIGHT, A_RIGHT, B_LEFT = (gl.constexpr(i) for i in range(4))
# Barriers between the warpgroups.
A_TOP, B_TOP, A_WEIGHTS, B_WEIGHTS, A_SUM, B_SUM, A_DONE, B_DONE = (gl.constexpr(i) for i in range(8))


@gluon.jit(do_not_specialize=["N", "T", "W", "K", "wi_n", "ei_n", "v_b"])
def attend_many(
    Q,
    OUT,
    SINK,
    WINDOW,
    ENTRIES,
    WINDOW_INDEX,
    ENTRY_INDEX,
    VISIBLE,
    scale,
    N,
    T,
    W,
    K,
    e_b,
    wi_n,
    wi_k,
    ei_n,
    ei_k,
    v_b,
    v_t,
    H: gl.constexpr,
    W_ROW: gl.constexpr,
    E_ROW: gl.constexpr,
    LISTED: gl.constexpr,
):
    """Q, OUT: descriptors of [N·H, 512], in blocks of [64, 256] and [64, 64]; H a multiple of 64. The other arguments
    are those of `hopper.attend`. A program takes every P-th 64 heads of a query. W ≥ 1: there is a tile."""
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, HALF], Q.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, HALF], gl.NVMMASharedLayout(128, 16, 2))
    weights = gl.allocate_shared_memory(gl.bfloat16, [4, 64, KEYS], OUT.layout)  # the last two for the output alone
    rows = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    present = gl.allocate_shared_memory(gl.int32, [2, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    listed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    between = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=128)  # each thread that copies
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(8):
        mbarrier.init(between.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(listed.index(i), count=1)
        mbarrier.init(asked.index(i), count=1 + i)
    shared, barriers = (q, k, weights, rows, present), (ready, free, listed, asked, between)
    lists = WINDOW_INDEX, wi_n, wi_k, ENTRY_INDEX, ei_n, ei_k, VISIBLE, v_b, v_t
    gl.warp_specialize(
        [
            (even_tiles, (OUT, SINK, shared, barriers, lists, scale, N, T, W, K, H, LISTED)),
            (odd_tiles, (OUT, SINK, shared, barriers, lists, scale, N, T, W, K, H, LISTED)),
            (copy_rows, (Q, WINDOW, ENTRIES, shared, barriers, lists, N, T, W, K, e_b, H, W_ROW, E_ROW, LISTED)),
        ],
        [4, 4],
        [216, 72],
    )


@gluon.jit
def seen_by(n, lists, T, W, K, LISTED: gl.constexpr):
    """The lists of query n as `rows_of` takes them, and its pairs of tiles."""
    WINDOW_INDEX, wi_n, wi_k, ENTRY_INDEX, ei_n, ei_k, VISIBLE, v_b, v_t = lists
    seen = K
    if not LISTED:
        b, t = (n // T).to(gl.int64), n % T
        seen = gl.maximum(0, gl.minimum(gl.load(VISIBLE + b * v_b + t * v_t), K)).to(gl.int32)
    near, n = gl.cdiv(W, KEYS), n.to(gl.int64)
    pairs = gl.cdiv(near + gl.cdiv(seen, KEYS), 2)
    return (WINDOW_INDEX + n * wi_n, wi_k, ENTRY_INDEX + n * ei_n, ei_k, near, W, seen), pairs


# ---- copies ---------------------------------------------------------------------------------------------------------

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, COPY))


@gluon.jit
def copy_rows(
    Q, WINDOW, ENTRIES, shared, barriers, lists, N, T, W, K, e_b, H: gl.constexpr, W_ROW: gl.constexpr,
    E_ROW: gl.constexpr, LISTED: gl.constexpr,
):  # fmt: skip
    q, k, _, _, present = shared
    ready, free, listed, asked, _ = barriers
    gdc_wait()
    done, turn = 0, 0
    for unit in range(gl.program_id(0), N * (H // 64), gl.num_programs(0)):
        n = unit // (H // 64)
        own, pairs = seen_by(n, lists, T, W, K, LISTED)
        near = own[4]
        run = ENTRIES + (n // T).to(gl.int64) * e_b
        even, odd = rows_of(0, own, LISTED, KEYS, ROWS), rows_of(1, own, LISTED, KEYS, ROWS)
        mbarrier.wait(asked.index(1), (turn & 1) ^ 1)
        mbarrier.expect(asked.index(0), 2 * Q.block_type.nbytes)
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(Q, [unit * 64, i * HALF], asked.index(0), q.index(i))
        for pair in range(pairs):
            a, b = even, odd
            even, odd = (
                rows_of(2 * pair + 2, own, LISTED, KEYS, ROWS),
                rows_of(2 * pair + 3, own, LISTED, KEYS, ROWS),
            )
            empty = (done & 1) ^ 1
            mbarrier.wait(free.index(A_LEFT), empty)
            tell(present.index(0), listed.index(0), a)
            copy_half(k, ready, A_LEFT, 0, a, 2 * pair < near, WINDOW, run, W_ROW, E_ROW)
            mbarrier.wait(free.index(B_RIGHT), empty)
            tell(present.index(1), listed.index(1), b)
            copy_half(k, ready, B_RIGHT, HALF, b, 2 * pair + 1 < near, WINDOW, run, W_ROW, E_ROW)
            mbarrier.wait(free.index(A_RIGHT), empty)
            copy_half(k, ready, A_RIGHT, HALF, a, 2 * pair < near, WINDOW, run, W_ROW, E_ROW)
            mbarrier.wait(free.index(B_LEFT), empty)
            copy_half(k, ready, B_LEFT, 0, b, 2 * pair + 1 < near, WINDOW, run, W_ROW, E_ROW)
            done += 1
        turn += 1
    async_copy.wait_group(0)


@gluon.jit
def tell(present, listed, row):
    """Which keys of a tile there are."""
    present.store((row >= 0).to(gl.int32))
    mbarrier.arrive(listed, count=1)


@gluon.jit
def masked(s, present, listed, phase, scale):
    """Logits in powers of two, −∞ of keys that are absent."""
    mbarrier.wait(listed, phase)
    there = present.load(gl.SliceLayout(0, LOGITS))
    return gl.where((there > 0)[None, :], s * scale, float("-inf"))


@gluon.jit
def copy_half(
    k, ready, SLOT: gl.constexpr, FIRST: gl.constexpr, row, nearby, WINDOW, run, W_ROW: gl.constexpr,
    E_ROW: gl.constexpr,
):  # fmt: skip
    """Columns FIRST … FIRST + 255 of the rows of a tile; zeros for rows that are absent (< 0)."""
    d = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, COPY))
    pool, stride = gl.where(nearby, WINDOW, run), gl.where(nearby, W_ROW, E_ROW)
    at = pool + gl.maximum(row, 0).to(gl.int64) * stride
    async_copy.async_copy_global_to_shared(k.index(SLOT), at[:, None] + d[None, :], mask=(row >= 0)[:, None])
    async_copy.mbarrier_arrive(ready.index(SLOT), increment_count=False)


# ---- products -------------------------------------------------------------------------------------------------------

LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
HEADS = gl.constexpr(gl.SliceLayout(1, LOGITS))
OWN = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))  # a warpgroup's own weights, in registers


@gluon.jit
def even_tiles(OUT, SINK, shared, barriers, lists, scale, N, T, W, K, H: gl.constexpr, LISTED: gl.constexpr):
    """The first tile of each pair, and the left half of the output."""
    q, k, _, _, _ = shared
    ready, free, _, asked, _ = barriers
    gdc_wait()
    done, turn = 0, 0
    for unit in range(gl.program_id(0), N * (H // 64), gl.num_programs(0)):
        pairs, acc, l, m = first(SINK, asked, lists, unit, turn, T, W, K, H, LISTED)
        s = logits(q, 0, k, A_LEFT, ready, done, gl.zeros([64, KEYS], gl.float32, LOGITS), False)
        s = logits(q, 1, k, A_RIGHT, ready, done, s, True)
        s = warpgroup_mma_wait(0, deps=[s])
        for _pair in range(1, pairs):
            acc, l, m = even_pair(s, acc, l, m, shared, barriers, scale, done)
            done += 1
            s = logits(q, 0, k, A_LEFT, ready, done, gl.zeros([64, KEYS], gl.float32, LOGITS), False)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(B_LEFT), count=1)
            s = logits(q, 1, k, A_RIGHT, ready, done, s, True)
            s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(asked.index(1), count=1)  # the next query may come while this one's last pair is multiplied
        acc, l, m = even_pair(s, acc, l, m, shared, barriers, scale, done)
        share_sums(l, shared, barriers, 0)
        done += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(B_LEFT), count=1)
        last(OUT, SINK, shared, barriers, acc, l, m, unit, turn, 0, H)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def even_pair(s, acc, l, m, shared, barriers, scale, done):
    """(output, sums, maxima) after a pair of tiles, given q·k of the first. The last product of the output runs on."""
    _, k, weights, rows, present = shared
    ready, free, listed, _, between = barriers
    phase = done & 1
    s = masked(s, present.index(0), listed.index(0), phase, scale)
    top = gl.maximum(m, gl.max(s, 1))
    safe = gl.where(top == float("-inf"), 0.0, top)  # −inf − −inf is NaN
    keep, p = gl.exp2(m - safe), gl.exp2(s - safe[:, None])
    rows.index(0).store(top)
    mbarrier.arrive(between.index(A_TOP), count=1)
    l = l * keep + gl.sum(p, 1)
    acc *= spread(keep)
    acc = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), OWN), at(k, A_LEFT, done), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(A_LEFT), count=1)
    # The second tile may have a larger maximum.
    mbarrier.wait(between.index(B_TOP), phase)
    m = rows.index(1).load(HEADS)
    keep = gl.exp2(top - gl.where(m == float("-inf"), 0.0, m))
    tma.store_wait(0)  # of the query before
    weights.index(0).store((p * keep[:, None]).to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(between.index(A_WEIGHTS), count=1)
    l, acc = l * keep, acc * spread(keep)
    mbarrier.wait(between.index(B_WEIGHTS), phase)  # and its keys, which the second warpgroup has multiplied
    fence_async_shared()
    return warpgroup_mma(at(weights, 1, done), at(k, B_LEFT, done), acc, is_async=True), l, m


@gluon.jit
def odd_tiles(OUT, SINK, shared, barriers, lists, scale, N, T, W, K, H: gl.constexpr, LISTED: gl.constexpr):
    """The second tile of each pair, and the right half of the output."""
    q, k, weights, rows, present = shared
    ready, free, listed, asked, between = barriers
    gdc_wait()
    done, turn = 0, 0
    for unit in range(gl.program_id(0), N * (H // 64), gl.num_programs(0)):
        pairs, acc, l, m = first(SINK, asked, lists, unit, turn, T, W, K, H, LISTED)
        for pair in range(pairs):
            phase = done & 1
            s = logits(q, 1, k, B_RIGHT, ready, done, gl.zeros([64, KEYS], gl.float32, LOGITS), False)
            s = logits(q, 0, k, B_LEFT, ready, done, s, True)
            s = warpgroup_mma_wait(0, deps=[s])
            if pair == pairs - 1:
                mbarrier.arrive(asked.index(1), count=1)
            s = masked(s, present.index(1), listed.index(1), phase, scale)
            top = gl.max(s, 1)
            mbarrier.wait(between.index(A_TOP), phase)
            top = gl.maximum(rows.index(0).load(HEADS), top)
            safe = gl.where(top == float("-inf"), 0.0, top)
            keep, p = gl.exp2(m - safe), gl.exp2(s - safe[:, None])
            rows.index(1).store(top)
            mbarrier.arrive(between.index(B_TOP), count=1)
            m, l, acc = top, l * keep + gl.sum(p, 1), acc * spread(keep)
            if pair == pairs - 1:
                share_sums(l, shared, barriers, 1)
            mine = gl.convert_layout(p.to(gl.bfloat16), OWN)
            acc = warpgroup_mma(mine, at(k, B_RIGHT, done), acc, is_async=True)
            tma.store_wait(0)  # of the query before
            weights.index(1).store(p.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(between.index(B_WEIGHTS), count=1)
            mbarrier.wait(between.index(A_WEIGHTS), phase)  # and its keys, which the first warpgroup has multiplied
            fence_async_shared()
            acc = warpgroup_mma(at(weights, 0, done), at(k, A_RIGHT, done), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(B_RIGHT), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(A_RIGHT), count=1)
            done += 1
        last(OUT, SINK, shared, barriers, acc, l, m, unit, turn, 1, H)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def first(SINK, asked, lists, unit, turn, T, W, K, H: gl.constexpr, LISTED: gl.constexpr):
    """(pairs of tiles, output, sums, maxima) of a query before any tile, when it is there."""
    _, pairs = seen_by(unit // (H // 64), lists, T, W, K, LISTED)
    acc, l, m = gl.zeros([64, HALF], gl.float32, OUTPUT), gl.zeros([64], gl.float32, HEADS), sink_of(SINK, unit, H)
    mbarrier.wait(asked.index(0), turn & 1)
    return pairs, acc, l, m


@gluon.jit
def sink_of(SINK, unit, H: gl.constexpr):
    """logits[:, :, -1] = sink, in powers of two."""
    head = unit % (H // 64) * 64 + gl.arange(0, 64, HEADS)
    return gl.load(SINK + head).to(gl.float32) * LOG2E


@gluon.jit
def at(shared, i: gl.constexpr, done):
    """shared.index(i) by an address that the compiler cannot know before the loop over tiles (done < 2^30): it would
    keep a descriptor of every product in registers, which there are not."""
    return shared.index(i + (done >> 30))


@gluon.jit
def logits(q, PART: gl.constexpr, k, SLOT: gl.constexpr, ready, done, s, ADDED: gl.constexpr):
    """Half the columns of q·k, which runs on; added to s if ADDED."""
    mbarrier.wait(ready.index(SLOT), done & 1)
    fence_async_shared()
    return warpgroup_mma(at(q, PART, done), at(k, SLOT, done).permute([1, 0]), s, use_acc=ADDED, is_async=True)


@gluon.jit
def share_sums(l, shared, barriers, WHICH: gl.constexpr):
    """Let the other warpgroup have the sums of the last tile, before the products with it have ended."""
    _, _, _, rows, _ = shared
    _, _, _, _, between = barriers
    rows.index(2 + WHICH).store(l)
    mbarrier.arrive(between.index(A_SUM + WHICH), count=1)


@gluon.jit
def spread(factor):
    return gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))[:, None]


@gluon.jit
def last(OUT, SINK, shared, barriers, acc, l, m, unit, turn, WHICH: gl.constexpr, H: gl.constexpr):
    """What each warpgroup does when it has multiplied all tiles of a query: adds the other's sums to its own, and
    writes its 256 columns of the output, 64 at a time by way of its weights and another buffer."""
    _, _, weights, rows, _ = shared
    _, _, _, _, between = barriers
    mbarrier.arrive(between.index(A_DONE + WHICH), count=1)
    mbarrier.wait(between.index(B_SUM - WHICH), turn & 1)
    l += rows.index(3 - WHICH).load(HEADS)
    l += gl.exp2(sink_of(SINK, unit, H) - gl.where(m == float("-inf"), 0.0, m))
    out = (acc * spread(1.0 / l)).to(gl.bfloat16)
    left, right = halves(out)
    a, b = halves(left)
    c, d = halves(right)
    column = WHICH * HALF
    write_columns(OUT, weights.index(2 + WHICH), a, unit, column)
    mbarrier.wait(between.index(B_DONE - WHICH), turn & 1)  # the other has multiplied with the weights
    write_columns(OUT, weights.index(WHICH), b, unit, column + 64)
    write_columns(OUT, weights.index(2 + WHICH), c, unit, column + 128)
    write_columns(OUT, weights.index(WHICH), d, unit, column + 192)


@gluon.jit
def halves(x):
    """[64, C] → two of [64, C / 2]."""
    C: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [64, 2, C]), [0, 2, 1]))


@gluon.jit
def write_columns(OUT, buffer, x, unit, column):
    tma.store_wait(1)  # what was in the buffer: the other one may still be read
    buffer.store(x)
    fence_async_shared()
    tma.async_copy_shared_to_global(OUT, [unit * 64, column], buffer)
