"""Device code of what is kept: column sums of phase 1, and the selection.

Sums are taken keys first, so that each key's is one program's (of a memory, a fixed number of programs'): no atomics, the same bits
every time.
"""

import triton
import triton.language as tl

from kernels.quantize.triton_codes import widen


@triton.jit
def add_queries(acc, k, Q, LSE, first, q_t, key, d, scale, BQ: tl.constexpr, MASKED: tl.constexpr, FP32: tl.constexpr):
    """acc [BK, BQ] += e^(s−m)/l of BQ queries from `first` on; Q and LSE begin at their chunk and head, key [BK] counts in the chunk."""
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
def chunk_mass(Q, K, LSE, LENGTHS, MASS, scale, start, T, H, G, KV, q_b, q_t, q_h, kv_b, kv_h, S: tl.constexpr, D: tl.constexpr,
               BK: tl.constexpr, BQ: tl.constexpr, FP32: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr):
    """MASS fp32 [B, KV, T]: what phase 1 gave BK keys; LSE is phase 1's. Left alone where no chunk follows. BK divides S, BQ divides BK."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    c0, n0, bkv = tl.program_id(0) * BK // S * S, tl.program_id(0) * BK % S, tl.program_id(1)
    b, kv = (bkv // KV).to(tl.int64), (bkv % KV).to(tl.int64)
    if tl.load(LENGTHS + b) - start <= c0 + S:
        return
    key, d = n0 + tl.arange(0, BK), tl.arange(0, D)
    k = tl.load(K + b * kv_b + kv * kv_h + (start + c0) * D + key[:, None] * D + d[None, :])
    if FP32:
        k = widen(k)
    acc, LSE, Q = tl.zeros((BK, BQ), tl.float32), LSE + (b * H + kv * G) * T + c0, Q + b * q_b + c0.to(tl.int64) * q_t + kv * G * q_h
    for i in range(0, G * (BK // BQ)):  # queries among the keys
        g, first = i // (BK // BQ), n0 + i % (BK // BQ) * BQ
        acc = add_queries(acc, k, Q + g * q_h, LSE + g * T, first, q_t, key, d, scale, BQ, True, FP32)
    tiles = (S - n0 - BK) // BQ
    for i in tl.range(0, G * tiles, num_stages=STAGES):
        g = i // tiles
        acc = add_queries(acc, k, Q + g * q_h, LSE + g * T, n0 + BK + (i - g * tiles) * BQ, q_t, key, d, scale, BQ, False, FP32)
    tl.store(MASS + bkv.to(tl.int64) * T + c0 + key, tl.sum(acc, 1))


@triton.jit(do_not_specialize=["start", "T", "c0", "splits", "position_next"])
def choose(POSITIONS, SCORES, MASS, PART, LENGTHS, UPDATES, start, T, c0, splits, position_next, KV, S: tl.constexpr, L: tl.constexpr,
           HEAVY: tl.constexpr, PAST: tl.constexpr, C: tl.constexpr, DEPENDENT: tl.constexpr):
    """Memory after the chunk at c0, from the one before it: POSITIONS, SCORES [B, KV, L + HEAVY], the next `position_next` further on.

    A program takes the C ≥ PAST + S − L candidates of one KV head: PAST of the old memory (0: there is none), then the chunk's.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bkv = tl.program_id(0)
    b, M = (bkv // KV).to(tl.int64), L + HEAVY
    if tl.load(LENGTHS + b) - start <= c0 + S:
        return
    POSITIONS, SCORES, MASS = POSITIONS + bkv * M, SCORES + bkv * M, MASS + bkv.to(tl.int64) * T + c0 - PAST
    j = tl.arange(0, C)
    past, new = j < PAST, (j >= PAST) & (j < PAST + S - L)
    position = tl.where(past, tl.load(POSITIONS + j, mask=past, other=0), (start + c0 - PAST + j).to(tl.int32))
    score = tl.load(SCORES + j, mask=past, other=0.0)
    part, PART = tl.arange(0, 8), PART + bkv.to(tl.int64) * splits * M
    for split in range(0, splits if PAST else 0, 8):
        there = (split + part < splits)[:, None] & past[None, :]
        score += tl.sum(tl.load(PART + (split + part)[:, None] * M + j[None, :], mask=there, other=0.0), 0)
    score += tl.load(MASS + j, mask=new, other=0.0)
    # scores.sort(descending=True, stable=True)[:heavy].sort(): all above the HEAVY-th largest, and the first that equal it.
    # Scores are not negative: as integers they have the same order; NaN is above all, whatever its sign.
    key = tl.where(score != score, 0x7FC00000, score.to(tl.int32, bitcast=True))
    key = tl.where(past | new, key, -1)
    least = tl.sum((key >= 1 << 30).to(tl.int32), 0) >= HEAVY
    least = least.to(tl.int32) << 30
    for shift in tl.static_range(28, -1, -2):  # two bits at a time: the three counts are one sum, of 16 bits each
        counts = tl.zeros((C,), tl.int64)
        for i in tl.static_range(3):
            counts += (key >= least + (i + 1 << shift)).to(tl.int64) << 16 * i
        count = tl.sum(counts, 0)
        for i in tl.static_range(3):
            least += ((count >> 16 * i & 0xFFFF) >= HEAVY).to(tl.int32) << shift
    above, equal = key > least, key == least
    spare = HEAVY - tl.sum(above.to(tl.int32), 0)
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    slot = tl.cumsum(kept.to(tl.int32), 0) - 1
    POSITIONS, SCORES = POSITIONS + position_next, SCORES + position_next
    tl.store(POSITIONS + slot, position, mask=kept)
    tl.store(SCORES + slot, score, mask=kept)
    near = tl.arange(0, C)
    tl.store(POSITIONS + HEAVY + near, (start + c0 + S - L + near).to(tl.int32), mask=near < L)
    tl.store(SCORES + HEAVY + near, tl.load(MASS + PAST + S - L + near, mask=near < L, other=0.0), mask=near < L)
    tl.store(UPDATES + bkv, tl.load(UPDATES + bkv) + 1)
