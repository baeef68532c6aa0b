"""Device code of index scores for Hopper: queries and keys as E4M3 codes on wgmma.

A program takes tiles of four queries with their 64 heads, and pages of 64 keys. A warp copies both by TMA, and two
warpgroups multiply. While one multiplies a page, the other sums its page over the heads. The queries of the next tile
arrive meanwhile, so neither waits between tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

PAGE = gl.constexpr(64)  # keys of a product
QUERIES = gl.constexpr(4)  # of a tile
HEADS = gl.constexpr(64)
COLUMNS = gl.constexpr(256)  # heads of a tile
DIMS = gl.constexpr(128)
DOTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 32]))
# `DOTS` as [keys, queries, heads]: a thread has 16 heads of each query, of two keys.
BY_QUERY = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 64],
    )
)
SUMS = gl.constexpr(gl.SliceLayout(2, BY_QUERY))  # of [keys, queries]
BY_COLUMN = gl.constexpr(gl.SliceLayout(0, DOTS))
WHICH_QUERY, WHICH_KEY = gl.constexpr(gl.SliceLayout(0, SUMS)), gl.constexpr(gl.SliceLayout(1, SUMS))


@gluon.jit(do_not_specialize=["B", "T", "parts", "width"])
def scores(Q, FACTORS, ENDS, KEYS, SCALES, SCORES, B, T, padded, parts, width, STAGES: gl.constexpr):
    """SCORES fp32 [B·T, width]: score of entry e < ENDS of a query, which is SCALES · Σ_h 2 · FACTORS · relu(q · k)
    of codes; others are not written.

    Q: descriptor of codes [B·tiles·4·64, 128], in blocks of [256, 128]; FACTORS fp32 [B·tiles·4, 64]; ENDS int32
    [B·tiles·4], 0 from query T of a batch row on; tiles = ⌈T / 4⌉. KEYS: descriptor of codes [B·padded, 128], in blocks
    of [64, 128]; SCALES fp32 [B·padded]; padded is a multiple of 64. A unit of work is one of `parts` of a tile, which
    takes every parts-th page. A NaN among a query's factors, or as a key's scale, makes scores NaN. STAGES: pages in
    shared memory, an even number.
    """
    q = gl.allocate_shared_memory(Q.dtype, [2, COLUMNS, DIMS], Q.layout)
    k = gl.allocate_shared_memory(KEYS.dtype, [STAGES, PAGE, DIMS], KEYS.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    answered = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(asked.index(i), count=1)
        mbarrier.init(answered.index(i), count=2)
    barriers, sizes = (full, empty, asked, answered), (B, T, padded, parts, width)
    # The tuples are written out: of one with a name, numbers known at compile time would become values.
    gl.warp_specialize(
        [
            (score_pages, (0, FACTORS, ENDS, SCALES, SCORES, q, k, barriers, sizes, STAGES)),
            (score_pages, (1, FACTORS, ENDS, SCALES, SCORES, q, k, barriers, sizes, STAGES)),
            (copy_operands, (Q, KEYS, ENDS, q, k, barriers, sizes, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


# ---- order of the work ----------------------------------------------------------------------------------------------


@gluon.jit
def rounds_of(sizes):
    """Units of this program."""
    B, T, _, parts, _ = sizes
    units, programs = B * gl.cdiv(T, QUERIES) * parts, gl.num_programs(0)
    whole = units // programs
    return whole + (place_in_round(whole) < units % programs).to(gl.int32)


@gluon.jit
def place_in_round(turn):
    """Programs take turns in one direction and then in the other: units become shorter from one to the next, and so the
    sums for each program are about equal."""
    program = gl.program_id(0)
    return gl.where(turn % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def unit(turn, sizes):
    """(batch row, tile within it, part) of a program's unit; tiles of late queries first: they see the most entries."""
    B, T, _, parts, _ = sizes
    n = turn * gl.num_programs(0) + place_in_round(turn)
    tile = n // parts
    return tile % B, gl.cdiv(T, QUERIES) - 1 - tile // B, n % parts


@gluon.jit
def pages_of(end, part, parts):
    """Pages of a unit whose queries see entries < end."""
    return gl.cdiv(gl.maximum(gl.cdiv(end, PAGE) - part, 0), parts)


