"""Device code of both phases' attention: a program takes a tile of queries of one head.

Logits are kept in powers of two (scale comes multiplied by log2 e). A finished softmax is (lse, o): its output, and m + log2 l.
"""

import triton
import triton.language as tl

from kernels.quantize.triton_codes import narrow, widen


@triton.jit
def load_queries(Q, b, h, first, t, live, d, q_b, q_t, q_h, FP32: tl.constexpr):
    """[BM, D] queries of head h; zeros where not live."""
    place = Q + b * q_b + first.to(tl.int64) * q_t + h * q_h
    q = tl.load(place + (t - first)[:, None] * q_t + d[None, :], mask=live[:, None], other=0.0)
    return widen(q) if FP32 else q


@triton.jit
def add_tile(q, k, v, seen, m, l, acc, scale, MASKED: tl.constexpr):
    """One step of the running softmax: m [BM] maximum, l [BM] sum, acc [BM, D] weighted values."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1) * scale)
    keep, p = tl.exp2(m - top), tl.exp2(s * scale - top[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return top, l * keep + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["start", "T"])
def within_chunks(Q, K, V, OUT, LSE, LENGTHS, scale, start, T, H, G, q_b, q_t, q_h, kv_b, kv_h, S: tl.constexpr, D: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, FP32: tl.constexpr, STAGES: tl.constexpr):
    """Phase 1. Q, OUT [B, T, H, D]; K, V [B, KV, ·, D]; LSE fp32 [B, H, T]. S is a multiple of BM and BM of BN.

    Beyond a row's length OUT is 0 and LSE +inf.
    """
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
        at, there = run + n0 * D, (n0 + n < end)[:, None]  # what no token has written may be NaN
        k, v = tl.load(K + at + tile, mask=there, other=0.0), tl.load(V + at + tile, mask=there, other=0.0)
        if FP32:
            k, v = widen(k), widen(v)
        m, l, acc = add_tile(q, k, v, t[:, None] >= (n0 + n)[None, :], m, l, acc, scale, True)
    out = tl.where(live[:, None], acc / l[:, None], 0.0)
    tl.store(place, narrow(out, OUT.dtype.element_ty), mask=(t < T)[:, None])
    tl.store(lse, tl.where(live, m + tl.log2(l), float("inf")), mask=t < T)


@triton.jit(do_not_specialize=["start", "T", "c0"])
def to_memory(Q, K, V, OUT, LSE, LENGTHS, scale, start, T, c0, H, G, KV, q_b, q_t, q_h, S: tl.constexpr, D: tl.constexpr,
              M: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FP32: tl.constexpr, STAGES: tl.constexpr):
    """Phase 2 of the chunk that begins at token c0 of the call: OUT and LSE of phase 1 become those of both.

    K, V [B, KV, ROWS, D] are the memory, gathered; M of the rows are keys, and ROWS is a multiple of BN.
    """
    first, bh = c0 + tl.program_id(0) * BM, tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    t, d = first + tl.arange(0, BM), tl.arange(0, D)
    end = tl.minimum(tl.load(LENGTHS + b) - start, T).to(tl.int32)
    if first >= end:
        return
    live = t < end
    q = load_queries(Q, b, h, first, t, live, d, q_b, q_t, q_h, FP32)
    place = OUT + (b * T + first) * (H * D) + h * D + (t - first)[:, None] * (H * D) + d[None, :]
    lse = LSE + bh.to(tl.int64) * T + t
    # fuse(total, part): the running softmax goes on from (m, l, o) = (lse, 1, out)
    m, l = tl.load(lse, mask=live, other=0.0), tl.full((BM,), 1.0, tl.float32)
    acc = widen(tl.load(place, mask=live[:, None], other=0.0))
    n = tl.arange(0, BN)
    run, tile = (b * KV + h // G) * (ROWS * D), n[:, None] * D + d[None, :]
    for n0 in tl.range(0, ROWS, BN, num_stages=STAGES):
        k, v = tl.load(K + run + n0 * D + tile), tl.load(V + run + n0 * D + tile)
        if FP32:
            k, v = widen(k), widen(v)
        m, l, acc = add_tile(q, k, v, (n0 + n < M)[None, :], m, l, acc, scale, M < ROWS)
    tl.store(place, narrow(acc / l[:, None], OUT.dtype.element_ty), mask=live[:, None])
    tl.store(lse, m + tl.log2(l), mask=live)
