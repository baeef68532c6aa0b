"""Device code of both phases' attention: a program takes a tile of queries of one head. In phase 2 it also sums, key by
key, the mass of its queries on the memory: the queries are loaded already, and a separate launch would cost more than
computing the product again. If one tile holds the memory, nothing is computed or fetched twice.

Logits are kept in powers of two (scale comes multiplied by log2 e). A finished softmax is (lse, o): its output, and m +
log2 l.
"""

import triton
import triton.language as tl

from dsv4.kernels.quantize.triton_codes import narrow, widen


@triton.jit
def load_queries(Q, b, h, first, t, live, d, q_b, q_t, q_h, FP32: tl.constexpr):
    """[BM, D] queries of head h; zeros where not live."""
    place = Q + b * q_b + first.to(tl.int64) * q_t + h * q_h
    q = tl.load(place + (t - first)[:, None] * q_t + d[None, :], mask=live[:, None], other=0.0)
    return widen(q) if FP32 else q


@triton.jit
def weigh(q, k, seen, m, scale, MASKED: tl.constexpr):
    """Weights p [BM, BN] of a tile of keys relative to the largest logit so far: (that logit, the factor e^(s−m) by
    which earlier sums shrink, both [BM], p)."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * scale)
    return top, tl.exp2(m - top), tl.exp2(s * scale - top[:, None])


@triton.jit
def add_tile(q, k, v, seen, m, l, acc, scale, MASKED: tl.constexpr):
    """One step of the running softmax: m [BM] maximum, l [BM] sum, acc [BM, D] weighted values."""
    top, keep, p = weigh(q, k, seen, m, scale, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return top, l * keep + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["start", "T"])
def within_chunks(
    Q,
    K,
    V,
    OUT,
    LSE,
    LENGTHS,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Phase 1. Q, OUT [B, T, H, D]; K, V [B, KV, ·, D]; LSE fp32 [B, H, T]. S is a multiple of BM and BM of BN.

    Beyond a row's length OUT is 0 and LSE +inf.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, bh = tl.program_id(0) * BM, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    t, d = first + tl.arange(0, BM), tl.arange(0, D)
    end = tl.minimum(tl.load(LENGTHS + b) - start, T).to(tl.int32)
    live = t < end
    place = OUT + (b * T + first) * (H * D) + h * D + (t - first)[:, None] * (H * D) + d[None, :]
    lse = LSE + bh.to(tl.int64) * T + t
    if first >= end:
        tl.store(place, tl.zeros((BM, D), OUT.dtype.element_ty), mask=(t < T)[:, None])
        tl.store(lse, tl.full((BM,), float("inf"), tl.float32), mask=t < T)
        return
    q = load_queries(Q, b, h, first, t, live, d, q_b, q_t, q_h, FP32)
    c0, n = first // S * S, tl.arange(0, BN)
    run = b * kv_b + (h // G).to(tl.int64) * kv_h + start.to(tl.int64) * D
    tile = n[:, None] * D + d[None, :]
    m, l, acc = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, D), tl.float32)
    for n0 in tl.range(c0, first, BN, num_stages=STAGES):  # keys that all queries of the tile see
        k, v = tl.load(K + run + n0 * D + tile), tl.load(V + run + n0 * D + tile)
        if FP32:
            k, v = widen(k), widen(v)
        m, l, acc = add_tile(q, k, v, None, m, l, acc, scale, False)
    for i in tl.static_range(BM // BN):
        n0 = first + i * BN
        at, there = run + n0 * D, (n0 + n < end)[:, None]  # tokens that were never written may be NaN
        k, v = tl.load(K + at + tile, mask=there, other=0.0), tl.load(V + at + tile, mask=there, other=0.0)
        if FP32:
            k, v = widen(k), widen(v)
        m, l, acc = add_tile(q, k, v, t[:, None] >= (n0 + n)[None, :], m, l, acc, scale, True)
    out = tl.where(live[:, None], acc / l[:, None], 0.0)
    tl.store(place, narrow(out, OUT.dtype.element_ty), mask=(t < T)[:, None])
    tl.store(lse, tl.where(live, m + tl.log2(l), float("inf")), mask=t < T)


@triton.jit
def entries(POSITIONS, n, M: tl.constexpr, MASKED: tl.constexpr):
    """Positions of the entries n of a memory; 0 beyond its M entries."""
    if MASKED:
        return tl.load(POSITIONS + n, mask=n < M, other=0)
    else:
        return tl.load(POSITIONS + n)


@triton.jit
def rows_of(POOL, row, there, d, D: tl.constexpr, FP32: tl.constexpr, MASKED: tl.constexpr):
    """Rows [len(row), D] of a cache; zeros where there is none."""
    place = POOL + row.to(tl.int64)[:, None] * D + d[None, :]
    if MASKED:
        x = tl.load(place, mask=there[:, None], other=0.0)
    else:
        x = tl.load(place)
    return widen(x) if FP32 else x


@triton.jit
def at_once(
    q,
    K,
    V,
    row,
    d,
    m,
    place,
    live,
    PART,
    goes_on,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    ALONE: tl.constexpr,
    FP32: tl.constexpr,
):
    """Attention to all rows of a memory, fused with the output at place and its lse m; the mass of the rows goes to
    PART, by the fused softmax or by that of the memory ALONE. Returns (lse, output)."""
    n = tl.arange(0, BN)
    k = rows_of(K, row, n < M, d, D, FP32, BN != M)
    v = rows_of(V, row, n < M, d, D, FP32, BN != M)
    if ALONE:
        most, _, p = weigh(q, k, (n < M)[None, :], tl.full(m.shape, float("-inf"), tl.float32), scale, BN != M)
        sums = tl.sum(p, 1)
        p *= (1 / sums)[:, None]
        if goes_on:
            tl.store(PART + n, tl.sum(p, 0), mask=n < M)
        top = tl.maximum(m, most)
        keep, sums = tl.exp2(m - top), sums * tl.exp2(most - top)
        l = keep + sums
        share = 1 / l
        p *= (sums * share)[:, None]
    else:
        top, keep, p = weigh(q, k, (n < M)[None, :], m, scale, BN != M)
        l = keep + tl.sum(p, 1)
        share = 1 / l
        p *= share[:, None]
        if goes_on:
            tl.store(PART + n, tl.sum(p, 0), mask=n < M)
    weights = p.to(v.dtype)
    # not earlier, because registers hold p; and added last, so that nothing waits for it
    before = tl.load(place, mask=live[:, None], other=0.0)
    return top + tl.log2(l), tl.dot(weights, v, input_precision="ieee") + widen(before) * (keep * share)[:, None]


@triton.jit
def give(
    q,
    K,
    POSITIONS,
    d,
    lse,
    PART,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """PART [M]: the mass of the queries on the rows of a memory, by the softmax with that lse [BM]."""
    key = tl.arange(0, BK)
    for n0 in tl.range(0, M, BK, num_stages=2 * STAGES - 1):
        row = entries(POSITIONS, n0 + key, M, M % BK != 0)
        k = rows_of(K, row, n0 + key < M, d, D, FP32, M % BK != 0)
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :]
        tl.store(PART + n0 + key, tl.sum(tl.exp2(s), 1), mask=n0 + key < M)


@triton.jit(do_not_specialize=["start", "T", "c0", "splits"])
def to_memory(
    Q,
    K,
    V,
    POSITIONS,
    OUT,
    LSE,
    LENGTHS,
    PART,
    scale,
    start,
    T,
    c0,
    splits,
    H,
    G,
    SETS,
    EACH,
    q_b,
    q_t,
    q_h,
    kv_b,
    kv_h,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ALONE: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Phase 2 of the chunk that begins at token c0 of the call: OUT and LSE of phase 1 become those of both.

    K, V [B, KV, ·, D]: the cache, of which POSITIONS int32 [B, SETS, M] are read; EACH query heads share a set. If
    another chunk follows, PART fp32 [B, SETS, splits, M] gets the mass of these BM queries on each key, by the fused
    softmax or by that of the memory ALONE: split (head of the set) · S / BM + tile of queries. BN keys at a time: all M
    at once if BN holds them; otherwise the column sums take a second pass, of BK keys at a time.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, bh = c0 + tl.program_id(0) * BM, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    set_, n = b * SETS + h // EACH, tl.arange(0, BN)
    POSITIONS += set_ * M
    if BN >= M:
        row = entries(POSITIONS, n, M, BN != M)  # loaded together with the length
    length = tl.load(LENGTHS + b) - start
    end = tl.minimum(length, T).to(tl.int32)
    if first >= end:
        return
    t, d = first + tl.arange(0, BM), tl.arange(0, D)
    live, goes_on = t < end, length > c0 + S  # in rows that continue all queries are live
    q = load_queries(Q, b, h, first, t, live, d, q_b, q_t, q_h, FP32)
    place = OUT + (b * T + first) * (H * D) + h * D + (t - first)[:, None] * (H * D) + d[None, :]
    lse = LSE + bh.to(tl.int64) * T + t
    # fuse(total, part): the running softmax continues from (m, l, o) = (lse, 1, out)
    m = tl.load(lse, mask=live, other=0.0)
    run = b * kv_b + (h // G).to(tl.int64) * kv_h
    PART += (set_ * splits + h % EACH * (S // BM) + tl.program_id(0)) * M
    if BN >= M:
        fused, out = at_once(q, K + run, V + run, row, d, m, place, live, PART, goes_on, scale, D, M, BN, ALONE, FP32)
    else:
        before = m
        if ALONE:
            m, l = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
            acc = tl.zeros((BM, D), tl.float32)
        else:
            l, acc = tl.full((BM,), 1.0, tl.float32), widen(tl.load(place, mask=live[:, None], other=0.0))
        for n0 in tl.range(0, M, BN, num_stages=2 * STAGES - 1):  # positions are loaded one tile further ahead
            row = entries(POSITIONS, n0 + n, M, M % BN != 0)
            k = rows_of(K + run, row, n0 + n < M, d, D, FP32, M % BN != 0)
            v = rows_of(V + run, row, n0 + n < M, d, D, FP32, M % BN != 0)
            m, l, acc = add_tile(q, k, v, (n0 + n < M)[None, :], m, l, acc, scale, M % BN != 0)
        fused, out = m + tl.log2(l), acc / l[:, None]
        given = fused  # the lse of the softmax that gives the memory its mass
        if ALONE:
            top = tl.maximum(before, fused)
            x, y = tl.exp2(before - top), tl.exp2(fused - top)
            own = widen(tl.load(place, mask=live[:, None], other=0.0))
            fused, out = top + tl.log2(x + y), (own * x[:, None] + out * y[:, None]) / (x + y)[:, None]
    tl.store(place, narrow(out, OUT.dtype.element_ty), mask=live[:, None])
    tl.store(lse, fused, mask=live)
    if BN < M:
        if goes_on:
            give(q, K + run, POSITIONS, d, given, PART, scale, D, M, BK, FP32, STAGES)