# ---- copies ---------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_operands(Q, KEYS, ENDS, q, k, barriers, sizes, STAGES: gl.constexpr):
    full, empty, asked, answered = barriers
    B, T, padded, parts, _ = sizes
    gdc_wait()
    done = 0
    for turn in range(rounds_of(sizes)):
        b, t, part = unit(turn, sizes)
        tile = b * gl.cdiv(T, QUERIES) + t
        slot = turn % 2
        mbarrier.wait(answered.index(slot), (turn // 2 & 1) ^ 1)
        mbarrier.expect(asked.index(slot), Q.block_type.nbytes)
        tma.async_copy_global_to_shared(Q, [tile * COLUMNS, 0], asked.index(slot), q.index(slot))
        end = gl.load(ENDS + tile * QUERIES)
        for i in gl.static_range(1, QUERIES):
            end = gl.maximum(end, gl.load(ENDS + tile * QUERIES + i))
        for i in range(pages_of(end, part, parts)):
            stage, page = done % STAGES, part + i * parts
            mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), KEYS.block_type.nbytes)
            tma.async_copy_global_to_shared(KEYS, [b * padded + page * PAGE, 0], full.index(stage), k.index(stage))
            done += 1


# ---- products -------------------------------------------------------------------------------------------------------


@gluon.jit
def score_pages(WHICH: gl.constexpr, FACTORS, ENDS, SCALES, SCORES, q, k, barriers, sizes, STAGES: gl.constexpr):
    """Every other page of this program, counted through all its units: so each stage belongs to one warpgroup, which
    takes all of its turns."""
    full, empty, asked, answered = barriers
    B, T, padded, parts, width = sizes
    tiles, rounds = gl.cdiv(T, QUERIES), rounds_of(sizes)
    query, row = gl.arange(0, QUERIES, WHICH_QUERY), gl.arange(0, PAGE, WHICH_KEY)
    column = gl.arange(0, COLUMNS, BY_COLUMN)
    gdc_wait()
    done = 0  # pages of both warpgroups
    b, t, part = unit(0, sizes)
    ends = gl.load(ENDS + (b * tiles + t) * QUERIES + query)
    for turn in range(rounds):
        slot = turn % 2
        # The next unit's ends are loaded while this one is multiplied.
        next_b, next_t, next_part = unit(gl.minimum(turn + 1, rounds - 1), sizes)
        next_ends = gl.load(ENDS + (next_b * tiles + next_t) * QUERIES + query)
        pages = pages_of(gl.max(ends, 0), part, parts)
        factors = gl.load(FACTORS + (b * tiles + t) * COLUMNS + column)
        scales = SCALES + b.to(gl.int64) * padded
        out = SCORES + (b.to(gl.int64) * T + t * QUERIES) * width
        mbarrier.wait(asked.index(slot), turn // 2 & 1)
        first = (done + WHICH) % 2
        for i in range(first, pages, 2):
            stage, e = (done + i) % STAGES, (part + i * parts) * PAGE + row
            mbarrier.wait(full.index(stage), (done + i) // STAGES & 1)
            dots = gl.zeros([PAGE, COLUMNS], gl.float32, DOTS)
            dots = warpgroup_mma(k.index(stage), q.index(slot).permute([1, 0]), dots, use_acc=False, is_async=True)
            scale = gl.load(scales + e)
            dots = warpgroup_mma_wait(0, deps=[dots])
            mbarrier.arrive(empty.index(stage), count=1)
            s = sum_heads(dots, factors) * scale[:, None]
            gl.store(out + query[None, :] * width + e[:, None], s, mask=e[:, None] < ends[None, :])
        mbarrier.arrive(answered.index(slot), count=1)
        done += pages
        b, t, part, ends = next_b, next_t, next_part, next_ends


@gluon.jit
def sum_heads(dots, factors):
    """Σ_h 2 · factor · relu(dots): [keys, queries · heads] → [keys, queries]."""
    twice = dots + gl.abs(dots)  # twice relu, exactly, and NaN stays NaN
    weighed = gl.reshape(twice * factors[None, :], [PAGE, QUERIES, HEADS])
    return gl.sum(gl.convert_layout(weighed, BY_QUERY), 2)
