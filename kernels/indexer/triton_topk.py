"""Exact selection of the k best entries, without sorting.

Scores become integers in the same order (`monotone`), and with their index numbers of which no two are equal (`_sortable`). A
number that at least k of a tile reach is found by narrowing an interval (`_reached`); with exactly k, these are the chosen ones.

More entries than a tile holds are filtered first. Of the maxima of any groups of entries take a bound that k of them reach: the
k best entries all reach it, and few others, if the groups are small. Those that do are listed, by one program for a row or, for
few rows, by many, of which the last one to end goes over the lists of all. A list that gets too long raises its own bound.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cache_rows.formats import PAGE
from kernels.indexer.triton_scores import monotone

_LOWEST, _LEAST = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))
_MINUS_INF = tl.constexpr(-2139095041)  # monotone(−inf)
_PAGE = tl.constexpr(PAGE)


@triton.jit
def _sortable(key, entry):
    """int64 that orders by key, and entries of equal keys from the last to the first."""
    return (key.to(tl.int64) << 32) | (2147483647 - entry).to(tl.int64)


@triton.jit
def _reached(x, live, k, enough, CLASSES: tl.constexpr):
    """A number that at least min(k, live) of x reach, and at most `enough` ≥ k unless many are equal.

    x int32 or int64 [C], the least number of its type but for `live` of them; C is a multiple of CLASSES ≥ k.
    """
    C: tl.constexpr = x.shape[0]
    MOST: tl.constexpr = 2 ** (x.dtype.primitive_bitwidth - 1) - 1
    best = tl.max(tl.reshape(x, [CLASSES, C // CLASSES]), 1)
    low = tl.min(best, 0)  # each class has a number that reaches it
    low = tl.maximum(low, tl.min(tl.where(x == -MOST - 1, MOST, x), 0)).to(tl.int64)  # or all, if there are empty classes
    high = tl.max(best, 0).to(tl.int64)
    reach = live
    while (reach > enough) & (low < high):
        step = (high >> 2) - (low >> 2)  # the interval itself might overflow
        step = tl.maximum(step + (step >> 2), 1)
        first = tl.minimum(low + step, high)
        second = tl.minimum(first + step, high)
        # Both counts in one sum, 16 bits each.
        both = tl.sum((x >= first.to(x.dtype)).to(tl.int32) + ((x >= second.to(x.dtype)).to(tl.int32) << 16), 0)
        n1, n2 = both & 0xFFFF, (both >> 16) & 0xFFFF
        if n2 >= k:
            low, reach = second, n2
        elif n1 >= k:
            low, reach, high = first, n1, second - 1
        else:
            high = first - 1
    return low.to(x.dtype)


@triton.jit
def _emit(x, live, OUT, k, CLASSES: tl.constexpr):
    """The k best of `live` `_sortable` numbers of x [C] to OUT int64 [k] in their order, −1 for those of −inf and none."""
    i = tl.arange(0, x.shape[0])
    tl.store(OUT + i, tl.full([x.shape[0]], -1, tl.int64), mask=(i >= live) & (i < k))
    bound = _reached(x, live, k, k, CLASSES)
    chosen = (x >= bound) & (x > _LEAST)
    one = chosen.to(tl.int32)
    place = tl.cumsum(one, 0) - one
    entry = 2147483647 - (x & 2147483647)
    tl.store(OUT + place, tl.where((x >> 32) == _MINUS_INF, -1, entry), mask=chosen & (place < k))


@triton.jit
def _keep(LIST, base, x, bound):
    """Append the numbers of x [C] that reach `bound` to LIST of `base`. Returns how many there are then."""
    kept = ((x >> 32) >= bound) & (x > _LEAST)
    one = kept.to(tl.int32)
    tl.debug_barrier()  # x may be a part of the list that is written over
    tl.store(LIST + base + tl.cumsum(one, 0) - one, x, mask=kept)
    return base + tl.sum(one, 0)


@triton.jit
def _shorten(LIST, base, bound, k, C: tl.constexpr, CLASSES: tl.constexpr):
    """LIST of base ≤ 2·C numbers without some that are not among the k best, at most 3·k ≤ C: (its length, a bound of keys)."""
    i = tl.arange(0, C)
    tl.debug_barrier()  # other threads read than wrote
    x, y = tl.load(LIST + i), tl.load(LIST + C + i, mask=C + i < base, other=_LEAST)
    reached = _reached(tl.maximum(x, y), C, k, k + k // 2, CLASSES)
    least = reached >> 32
    base = _keep(LIST, base * 0, tl.where(x >= reached, x, _LEAST), least)
    base = _keep(LIST, base, tl.where(y >= reached, y, _LEAST), least)
    return base, tl.maximum(bound, least.to(tl.int32))


@triton.jit
def _seen(VISIBLE, b, t, n, v_b, v_t, SEEN: tl.constexpr):
    """How many entries of a row count."""
    if SEEN:
        seen = tl.minimum(tl.maximum(tl.load(VISIBLE + b * v_b + t * v_t), 0), n).to(tl.int32)
    else:
        seen = tl.full((), 0, tl.int32) + n
    return seen


@triton.jit
def _bound(SCORES, MAXIMA, seen, k, C: tl.constexpr, CLASSES: tl.constexpr, GROUP: tl.constexpr):
    """A key that at least k of the entries < seen reach, from the maxima of groups; without maxima from every C-th entry's."""
    i = tl.arange(0, C)
    best = tl.full([C], _LOWEST, tl.int32)
    count = seen
    if GROUP:
        count = tl.cdiv(seen, _PAGE) * (_PAGE // GROUP)
    for start in range(0, count, C):
        if GROUP:
            key = tl.load(MAXIMA + start + i, mask=start + i < count, other=_LOWEST)
        else:
            key = tl.load(SCORES + start + i, mask=start + i < count, other=float("-inf"))
            key = tl.where(start + i < count, monotone(key), _LOWEST)
        best = tl.maximum(best, key)
    bound = _reached(best, tl.minimum(count, C), k, k + k // 2, CLASSES)
    return tl.where(count >= k, bound, _LOWEST)


@triton.jit
def _sortables(SCORES, at, seen):
    """`_sortable` of entries, the least number from `seen` on."""
    key = monotone(tl.load(SCORES + at, mask=at < seen, other=0.0))
    return tl.where(at < seen, _sortable(key, at), _LEAST)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "k"])
