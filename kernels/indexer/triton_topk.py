"""Exact selection of the k best entries, without sorting.

Scores become integers in the same order (`monotone`). Long rows come with the maxima of each 8 entries, and of each 8
of those. The k best of n entries lie under the k best of the n/8 maxima, if ties go to the lowest index there too:
every other entry has k better ones. So a row is searched from the coarsest level down, 8·k candidates at a time
(`descend`), each time for the threshold that exactly k reach, by narrowing an interval of integers.

For a few rows, as in decoding, that takes too many sequential steps. Of few entries each is ranked among all
(`rank_entries`); in long rows `triton_collect` first collects those that may be among the k best.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.indexer.triton_scores import GROUP, monotone

_LOWEST, _LEAST = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))
_MINUS_INF = tl.constexpr(-2139095041)  # monotone(−inf)
_GROUP = tl.constexpr(GROUP)


@triton.jit
def narrow(key, low, high, reach, k, enough):
    """(t, how many of key int32 [C] reach it, how many exceed it): t ≥ low a number that at least k keys reach if they
    reach `low`, as `reach` of them do at most. Fewer than k reach `high`. Stops as soon as at most `enough` reach t."""
    low = low.to(tl.int64)
    above = reach * 0
    while (reach > enough) & (high - low > 1):
        third = tl.maximum(((high - low) * 21845) >> 16, 1)
        first, second = low + third, tl.minimum(low + 2 * third, high - 1)
        # Both counts in one sum, 16 bits each. Keys that are not live never exceed `low`.
        both = tl.sum((key >= first.to(tl.int32)).to(tl.int32) + ((key >= second.to(tl.int32)).to(tl.int32) << 16), 0)
        n1, n2 = both & 0xFFFF, (both >> 16) & 0xFFFF
        if n2 >= k:
            low, reach = second, n2
        elif n1 >= k:
            low, reach, high, above = first, n1, second, n2
        else:
            high, above = first, n1
    return low.to(tl.int32), reach, above


@triton.jit
def _threshold(key, live, floor, k, enough, CLASSES: tl.constexpr, CANDIDATES: tl.constexpr):
    """(t, count of keys ≥ t, count of keys > t): t a number that at least min(k, live) keys reach.

    key int32 [CANDIDATES], the least number where not live; floor: known to be reached by as many. Stops as soon as at
    most `enough` keys reach t: with enough = k those are the k best, unless several equal t. The last count means
    something only if more do.
    """
    if CLASSES:  # maxima of classes of keys, at least k: each class has a key no lower than the lowest of the maxima
        low = tl.min(tl.max(tl.reshape(key, [CANDIDATES // CLASSES, CLASSES]), 0), 0)
    else:
        low = tl.min(tl.where(live, key, 2147483647), 0)
    low = tl.maximum(low, floor).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1  # fewer than k reach it
    reach = tl.sum((live & (key >= low.to(tl.int32))).to(tl.int32), 0)
    return narrow(key, low, high, reach, k, enough)


@triton.jit
def first_row(b, first, RUN):
    """(first + b) · RUN, or None without RUN."""
    base = None
    if RUN is not None:
        base = (first + b) * RUN
    return base


@triton.jit
def numbered(entry, base):
    """An entry, −1 for none, as int64: base + its number, unless base is None."""
    number = entry.to(tl.int64)
    if base is not None:
        number = tl.where(number < 0, -1, base + number)
    return number


@triton.jit
def level_keys(SCORES, MAXIMA, at, live, level, second, LEVELS: tl.constexpr):
    """int32 keys of a level: scores at 0, maxima of 8 entries at 1, of 64 from `second` on at 2; the least number if
    dead."""
    if LEVELS == 0:
        key = monotone(tl.load(SCORES + at, mask=live, other=0.0))
    elif level == 0:
        key = monotone(tl.load(SCORES + at, mask=live, other=0.0))
    else:
        key = tl.load(MAXIMA + tl.where(level == 1, 0, second) + at, mask=live, other=0)
    return tl.where(live, key, _LOWEST)


@triton.jit
def start_level(seen, CANDIDATES: tl.constexpr, LEVELS: tl.constexpr):
    """The finest level whose keys all fit in one tile."""
    level = seen * 0
    if LEVELS > 0:
        level += (seen > CANDIDATES).to(tl.int32)
    if LEVELS > 1:
        level += (seen > CANDIDATES * _GROUP).to(tl.int32)
    return level


@triton.jit
def level_groups(seen, level):
    """How many keys of a level cover the entries < seen."""
    return (seen + (1 << (3 * level)) - 1) >> (3 * level)


@triton.jit
def descend(
    SCORES, MAXIMA, LIST, OUT, seen, second, k, base, CLASSES: tl.constexpr, CANDIDATES: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """The k best of the entries < seen of one row to OUT int64 [k], −1 where there are not as many or a score is −inf.
    An entry is written as `numbered` has it.

    LIST int32 [2·CANDIDATES/8]: scratch of the row.
    """
    i = tl.arange(0, CANDIDATES)
    tl.store(OUT + i, tl.full([CANDIDATES], -1, tl.int64), mask=(i >= seen) & (i < k))
    level = start_level(seen, CANDIDATES, LEVELS)
    floor = tl.full((), _LOWEST, tl.int32)
    at, live = i, i >= 0
    while level >= 0:
        live = live & (at < level_groups(seen, level))
        key = level_keys(SCORES, MAXIMA, at, live, level, second, LEVELS)
        floor, reach, above = _threshold(key, live, floor, k, k, CLASSES, CANDIDATES)
        # Of the keys that equal the threshold the first ones, so that k are chosen.
        wanted = tl.where(reach > k, k - above, CANDIDATES)
        higher, equal = live & (key > floor), live & (key == floor)
        one = higher.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(one, 0) - one
        ties = (before >> 16) & 0xFFFF
        chosen = higher | (equal & (ties < wanted))
        place = (before & 0xFFFF) + tl.minimum(ties, wanted)
        if level == 0:
            tl.store(OUT + place, numbered(tl.where(key == _MINUS_INF, -1, at), base), mask=chosen)
        else:
            half = LIST + (level & 1) * (CANDIDATES // 8)
            tl.store(half + place, at, mask=chosen)
            tl.debug_barrier()  # other threads read the list than wrote it
            live = i // _GROUP < tl.minimum(reach, k)
            at = tl.load(half + i // _GROUP, mask=live, other=0) * _GROUP + i % _GROUP
        level -= 1


@triton.jit
def row_of_program(T):
    """(row, its batch row, its query) as int64 of axis 0. The division has 32 bits: with 64 bits it takes a hundred
    instructions."""
    row = tl.program_id(0)
    return row.to(tl.int64), (row // T).to(tl.int64), (row % T).to(tl.int64)


@triton.jit
def seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN: tl.constexpr):
    """How many entries of a row count."""
    if SEEN:
        seen = tl.minimum(tl.maximum(tl.load(VISIBLE + b * v_b + t * v_t), 0), n).to(tl.int32)
    else:
        seen = tl.full((), 0, tl.int32) + n
    return seen


@triton.jit
def every_entry(OUT, seen, k, base, C: tl.constexpr):
    """Entries < seen ≤ k, `numbered`, to OUT int64 [k ≤ C], then −1."""
    i = tl.arange(0, C)
    tl.store(OUT + i, numbered(tl.where(i < seen, i, -1), base), mask=i < k)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "second", "k", "first", "RUN"])
def topk_of_rows(
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
    first,
    RUN,
    SEEN: tl.constexpr,
    SCORED: tl.constexpr,
    CLASSES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`descend` for one row a program. With RUN an entry is written as (first + its batch row) · RUN + its number.
    Without SCORED a row of seen ≤ k has no
    scores: all its entries are chosen."""
    row, b, t = row_of_program(T)
    base = first_row(b, first, RUN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    if not SCORED:
        if seen <= k:
            every_entry(OUT + row * k, seen, k, base, CANDIDATES)
            return
    descend(
        SCORES + b * s_b + t * s_t,
        MAXIMA + row * width,
        LIST + row * (CANDIDATES // 4),
        OUT + row * k,
        seen,
        second,
        k,
        base,
        CLASSES,
        CANDIDATES,
        LEVELS,
    )


@triton.jit
def sortable(key, entry):
    """int64 that orders by key, and entries of equal keys from the last to the first."""
    return (key.to(tl.int64) << 32) | (2147483647 - entry).to(tl.int64)


@triton.jit
def sortables(SCORES, at, seen):
    """`sortable` of entries, the least number from `seen` on."""
    key = monotone(tl.load(SCORES + at, mask=at < seen, other=0.0))
    return tl.where(at < seen, sortable(key, at), _LEAST)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "k", "first", "RUN"])
