"""Exact selection from many long rows, a program each, without maxima.

Each score and its index become one number, and no two of these are equal (`sortable`). Divide the entries into classes,
and take a bound that the maxima of k classes reach. All k best entries reach it, and few others if the classes are
small. Entries that reach it are listed; a list that gets too long raises the bound. `_reached` finds a number that at
least k of a tile reach by narrowing an interval; if exactly k reach it, these are the chosen ones.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.indexer.triton_scores import monotone
from dsv4.kernels.indexer.triton_topk import every_entry, seen_entries, sortables

_LOWEST, _LEAST = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))
_MINUS_INF = tl.constexpr(-2139095041)  # monotone(−inf)


@triton.jit
def _reached(x, live, k, enough, CLASSES: tl.constexpr):
    """A number that at least min(k, live) of x reach, and at most `enough` ≥ k unless many are equal.

    x int32 or int64 [C], the least number of its type but for `live` of them; C is a multiple of CLASSES ≥ k.
    """
    C: tl.constexpr = x.shape[0]
    MOST: tl.constexpr = 2 ** (x.dtype.primitive_bitwidth - 1) - 1
    best = tl.max(tl.reshape(x, [CLASSES, C // CLASSES]), 1)
    low = tl.min(best, 0)  # each class has a number that reaches it
    # or all entries do, if there are empty classes
    low = tl.maximum(low, tl.min(tl.where(x == -MOST - 1, MOST, x), 0)).to(tl.int64)
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
    """The k best of `live` `sortable` numbers of x [C] to OUT int64 [k] in their order, −1 for those of −inf and
    none."""
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
    tl.debug_barrier()  # x may be a part of the list that is overwritten
    tl.store(LIST + base + tl.cumsum(one, 0) - one, x, mask=kept)
    return base + tl.sum(one, 0)


@triton.jit
def _shorten(LIST, base, bound, k, C: tl.constexpr, CLASSES: tl.constexpr):
    """LIST of base ≤ 2·C numbers without some that are not among the k best, at most 3·k ≤ C: (its length, a bound of
    keys)."""
    i = tl.arange(0, C)
    tl.debug_barrier()  # other threads read the list than wrote it
    x, y = tl.load(LIST + i), tl.load(LIST + C + i, mask=C + i < base, other=_LEAST)
    reached = _reached(tl.maximum(x, y), C, k, k + k // 2, CLASSES)
    least = reached >> 32
    base = _keep(LIST, base * 0, tl.where(x >= reached, x, _LEAST), least)
    base = _keep(LIST, base, tl.where(y >= reached, y, _LEAST), least)
    return base, tl.maximum(bound, least.to(tl.int32))


@triton.jit
def _bound(SCORES, seen, k, C: tl.constexpr, CLASSES: tl.constexpr):
    """A key that at least k of the entries < seen reach, seen ≥ C, from the maxima of every C-th."""
    i = tl.arange(0, C)
    best = tl.full([C], _LOWEST, tl.int32)
    for start in range(0, seen, C):
        key = monotone(tl.load(SCORES + start + i, mask=start + i < seen, other=float("-inf")))
        best = tl.maximum(best, tl.where(start + i < seen, key, _LOWEST))
    return _reached(best, C, k, k + k // 2, CLASSES)


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "k"])
def filter_rows(
    SCORES,
    LIST,
    OUT,
    VISIBLE,
    T,
    n,
    s_b,
    s_t,
    v_b,
    v_t,
    k,
    SEEN: tl.constexpr,
    SCORED: tl.constexpr,
    C: tl.constexpr,
    CLASSES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The k best of the entries < seen of one row a program, to OUT int64 [rows, k]. LIST int64 [rows, 2·C]: scratch; C
    ≥ 4·k. Without SCORED a row of seen ≤ k has no scores: all its entries are chosen."""
    row = tl.program_id(0).to(tl.int64)
    b, t, i = row // T, row % T, tl.arange(0, C)
    SCORES += b * s_b + t * s_t
    LIST += row * (2 * C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    if not SCORED:
        if seen <= k:
            every_entry(OUT + row * k, seen, k, C)
            return
    live = tl.minimum(seen, C)
    if seen > C:
        bound = _bound(SCORES, seen, k, C, CLASSES)
        live = seen * 0
        for start in range(0, seen, C):
            live = _keep(LIST, live, sortables(SCORES, start + i, seen), bound)
            if live > C:
                live, bound = _shorten(LIST, live, bound, k, C, CLASSES)
        tl.debug_barrier()  # other threads read the list than wrote it
        x = tl.load(LIST + i, mask=i < live, other=_LEAST)
    else:
        x = sortables(SCORES, i, seen)
    _emit(x, live, OUT + row * k, k, CLASSES)