def choose_rows(SCORES, MAXIMA, LIST, OUT, VISIBLE, T, n, s_b, s_t, v_b, v_t, width, k, SEEN: tl.constexpr,
                FILTER: tl.constexpr, C: tl.constexpr, CLASSES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):
    """The k best of the entries < seen of one row a program, to OUT int64 [rows, k]. FILTER: there may be more than C of them.

    LIST int64 [rows, 2·C]: scratch.
    """
    row = tl.program_id(0).to(tl.int64)
    b, t, i = row // T, row % T, tl.arange(0, C)
    SCORES += b * s_b + t * s_t
    LIST += row * (2 * C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = _seen(VISIBLE, b, t, n, v_b, v_t, SEEN)
    if FILTER:
        live = tl.minimum(seen, C)
        if seen > C:
            bound = _bound(SCORES, MAXIMA + row * width, seen, k, C, CLASSES, GROUP)
            live = seen * 0
            for start in range(0, seen, C):
                live = _keep(LIST, live, _sortables(SCORES, start + i, seen), bound)
                if live > C:
                    live, bound = _shorten(LIST, live, bound, k, C, CLASSES)
            tl.debug_barrier()
            x = tl.load(LIST + i, mask=i < live, other=_LEAST)
        else:
            x = _sortables(SCORES, i, seen)
    else:
        live, x = seen, _sortables(SCORES, i, seen)
    _emit(x, live, OUT + row * k, k, CLASSES)


@triton.jit
def _listed(FOUND, BEFORE, at, total, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Number `at` of those found by all programs one after the other. BEFORE int32 [CHUNKS]: how many the earlier ones found."""
    chunk = at * 0
    for halving in tl.static_range(1, 13):
        if CHUNKS >> halving:
            further = tl.load(BEFORE + chunk + (CHUNKS >> halving)) <= at
            chunk = tl.where(further, chunk + (CHUNKS >> halving), chunk)
    slot = at - tl.load(BEFORE + chunk)
    return tl.load(FOUND + chunk.to(tl.int64) * CHUNK + slot, mask=at < total, other=_LEAST)


@triton.jit
def _gather(FOUND, COUNTS, LIST, OUT, programs, k, C: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr,
            CHUNKS: tl.constexpr):
    """The k best of what the programs of a row found."""
    i, c = tl.arange(0, C), tl.arange(0, CHUNKS)
    counts = tl.load(COUNTS + c, mask=c < programs, other=0)
    total = tl.sum(counts, 0)
    tl.debug_barrier()
    tl.store(COUNTS + c, tl.cumsum(counts, 0) - counts)
    tl.debug_barrier()  # other threads read than wrote
    live = tl.minimum(total, C)
    if total > C:
        live, bound = total * 0, tl.full((), _LOWEST, tl.int32)
        for start in range(0, total, C):
            live = _keep(LIST, live, _listed(FOUND, COUNTS, start + i, total, CHUNK, CHUNKS), bound)
            if live > C:
                live, bound = _shorten(LIST, live, bound, k, C, CLASSES)
        tl.debug_barrier()
        x = tl.load(LIST + i, mask=i < live, other=_LEAST)
    else:
        x = _listed(FOUND, COUNTS, i, total, CHUNK, CHUNKS)
    _emit(x, live, OUT, k, CLASSES)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "k"])
def choose_together(SCORES, MAXIMA, FOUND, COUNTS, TICKETS, LIST, OUT, VISIBLE, T, n, s_b, s_t, v_b, v_t, width, k,
                    SEEN: tl.constexpr, C: tl.constexpr, CLASSES: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
                    CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """As `choose_rows`, a row (axis 0) in chunks (axis 1). Each program lists what may be among the best of its chunk; the last
    one to end takes the k best of all.

    FOUND int64 [rows, CHUNKS, CHUNK], COUNTS int32 [rows, CHUNKS], LIST int64 [rows, 2·C]: scratch. TICKETS int32 [rows]: zero.
    """
    row = tl.program_id(0).to(tl.int64)
    b, t, chunk = row // T, row % T, tl.program_id(1)
    SCORES += b * s_b + t * s_t
    FOUND += row * (CHUNKS * CHUNK)
    COUNTS += row * CHUNKS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = _seen(VISIBLE, b, t, n, v_b, v_t, SEEN)
    programs = tl.maximum(tl.cdiv(seen, CHUNK), 1)
    if chunk >= programs:
        return
    x = _sortables(SCORES, chunk * CHUNK + tl.arange(0, CHUNK), seen)
    bound = _bound(SCORES, MAXIMA + row * width, seen, k, C, CLASSES, GROUP)
    tl.store(COUNTS + chunk, _keep(FOUND + chunk * CHUNK, chunk * 0, x, bound))
    tl.debug_barrier()  # of all threads, before one of them tells
    if tl.atomic_add(TICKETS + row, 1, sem="acq_rel") == programs - 1:
        _gather(FOUND, COUNTS, LIST + row * (2 * C), OUT + row * k, programs, k, C, CLASSES, CHUNK, CHUNKS)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t"])
def maxima_of_rows(SCORES, MAXIMA, TICKETS, VISIBLE, T, n, s_b, s_t, v_b, v_t, width, SEEN: tl.constexpr, GROUP: tl.constexpr,
                   CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The maxima of one chunk (axis 1) of a row (axis 0), as the scores' kernel writes them; zeroes TICKETS."""
    row = tl.program_id(0).to(tl.int64)
    b, t, chunk = row // T, row % T, tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = _seen(VISIBLE, b, t, n, v_b, v_t, SEEN)
    if chunk == 0:
        tl.store(TICKETS + row, 0)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    if chunk * CHUNK >= seen:
        return
    key = monotone(tl.load(SCORES + b * s_b + t * s_t + entry, mask=entry < seen, other=float("-inf")))
    best = tl.max(tl.reshape(key, [CHUNK // GROUP, GROUP]), 1)
    at = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    tl.store(MAXIMA + row * width + at, best, mask=at < width)


@triton.jit(do_not_specialize=["n", "T", "v_b", "v_t"])
def visible_entries(OUT, VISIBLE, T, n, v_b, v_t, BLOCK: tl.constexpr):
    """OUT int64 [rows, n]: each entry, −1 from VISIBLE[b, t] on. One row a program."""
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(VISIBLE + row // T * v_b + row % T * v_t)
    for start in range(0, n, BLOCK):
        e = start + tl.arange(0, BLOCK)
        tl.store(OUT + row * n + e, tl.where(e < seen, e, -1).to(tl.int64), mask=e < n)
