"""Exact selection of the k best entries of a few long rows, in one launch.

The search descends a hierarchy: scores, maxima of 8 entries, maxima of 64. Several programs share a row, and each makes
the whole descent. At each level, from the coarsest, a bound is found that at least k and at most 2·k groups reach;
those groups are listed, and their members are searched at the next level. Below the coarsest level the same bound
mostly suffices, and no search is needed. Each program then ranks a part of the last list, which holds entries: an
entry's rank is its place in the result. No program waits for another.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.indexer.triton_narrow import score_of
from dsv4.kernels.indexer.triton_scores import GROUP, monotone
from dsv4.kernels.indexer.triton_topk import level_groups, row_of_program, seen_entries, sortable, start_level

_LOWEST, _LEAST = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))
_MINUS_INF = tl.constexpr(-2139095041)  # monotone(−inf)
_NOWHERE = tl.constexpr(1 << 27)  # a group after every other
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _bound(key, low, k, most):
    """(bound ≥ low, how many keys reach it, how many exceed it). At least min(k, those that reach `low`) reach it, and
    at most `most` ≥ k unless several equal it. The last count means something only if more do."""
    reach = tl.sum((key >= low).to(tl.int32))
    above = reach * 0
    if reach > most:
        high = tl.max(key).to(tl.int64) + 1  # fewer than k reach it
        start = tl.min(tl.where(key >= low, key, 2147483647)).to(tl.int64)
        tries = reach * 0
        while (reach > most) & (high - start > 1):
            third = tl.maximum(((high - start) * 21845) >> 16, 1)
            first, second = start + third, start + 2 * third
            if tries < 3:  # thirds of the scores are better steps than thirds of their bits, but might never end
                least, best = score_of(start.to(tl.int32)), score_of((high - 1).to(tl.int32))
                first = monotone(least + (best - least) * 0.33333334).to(tl.int64)
                second = monotone(least + (best - least) * 0.6666667).to(tl.int64)
                first = tl.maximum(tl.minimum(first, high - 1), start + 1)
            second = tl.maximum(tl.minimum(second, high - 1), first)
            tries += 1
            # Both counts in one sum, 16 bits each.
            both = tl.sum((key >= first.to(tl.int32)).to(tl.int32) + ((key >= second.to(tl.int32)).to(tl.int32) << 16))
            n1, n2 = both & 0xFFFF, (both >> 16) & 0xFFFF
            if n2 >= k:
                start, reach = second, n2
            elif n1 >= k:
                start, reach, high, above = first, n1, second, n2
            else:
                high, above = first, n1
        low = start.to(tl.int32)
    return low, reach, above


@triton.jit
def _marks(x):
    """Which of each row of x bool [R, 8] are true, four bits each: int32 [R]. Whole rows are then counted and placed
    instead of single numbers, so that threads exchange no keys."""
    return tl.sum(x.to(tl.int32) << (4 * tl.arange(0, _GROUP))[None, :], 1)


@triton.jit
def _counted(marks):
    """How many are marked in each row."""
    return ((marks * 0x11111111) >> 28) & 15


@triton.jit
def _marks_of_k(key, bound, wanted):
    """`_marks` of the keys that exceed the bound and of the first `wanted` that equal it."""
    marks, equal = _marks(key > bound), _marks(key == bound)
    left = wanted - tl.cumsum(_counted(equal), 0) + _counted(equal)
    for member in range(_GROUP):
        one = (equal >> (4 * member)) & 1
        marks += tl.where(left > 0, one, 0) << (4 * member)
        left -= one
    return marks


@triton.jit
def _list_best(SCORES, MAXIMA, LIST, seen, second, k, ROOM: tl.constexpr, LEVELS: tl.constexpr):
    """(at most ROOM entries < seen of a row, the k best among them, in order; how many). LIST int32 [3·ROOM] begins
    with them."""
    j, member = tl.arange(0, ROOM), tl.arange(0, _GROUP)
    level = start_level(seen, ROOM * _GROUP, LEVELS)
    group, listed = j, seen * 0 + ROOM
    bound = seen * 0 + (_LOWEST + 1)
    while level >= 0:
        at = group[:, None] * _GROUP + member[None, :]
        live = at < level_groups(seen, level)
        if level == 0:
            key = monotone(tl.load(SCORES + at, mask=live, other=0.0))
        else:  # rows of maxima are padded to whole groups, which can be read at once
            maxima = MAXIMA + tl.where(level == 1, 0, second // 16) * 16
            key = tl.load(maxima + at, mask=(group * _GROUP < level_groups(seen, level))[:, None])
        key = tl.where(live, key, _LOWEST)
        bound, listed, above = _bound(key, bound, k, ROOM)
        marks = _marks(key >= bound)
        if listed > ROOM:
            marks = _marks_of_k(key, bound, k - above)
            listed = listed * 0 + k
        # Rows move to the threads that list them; the compiler would otherwise move them eight times in the loop.
        row = tl.gather(group.to(tl.int64) << 32 | marks.to(tl.int64) & 0xFFFFFFFF, j, 0)
        marks, first = row.to(tl.int32), (row >> 32).to(tl.int32) * _GROUP
        place = tl.cumsum(_counted(marks), 0) - _counted(marks) + level * ROOM
        for m in range(_GROUP):
            one = (marks >> (4 * m)) & 1
            tl.store(LIST + place, first + m, mask=one > 0)
            place += one
        tl.debug_barrier()  # other threads read the list than wrote it
        group = tl.load(LIST + level * ROOM + j, mask=j < listed, other=_NOWHERE)
        level -= 1
    return group, listed


@triton.jit
def _sortables(SCORES, entry, live):
    """`sortable` of entries, the least number if not live."""
    return tl.where(live, sortable(monotone(tl.load(SCORES + entry, mask=live, other=0.0)), entry), _LEAST)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "second", "k"])
def hierarchical_topk(
    SCORES,
    MAXIMA,
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
    SEEN: tl.constexpr,
    LEVELS: tl.constexpr,
    ROOM: tl.constexpr,
    MINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The k best of the entries < seen of a row (axis 0), each at its rank, to OUT int64 [rows, k], −1 where there are
    not as many or a score is −inf. Programs of axis 1 share the row. ROOM ≥ k, and at least an eighth of the keys of
    the coarsest level.

    LIST int32 [programs, 3·ROOM]: scratch.
    """
    row, b, t = row_of_program(T)
    j = tl.arange(0, ROOM)
    program = row * tl.num_programs(1) + tl.program_id(1)
    SCORES += b * s_b + t * s_t
    LIST += program * (3 * ROOM)
    OUT += row * k
    if LEVELS:  # the previous kernel made the maxima, so it has waited for the kernel that wrote `visible`
        seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if LEVELS == 0:
        seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    others, count = _list_best(SCORES, MAXIMA + row * width, LIST, seen, second, k, ROOM, LEVELS)
    if (count < k) & (tl.program_id(1) == 0):
        tl.store(OUT + j, tl.full([ROOM], -1, tl.int64), mask=(j >= count) & (j < k))
    y = _sortables(SCORES, others, j < count)
    for first in range(tl.program_id(1) * MINE, count, tl.num_programs(1) * MINE):
        mine = first + tl.arange(0, MINE)
        entry = tl.load(LIST + mine, mask=mine < count, other=0)
        x = _sortables(SCORES, entry, mine < count)
        rank = tl.sum((y[None, :] > x[:, None]).to(tl.int32), 1)
        tl.store(
            OUT + rank, tl.where((x >> 32) == _MINUS_INF, -1, entry).to(tl.int64), mask=(mine < count) & (rank < k)
        )
