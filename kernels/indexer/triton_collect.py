"""Exact selection of the k best entries of a few long rows, by programs that share a row.

Maxima of groups of entries give a bound that at least k groups reach, and few more. So all k best entries reach it.
Each program finds the bound, and lists the entries that reach it of its own part of the groups (`collect`). The rank of
each listed entry among all of them is its place in the result (`rank_found`). No program waits for another, and none
adds to a counter of another.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.indexer.triton_narrow import narrow
from dsv4.kernels.indexer.triton_scores import monotone
from dsv4.kernels.indexer.triton_topk import (
    descend,
    first_row,
    level_groups,
    numbered,
    row_of_program,
    seen_entries,
    sortable,
    start_level,
)

_LOWEST, _LEAST = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))
_MINUS_INF = tl.constexpr(-2139095041)  # monotone(−inf)


@triton.jit
def _keys(SCORES, MAXIMA, at, live, level, second):
    """`level_keys` of consecutive or equidistant numbers, by one load for all levels."""
    bits = SCORES.to(tl.pointer_type(tl.int32), bitcast=True)
    first = tl.where(level == 0, bits, MAXIMA + tl.where(level == 1, 0, second))
    key = tl.load(first + at, mask=live, other=0)
    key = tl.where(level == 0, monotone(key.to(tl.float32, bitcast=True)), key)
    return tl.where(live, key, _LOWEST)


@triton.jit
def _bound(key, live, k, CLASSES: tl.constexpr):
    """A number that at least min(k, live) of key int32 [C] reach, and at most 1.25·k unless several equal it. key holds
    the least number from `live` on."""
    best = tl.max(tl.reshape(key, [key.shape[0] // CLASSES, CLASSES]), 0)
    # Each of at least k classes has a key no lower than the lowest of their maxima. Both ends in one reduction.
    low, high = tl.split(tl.min(tl.join(best, ~best), 0))
    low, _, _ = narrow(key, low, tl.maximum(live, k), ~high, k, k + k // 4, k * 0 + 1)
    return low


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "second", "k"])
def collect(
    SCORES,
    MAXIMA,
    GROUPS,
    COUNTS,
    FOUND,
    VISIBLE,
    T,
    n,
    s_b,
    s_t,
    v_b,
    v_t,
    width,
    second,
    k,
    SEEN: tl.constexpr,
    CLASSES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    THREADS: tl.constexpr,
    ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entries of every PARTS-th group of a row (axis 0), from the one of axis 1 on, that may be among the k best, as
    `sortable` numbers to FOUND int64 [rows, PARTS, ROOM].

    COUNTS int32 [rows, PARTS]: how many there are, also beyond ROOM. GROUPS int32 [rows, PARTS, CANDIDATES / PARTS]:
    scratch. LEVELS ≥ 1; CANDIDATES is a multiple of CLASSES ≥ k and of PARTS.
    """
    row, b, t = row_of_program(T)
    part = tl.program_id(1)
    SCORES += b * s_b + t * s_t
    MAXIMA += row * width
    GROUPS += (row * PARTS + part) * (CANDIDATES // PARTS)
    FOUND += (row * PARTS + part) * ROOM
    COUNTS += row * PARTS + part
    # The previous kernel made the maxima, so it has waited for the kernel that wrote `visible`.
    seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    level = start_level(seen, CANDIDATES, LEVELS)
    groups = level_groups(seen, level)
    every = tl.arange(0, CANDIDATES)
    # Entries that lie next to each other, which may all be good ones, are shared by all programs.
    own = part + PARTS * tl.arange(0, CANDIDATES // PARTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    key = _keys(SCORES, MAXIMA, every, every < groups, level, second)
    own_key = _keys(SCORES, MAXIMA, own, own < groups, level, second)
    bound = _bound(key, groups, k, CLASSES)
    reached = ((own < groups) & (own_key >= bound)).to(tl.int32)
    listed = tl.sum(reached, 0)
    tl.store(GROUPS + tl.cumsum(reached, 0) - reached, own, mask=reached > 0)
    tl.store(COUNTS, 0)
    tl.debug_barrier()  # other threads read the list than wrote it
    thread, count, members = tl.arange(0, THREADS), seen * 0, listed << (3 * level)
    for start in range(0, members, ROUNDS * THREADS):
        mine, numbers, found = thread * 0, (), ()  # of each thread, so that only their sums are exchanged
        for i in tl.static_range(ROUNDS):
            member = start + i * THREADS + thread
            group = member >> (3 * level)
            entry = tl.load(GROUPS + group, mask=group < listed, other=0) << (3 * level)
            entry += member & ((1 << (3 * level)) - 1)
            live = (group < listed) & (entry < seen)
            x = monotone(tl.load(SCORES + entry, mask=live, other=0.0))
            numbers = numbers + (sortable(x, entry),)
            found = found + (live & (x >= bound),)
            mine += found[i].to(tl.int32)
        place = count + tl.cumsum(mine, 0) - mine  # in any order: `rank_found` orders them
        for i in tl.static_range(ROUNDS):
            tl.store(FOUND + place, numbers[i], mask=found[i] & (place < ROOM))
            place += found[i].to(tl.int32)
        tl.store(COUNTS + thread * 0, place, mask=thread == THREADS - 1)
        if start + ROUNDS * THREADS < members:
            count += tl.sum(mine, 0)


@triton.jit
def _found(FOUND, counts, first, PARTS: tl.constexpr, ROOM: tl.constexpr, EACH: tl.constexpr):
    """The numbers first … first + EACH of every part: int64 [PARTS·EACH], the least number where there is none."""
    part, at = tl.arange(0, PARTS)[:, None], first + tl.arange(0, EACH)[None, :]
    # What was not written is read nonetheless, so that no load waits for the counts.
    x = tl.load(FOUND + part * ROOM + at, mask=(part >= 0) & (at < ROOM), other=0)
    return tl.reshape(tl.where(at < counts[:, None], x, _LEAST), [PARTS * EACH])


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "second", "k", "first", "RUN"])
def rank_found(
    SCORES,
    MAXIMA,
    COUNTS,
    FOUND,
    LIST,
    OUT,
    VISIBLE,
    T,
    n,
    s_b,
    s_t,
    v_b,
    v_t,
    width,
    second,
    k,
    first,
    RUN,
    SEEN: tl.constexpr,
    CLASSES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    K: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The k best of a row (axis 0) among what `collect` found, each at its rank, to OUT int64 [rows, k]; −1 where there
    are not as many or a score is −inf. An entry is written as (first + its batch row) · RUN + its number, with RUN.
    Programs of axis 1 rank MINE of every part at a time.

    If a part had more than there is room for, the first program descends instead, with scratch LIST int32 [rows,
    CANDIDATES / 4].
    """
    row, b, t = row_of_program(T)
    FOUND += row * (PARTS * ROOM)
    OUT += row * k
    base = first_row(b, first, RUN)  # not beside another: Triton 3.6.0 takes no None in an assignment of several
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.load(COUNTS + row * PARTS + tl.arange(0, PARTS))
    most, begin = tl.max(counts, 0), tl.program_id(1) * MINE
    if most > ROOM:
        if begin == 0:
            seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
            SCORES += b * s_b + t * s_t
            LIST += row * (CANDIDATES // 4)
            descend(SCORES, MAXIMA + row * width, LIST, OUT, seen, second, k, base, CLASSES, CANDIDATES, LEVELS)
        return
    if begin == 0:
        i = tl.arange(0, K)
        tl.store(OUT + i, tl.full([K], -1, tl.int64), mask=(i >= tl.sum(counts, 0)) & (i < k))
    for mine in range(begin, most, tl.num_programs(1) * MINE):
        x = _found(FOUND, counts, mine, PARTS, ROOM, MINE)
        y = _found(FOUND, counts, 0, PARTS, ROOM, OTHERS)
        higher = tl.zeros([PARTS, PARTS * MINE], tl.int32)
        for start in range(OTHERS, most + OTHERS, OTHERS):
            ahead = _found(FOUND, counts, start, PARTS, ROOM, OTHERS)  # loaded while these are compared
            one = (y[:, None] > x[None, :]).to(tl.int32)
            higher += tl.sum(tl.reshape(one, [OTHERS, PARTS, PARTS * MINE]), 0)  # within each thread
            y = ahead
        rank = tl.sum(higher, 0)
        entry = 2147483647 - (x & 2147483647)
        tl.store(
            OUT + rank, numbered(tl.where((x >> 32) == _MINUS_INF, -1, entry), base), mask=(x > _LEAST) & (rank < k)
        )
