"""Device code of the memory: column sums of phase 1, and the selection.

Programs divide the keys, so one program sums the mass of a head on a key (for a memory, a fixed number of programs).
Sums are added in a fixed order, without atomics, so bits are equal every time.
"""

import triton
import triton.language as tl

from dsv4.kernels.quantize.triton_codes import widen


@triton.jit
def add_queries(acc, k, Q, LSE, first, q_t, key, d, scale, BQ: tl.constexpr, MASKED: tl.constexpr, FP32: tl.constexpr):
    """acc [BK, BQ] += e^(s−m)/l of BQ queries from `first` on; Q and LSE begin at their chunk and head, key [BK] counts
    in the chunk."""
    i = tl.arange(0, BQ)
    q = tl.load(Q + first * q_t + i[:, None] * q_t + d[None, :])
    if FP32:
        q = widen(q)
    s = tl.dot(k, tl.trans(q), input_precision="ieee")
    s = s * scale - tl.load(LSE + first + i)[None, :]
    if MASKED:
        s = tl.where(key[:, None] <= (first + i)[None, :], s, float("-inf"))
    return acc + tl.exp2(s)


@triton.jit(do_not_specialize=["start", "T"])
def chunk_mass(
    Q,
    K,
    LSE,
    LENGTHS,
    GIVEN,
    scale,
    start,
    T,
    H,
    G,
    q_b,
    q_t,
    q_h,
    kv_b,
    kv_h,
    S: tl.constexpr,
    D: tl.constexpr,
    BK: tl.constexpr,
    BQ: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """GIVEN fp32 [B, H, T]: the mass of one query head on BK keys in phase 1; LSE is phase 1's. Not written if no chunk
    follows. BK divides S, BQ divides BK."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    c0, n0, bh = tl.program_id(0) * BK // S * S, tl.program_id(0) * BK % S, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    if tl.load(LENGTHS + b) - start <= c0 + S:
        return
    key, d = n0 + tl.arange(0, BK), tl.arange(0, D)
    k = tl.load(K + b * kv_b + h // G * kv_h + (start + c0) * D + key[:, None] * D + d[None, :])
    if FP32:
        k = widen(k)
    acc, LSE, Q = (
        tl.zeros((BK, BQ), tl.float32),
        LSE + bh.to(tl.int64) * T + c0,
        Q + b * q_b + c0.to(tl.int64) * q_t + h * q_h,
    )
    FEW: tl.constexpr = S <= 8 * BK  # steps: a mask in each costs less than to begin a second loop
    if not FEW:
        for first in range(n0, n0 + BK, BQ):  # queries among the keys
            acc = add_queries(acc, k, Q, LSE, first, q_t, key, d, scale, BQ, True, FP32)
    for first in tl.range(n0 if FEW else n0 + BK, S, BQ, num_stages=STAGES):
        acc = add_queries(acc, k, Q, LSE, first, q_t, key, d, scale, BQ, FEW, FP32)
    tl.store(GIVEN + bh.to(tl.int64) * T + c0 + key, tl.sum(acc, 1))


@triton.jit
def of_group(GIVEN, T, there, G: tl.constexpr):
    """The mass of keys from the G query heads of a set, summed in their order; GIVEN points at the first head's. 0
    where there is none."""
    total = tl.load(GIVEN, mask=there, other=0.0)
    for g in tl.static_range(1, G):
        total += tl.load(GIVEN + g * T, mask=there, other=0.0)
    return total


@triton.jit
def heaviest(score, candidate, HEAVY: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """scores.sort(descending=True, stable=True)[:HEAVY].sort() of the N of C that are candidates: (which, their
    places).

    These are all above the HEAVY-th largest, and the first that equal it. Scores are not negative, so as integers they
    have the same order; NaN is above all, whatever its sign.
    """
    key = tl.where(score != score, 0x7FC00000, score.to(tl.int32, bitcast=True))
    key = tl.where(candidate, key, -1)
    count = tl.sum((key >= 1 << 30).to(tl.int32), 0)
    least, found, shift = (count >= HEAVY).to(tl.int32) << 30, tl.where(count >= HEAVY, count, N), 28
    # Two bits at a time: the three counts are one sum. `found` keys are not below `least`; when there are HEAVY of
    # them, the remaining bits do not matter
    BITS: tl.constexpr = 10 if N < 1024 else 16
    for_counts = tl.zeros((C,), tl.int32 if N < 1024 else tl.int64)
    while (shift >= 0) & (found != HEAVY):
        counts = for_counts
        for i in tl.static_range(3):
            counts += (key >= least + (i + 1 << shift)).to(counts.dtype) << BITS * i
        total = tl.sum(counts, 0)
        for i in tl.static_range(3):
            count = (total >> BITS * i & (1 << BITS) - 1).to(tl.int32)
            found, least = tl.where(count >= HEAVY, count, found), least + ((count >= HEAVY).to(tl.int32) << shift)
        shift -= 2
    above, equal = key > least, key == least
    spare = HEAVY - tl.sum(above.to(tl.int32), 0)
    upto = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # both counts in one pass
    ties = upto >> 16 & 0xFFFF
    return above | (equal & (ties <= spare)), (upto & 0xFFFF) + tl.minimum(ties, spare) - 1


@triton.jit(do_not_specialize=["start", "T", "c0", "position_next"])
def choose(
    POSITIONS,
    SCORES,
    GIVEN,
    MASS,
    PART,
    LENGTHS,
    UPDATES,
    start,
    T,
    c0,
    position_next,
    SETS,
    EACH: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    HEAVY: tl.constexpr,
    PAST: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Memory after the chunk at c0, from the one before it: POSITIONS, SCORES [B, SETS, L + HEAVY], the
    next `position_next` further on; and the chunk's part of MASS [B, SETS, T], summed over the EACH query heads of
    GIVEN [B, SETS · EACH, T] that share a set.

    A program handles the C ≥ PAST + S − L candidates of one set: PAST of the old memory (0: there is none), then
    those of the chunk.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    one = tl.program_id(0)
    b, M = (one // SETS).to(tl.int64), L + HEAVY
    # all loads are issued before the first wait
    length, updates = tl.load(LENGTHS + b), tl.load(UPDATES + one)
    POSITIONS, SCORES, PART = POSITIONS + one * M, SCORES + one * M, PART + one.to(tl.int64) * SPLITS * M
    MASS, GIVEN = MASS + one.to(tl.int64) * T + c0, GIVEN + one.to(tl.int64) * EACH * T + c0
    j, near = tl.arange(0, C), S - L + tl.arange(0, C)
    past, new = j < PAST, (j >= PAST) & (j < PAST + S - L)
    position = tl.where(past, tl.load(POSITIONS + j, mask=past, other=0), (start + c0 - PAST + j).to(tl.int32))
    score = tl.load(SCORES + j, mask=past, other=0.0)
    fresh, last = of_group(GIVEN + j - PAST, T, new, EACH), of_group(GIVEN + near, T, near < S, EACH)
    part = tl.arange(0, 8)
    for split in tl.range(0, SPLITS if PAST else 0, 8, loop_unroll_factor=2 if SPLITS <= 16 else 1):
        there = (split + part < SPLITS)[:, None] & past[None, :]
        score += tl.sum(tl.load(PART + (split + part)[:, None] * M + j[None, :], mask=there, other=0.0), 0)
    if length - start <= c0 + S:
        return
    score += fresh
    kept, slot = heaviest(score, past | new, HEAVY, PAST + S - L, C)
    POSITIONS, SCORES = POSITIONS + position_next, SCORES + position_next
    tl.store(POSITIONS + slot, position, mask=kept)
    tl.store(SCORES + slot, score, mask=kept)
    tl.store(MASS + j - PAST, fresh, mask=new)
    local = tl.arange(0, C)
    tl.store(POSITIONS + HEAVY + local, (start + c0 + near).to(tl.int32), mask=near < S)
    tl.store(SCORES + HEAVY + local, last, mask=near < S)
    tl.store(MASS + near, last, mask=near < S)
    tl.store(UPDATES + one, updates + 1)
