"""Exact selection from many long rows, a warp each, without maxima.

A sample of a row gives a score that some more than k of all entries should reach. Groups of four entries with one that
reaches it are listed, then those entries alone; both lists keep the order of the row. `narrow` finds what k of the list
reach. If too few entries are listed, a lower score is tried. If the lists are too short, the row is searched in memory,
ten times as slow: so it is for rows with thousands of equal scores about the k-th, and for no other usual ones.

A warp needs no barriers, and sums of integers are one instruction in it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.indexer.triton_narrow import narrow, narrowed, score_of, tried
from dsv4.kernels.indexer.triton_scores import monotone
from dsv4.kernels.indexer.triton_topk import every_entry, first_row, numbered, row_of_program, seen_entries

_LOWEST, _HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_MINUS_INF = tl.constexpr(-2139095041)  # monotone(−inf)
_NOTHING = tl.constexpr(-8388608)  # bits of −inf
_STEP = tl.constexpr(512)  # entries of a step: four groups a thread


@triton.jit
def _by_thread(x):
    """x [B·128] that was loaded four numbers a thread, as [32, B, 4]: by thread, block and place."""
    return tl.permute(tl.reshape(x, [x.shape[0] // 128, 32, 4]), (1, 0, 2))


@triton.jit
def _in_turn(x):
    """x [32, ...] by thread as one row, a number of each thread in turn: so the compiler spreads numbers that go to
    scattered places, and each thread stores its own."""
    return tl.reshape(tl.permute(tl.reshape(x, [32, x.numel // 32]), (1, 0)), [x.numel])


@triton.jit
def _greatest(x):
    """The maximum of each four of x fp32 [32, B, 4], NaN if there is one."""
    even, odd = tl.split(tl.reshape(x, [32, x.shape[1], 2, 2]))
    even, odd = tl.split(tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL))
    return tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _starts(count):
    """(how many precede those of each thread and block, how many there are): count int32 [32, B] ≤ 4, in the order of
    blocks, then of threads. Four blocks are added up at once, 8 bits each."""
    B: tl.constexpr = count.shape[1]
    block = tl.arange(0, B)[None, :]
    starts, base = tl.zeros([32, B], tl.int32), 0
    for word in tl.static_range((B + 3) // 4):
        packed = tl.sum(tl.where(block // 4 == word, count << (8 * (block % 4)), 0).to(tl.uint32), 1)
        before, total = tl.cumsum(packed, 0) - packed, tl.sum(packed, 0)
        for j in tl.static_range(4):
            mine = ((before >> (8 * j)) & 255).to(tl.int32)
            starts = tl.where(block == 4 * word + j, base + mine[:, None], starts)
            base += ((total >> (8 * j)) & 255).to(tl.int32)
    return starts, base


@triton.jit
def _places(hit):
    """(the place of each true one among them, how many there are): hit bool [32, B, 4] by `_by_thread`."""
    one = hit.to(tl.int32)
    starts, total = _starts(tl.sum(one, 2))
    return starts[:, :, None] + tl.cumsum(one, 2) - one, total


@triton.jit
def _list_groups(x, start, bound, LIST, FIRST, base):
    """Append the groups of x fp32 [512], the scores from entry `start` on, with a score that reaches `bound`: scores to
    LIST int32 [4·C], the first entry of each to FIRST int32 [C]. Returns how many there are then."""
    x = _by_thread(x)
    thread, block = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    hit = ~(_greatest(x) < bound)  # NaN is above all
    starts, total = _starts(hit.to(tl.int32))
    place, hit = _in_turn(base + starts), _in_turn(hit)
    tl.store(FIRST + place, _in_turn(start + block * 128 + thread * 4), mask=hit)
    four = tl.reshape(tl.permute(x.to(tl.int32, bitcast=True), (1, 0, 2)), [_STEP // 4, 4])
    tl.store(LIST + 4 * place[:, None] + tl.arange(0, 4)[None, :], four, mask=hit[:, None])
    return base + total


@triton.jit
def _groups(SCORES, LIST, FIRST, seen, bound, C: tl.constexpr):
    """(how many groups of the entries < seen `_list_groups` listed, whether all had room)."""
    i = tl.arange(0, _STEP)
    groups, start = seen * 0, seen * 0
    pairs = seen // (2 * _STEP) * (2 * _STEP)
    if pairs > 0:
        x, y = tl.load(SCORES + i), tl.load(SCORES + _STEP + i)
        while (start < pairs) & (groups + _STEP // 2 <= C):
            after = tl.minimum(start + 2 * _STEP, pairs - 2 * _STEP)  # the last are loaded again, to no use
            groups = _list_groups(x, start, bound, LIST, FIRST, groups)
            x = tl.load(SCORES + after + i)
            groups = _list_groups(y, start + _STEP, bound, LIST, FIRST, groups)
            y = tl.load(SCORES + after + _STEP + i)
            start += 2 * _STEP
    if start == pairs:
        while (start < seen) & (groups + _STEP // 4 <= C):
            x = tl.load(SCORES + start + i, mask=start + i < seen, other=float("-inf"))
            groups = _list_groups(x, start, bound, LIST, FIRST, groups)
            start += _STEP
    return groups, start >= seen


@triton.jit
def _entries(LIST, FIRST, ENTRY, groups, bound, C: tl.constexpr):
    """How many entries of the listed groups reach `bound`, or some number above C. They replace the groups in LIST,
    their numbers are in ENTRY int32 [C + 512]."""
    i, member = tl.arange(0, _STEP), tl.arange(0, 4)[None, None, :]
    thread, block = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    listed, start = groups * 0, groups * 0
    while (start < groups) & (listed <= C):
        group = start + block * 32 + thread
        x = _by_thread(tl.load(LIST + 4 * start + i, mask=start + i // 4 < groups, other=_NOTHING))
        first = tl.load(FIRST + group, mask=group < groups, other=0)
        hit = ~(x.to(tl.float32, bitcast=True) < bound)
        places, total = _places(hit)
        tl.debug_barrier()  # other threads read what is overwritten
        places, hit = _in_turn(listed + places), _in_turn(hit)
        tl.store(LIST + places, _in_turn(x), mask=hit)
        tl.store(ENTRY + places, _in_turn(first[:, :, None] + member), mask=hit)
        listed += total
        start += _STEP // 4
    return listed


@triton.jit
def _sampled(SCORES, seen, SAMPLE: tl.constexpr):
    """Keys of SAMPLE ≤ seen scores: groups of four, one at a scattered place of each of equal parts of the row."""
    i, parts = tl.arange(0, SAMPLE), SAMPLE // 4
    part, groups = i // 4, seen // 4
    shift = (part * 40503 & 0xFFFF) * (groups // parts) >> 16
    return monotone(tl.load(SCORES + (part * groups // parts + shift) * 4 + i % 4))


@triton.jit
def _candidates(SCORES, LIST, seen, k, C: tl.constexpr, SAMPLE: tl.constexpr):
    """How many entries of a row of seen > C are in LIST [C], and their numbers behind 5·C, all of the k best among
    them. Fewer than k or more than C: none of that.

    Of a sample of independent scores, `wanted` stand for k entries and three standard deviations of their number."""
    expected = k * SAMPLE / seen
    wanted = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    listed = seen * 0
    while (listed < k) & (wanted < SAMPLE):
        sample = _sampled(SCORES, seen, SAMPLE)
        low, high = tl.min(sample, 0), tl.max(sample, 0)
        key, _, _ = narrow(sample, low, seen * 0 + SAMPLE, high, wanted, wanted + wanted // 8, seen * 0)
        bound = score_of(key)
        groups, complete = _groups(SCORES, LIST, LIST + 4 * C, seen, bound, C)
        listed = listed * 0 + C + 1
        if complete:
            tl.debug_barrier()  # other threads read the lists than wrote them
            listed = _entries(LIST, LIST + 4 * C, LIST + 5 * C, groups, bound, C)
        tl.debug_barrier()
        wanted *= 2
    return listed


@triton.jit
def _keys(SCORES, at, seen, PADDED: tl.constexpr):
    """(keys of the entries `at`, those from `seen` on the least number, which are < seen)."""
    mask = at // 4 * 4 < seen if PADDED else at < seen
    x = tl.load(SCORES + at, mask=mask)
    return tl.where(at < seen, monotone(x), _LOWEST), at < seen


@triton.jit
def _best(SCORES, LIST, live, listed, k, C: tl.constexpr, PADDED: tl.constexpr):
    """`narrow` to k of live > k entries, at most C, of a row or listed."""
    i = tl.arange(0, C)
    if listed:
        key, inside = _keys(LIST.to(tl.pointer_type(tl.float32)), i, live, True)
    else:
        key, inside = _keys(SCORES, i, live, PADDED)
    low, high = tl.min(tl.where(inside, key, _HIGHEST), 0), tl.max(key, 0)
    return narrow(key, low, live, high, k, k, listed.to(tl.int32))


@triton.jit
def _search(SCORES, seen, k, PADDED: tl.constexpr):
    """`_best` of any row of seen > k entries, which are read again in each step."""
    i = tl.arange(0, _STEP)
    least, best = tl.full([_STEP], _HIGHEST, tl.int32), tl.full([_STEP], _LOWEST, tl.int32)
    for start in range(0, seen, _STEP):
        key, inside = _keys(SCORES, start + i, seen, PADDED)
        least, best = tl.minimum(least, tl.where(inside, key, _HIGHEST)), tl.maximum(best, key)
    low, high, reach, above, step = tl.min(least, 0), tl.max(best, 0), seen, seen * 0, seen * 0
    while (reach > k) & (low < high):
        first, second = tried(low, reach, high, above, k, k, step)
        n1, n2 = tl.zeros([_STEP], tl.int32), tl.zeros([_STEP], tl.int32)
        for start in range(0, seen, _STEP):
            key, _ = _keys(SCORES, start + i, seen, PADDED)  # `first` exceeds the least number
            n1 += (key >= first).to(tl.int32)
            n2 += (key >= second).to(tl.int32)
        low, reach, high, above = narrowed(low, reach, high, above, first, tl.sum(n1, 0), second, tl.sum(n2, 0), k)
        step += 1
    return low, reach, above


@triton.jit
def _emit(SCORES, LIST, ENTRY, OUT, live, listed, low, left, base, PADDED: tl.constexpr):
    """Entries with keys above `low`, and the first `left` of those that equal it, `numbered`, to OUT int64 in their
    order, −1 where a score is −inf. `left` is negative if that is all."""
    i, done = tl.arange(0, _STEP), live * 0
    least = tl.where(left >= 0, tl.maximum(low, _LOWEST + 1), low)
    for start in range(0, live, _STEP):
        at = start + i
        if listed:
            key, _ = _keys(LIST.to(tl.pointer_type(tl.float32)), at, live, True)
            entry = tl.load(ENTRY + at, mask=at // 4 * 4 < live)
        else:
            key, _ = _keys(SCORES, at, live, PADDED)
            entry = at
        key, entry = _by_thread(key), _by_thread(entry)
        if left >= 0:
            equal = key == low
            places, ties = _places(equal)
            key = tl.where(equal, tl.where(places < left, tl.maximum(low, least), _LOWEST), key)
            left = tl.maximum(left - ties, 0)
        chosen = key >= least
        places, total = _places(chosen)
        entry = _in_turn(tl.where(key == _MINUS_INF, -1, entry))
        tl.store(OUT + _in_turn(done + places), numbered(entry, base), mask=_in_turn(chosen))
        done += total


@triton.jit(do_not_specialize=["T", "n", "v_b", "v_t", "k", "first", "RUN"])
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
    first,
    RUN,
    SEEN: tl.constexpr,
    SCORED: tl.constexpr,
    C: tl.constexpr,
    SAMPLE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The k best of the entries < seen of one row a program, in their order, to OUT int64 [rows, k]. LIST int32 [rows,
    7·C]: scratch; C ≥ max(SAMPLE, 512), and C ≥ 2·k. One warp. Without SCORED a row of seen ≤ k has no scores: all its
    entries are chosen. With RUN an entry is written as (first + its batch row) · RUN + its
    number."""
    row, b, t = row_of_program(T)
    base = first_row(b, first, RUN)
    SCORES += b * s_b + t * s_t
    OUT += row * k
    LIST += row * (7 * C)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seen = seen_entries(VISIBLE, b, t, n, v_b, v_t, SEEN)
    if seen <= k:
        if SCORED:
            i = tl.arange(0, C // 2)
            key, inside = _keys(SCORES, i, seen, False)
            tl.store(OUT + i, numbered(tl.where(inside & (key != _MINUS_INF), i, -1), base), mask=i < k)
        else:
            every_entry(OUT, seen, k, base, C // 2)
        return
    live, listed = seen, seen > C
    if listed:
        live = _candidates(SCORES, LIST, seen, k, C, SAMPLE)
    if (live < k) | (live > C):
        low, reach, above = _search(SCORES, seen, k, PADDED)
        live, listed = seen, seen < 0
    elif live <= C // 2:
        low, reach, above = _best(SCORES, LIST, live, listed, k, C // 2, PADDED)
    else:
        low, reach, above = _best(SCORES, LIST, live, listed, k, C, PADDED)
    _emit(SCORES, LIST, LIST + 5 * C, OUT, live, listed, low, tl.where(reach > k, k - above, -1), base, PADDED)
