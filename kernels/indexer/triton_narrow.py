"""A search for the number that k of a tile reach: an interval of int32 keys narrows, two counts a step.

`narrow` tries numbers between the scores of both ends first. Where counts fall by the same factor over equal steps, as
they do among the best of many scores, it comes within a few counts of k at once. What is left is divided by bits,
which ends for any keys.
"""

import triton
import triton.language as tl

from dsv4.kernels.indexer.triton_scores import monotone

_SCORED = tl.constexpr(5)  # steps that divide scores; later ones divide bits


@triton.jit
def score_of(key):
    """The inverse of `monotone`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _log2(x):
    """127 + log2(x) of x ≥ 0.5, within 0.01, in a quarter of the instructions of `tl.log2`."""
    bits = x.to(tl.int32, bitcast=True)
    part = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return (bits >> 23).to(tl.float32) + part * (1.3465 - 0.3465 * part)


@triton.jit
def _between(low, reach, high, above, k, enough):
    """Two scores between those of `low` and `high`: a few more and a few fewer numbers should reach them than sought.
    The first is right where counts fall by equal factors over equal steps, the second where by equal numbers."""
    least, best = score_of(low), score_of(high)
    sought, reached, exceed = (k + enough) * 0.5, reach.to(tl.float32), above.to(tl.float32)
    inverse = 1.0 / (reached - exceed)
    # half a standard deviation of the count at the sought place
    apart = 0.5 * tl.sqrt((reached - sought) * (sought - exceed) * inverse) + 0.5
    if enough > k:
        apart = tl.minimum(apart, (enough - k) * 0.5)
    logarithm = _log2(reached)
    first = (logarithm - _log2(sought + apart)) / (logarithm - _log2(exceed + 0.5))
    second = (reached - sought + apart) * inverse
    return least + (best - least) * first, least + (best - least) * second


@triton.jit
def tried(low, reach, high, above, k, enough, step):
    """The next two numbers to count at, low < first ≤ second ≤ high."""
    width = tl.maximum((high >> 2) - (low >> 2), 1)  # high − low might overflow
    width += width >> 2
    first, second = tl.minimum(low + width, high), low
    second = first + width
    if step < _SCORED:
        if step == 0:
            least, best = score_of(low), score_of(high)
            one, other = least + (best - least) * 0.33333334, least + (best - least) * 0.6666667
        else:
            one, other = _between(low, reach, high, above, k, enough)
        first, second = tl.maximum(tl.minimum(monotone(one), high), low + 1), monotone(other)
    return first, tl.maximum(tl.minimum(second, high), first)


@triton.jit
def narrowed(low, reach, high, above, first, n1, second, n2, k):
    """The interval (low, its count, high, count of larger ones) after n1 numbers reached `first`, and n2 `second`."""
    if n2 >= k:
        low, reach = second, n2
    elif n1 >= k:
        low, reach, high, above = first, n1, second - 1, n2
    else:
        high, above = first - 1, n1
    return low, reach, high, above


@triton.jit
def narrow(x, low, reach, high, k, enough, step):
    """(t, how many reach it, how many exceed it): at least k of x int32 [≤ 32768] reach t, and at most `enough` ≥ k
    unless several equal it. The last count means something only if more do.

    low: `reach` ≥ k of x reach it. high: the maximum. step: 0, or 1 if x is the upper end of a distribution.
    """
    above = reach * 0
    while (reach > enough) & (low < high):
        first, second = tried(low, reach, high, above, k, enough, step)
        # Both counts in one sum, 16 bits each.
        both = tl.sum((x >= first).to(tl.int32) + ((x >= second).to(tl.int32) << 16), 0)
        low, reach, high, above = narrowed(
            low, reach, high, above, first, both & 0xFFFF, second, (both >> 16) & 0xFFFF, k
        )
        step += 1
    return low, reach, above