def rank_entries(
    SCORES,
    OUT,
    VISIBLE,
    T,
    n,
    s_b,
    s_t,
    v_b,
    v_t,
    k,
    first,
    RUN,
    SEEN: tl.constexpr,
    K: tl.constexpr,
    MINE: tl.constexpr,
    OTHERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The k best of the entries < seen of a row (axis 0), each at its rank, to OUT int64 [rows, k], −1 where there are
    not as many or a score is −inf. With RUN an entry is written as (first + its batch row) · RUN + its number.
    Programs of axis 1 share the entries."""
    row, b, t = row_of_program(T)
    base = first_row(b, first, RUN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    SCORES += b * s_b + t * s_t
    OUT += row * k
    if tl.program_id(1) == 0:
        i = tl.arange(0, K)
        tl.store(OUT + i, tl.full([K], -1, tl.int64), mask=(i >= seen) & (i < k))
    for at in range(tl.program_id(1) * MINE, seen, tl.num_programs(1) * MINE):
        mine = at + tl.arange(0, MINE)
        x = sortables(SCORES, mine, seen)
        rank = tl.zeros([MINE], tl.int32)
        for start in range(0, seen, OTHERS):
            y = sortables(SCORES, start + tl.arange(0, OTHERS), seen)
            rank += tl.sum((y[None, :] > x[:, None]).to(tl.int32), 1)
        entry = 2147483647 - (x & 2147483647)
        tl.store(
            OUT + rank, numbered(tl.where((x >> 32) == _MINUS_INF, -1, entry), base), mask=(mine < seen) & (rank < k)
        )


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "second"])
def maxima_of_rows(
    SCORES,
    MAXIMA,
    VISIBLE,
    T,
    n,
    s_b,
    s_t,
    v_b,
    v_t,
    width,
    second,
    SEEN: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The maxima of one chunk (axis 1) of a row (axis 0), as the scores' kernel writes them."""
    row, b, t = row_of_program(T)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    entry = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(1) * CHUNK >= seen:
        return
    key = monotone(tl.load(SCORES + b * s_b + t * s_t + entry, mask=entry < seen, other=float("-inf")))
    best = tl.max(tl.reshape(key, [CHUNK // _GROUP, _GROUP]), 1)
    at = tl.program_id(1) * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
    tl.store(MAXIMA + row * width + at, best, mask=at < level_groups(seen, 1))
    if LEVELS > 1:
        best = tl.max(tl.reshape(best, [CHUNK // 64, _GROUP]), 1)
        at = tl.program_id(1) * (CHUNK // 64) + tl.arange(0, CHUNK // 64)
        tl.store(MAXIMA + row * width + second + at, best, mask=at < level_groups(seen, 2))


@triton.jit(do_not_specialize=["n", "T", "v_b", "v_t", "RUN"])
def visible_entries(OUT, VISIBLE, T, n, v_b, v_t, RUN, BLOCK: tl.constexpr):
    """OUT int64 [rows, n]: each entry, with RUN as b · RUN + its number, −1 from VISIBLE[b, t] on. One row a
    program."""
    row, b, t = row_of_program(T)
    seen = tl.load(VISIBLE + b * v_b + t * v_t)
    for start in range(0, n, BLOCK):
        e = start + tl.arange(0, BLOCK)
        tl.store(OUT + row * n + e, numbered(tl.where(e < seen, e, -1), first_row(b, 0, RUN)), mask=e < n)
