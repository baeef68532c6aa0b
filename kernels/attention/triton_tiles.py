"""Device code of attention over one shared latent (K = V): one pass over tiles of keys, and the merge of partial
passes.

A program takes one query, a block of its heads, and a run of the query's tiles: first the window's, then the entries'.
Logits are kept in powers of two (scale and sink come multiplied by log2 e).
"""

import triton
import triton.language as tl

from dsv4.kernels.cache_rows.triton import load_fp8_rows
from dsv4.kernels.quantize.triton_codes import narrow, widen

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["T", "W", "K", "splits", "wi_n", "ei_n", "v_b"])
def attend(
    Q,
    OUT,
    LSE,
    SINK,
    WINDOW,
    ENTRIES,
    WINDOW_INDEX,
    ENTRY_INDEX,
    VISIBLE,
    scale,
    T,
    H,
    W,
    K,
    splits,
    q_b,
    q_t,
    q_h,
    e_b,
    wi_n,
    wi_k,
    ei_n,
    ei_k,
    v_b,
    v_t,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    DP: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    W_ROW: tl.constexpr,
    E_ROW: tl.constexpr,
    W_PACKED: tl.constexpr,
    E_PACKED: tl.constexpr,
    WORDS: tl.constexpr,
    BIG: tl.constexpr,
    LISTED: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    SPLIT: tl.constexpr,
    UNCHAIN: tl.constexpr,
    FP32: tl.constexpr,
    HARDWARE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention of query n = b·T + t over its window rows and entries.

    Q [B, T, H, D]; OUT [N, splits, H, D] with LSE fp32 [N, H, splits] (base 2, −inf of an empty split) if SPLIT, else
    OUT [N, H, D]. WINDOW_INDEX [N, W]; LISTED: ENTRY_INDEX [N, K] are rows of a flat pool, else the entries are those
    below VISIBLE [B, T] of run b, K in the buffer. W_ROW, E_ROW: numbers from row to row, or bytes from page to page if
    packed.
    ONE_LOOP: both pools have one type and row stride. BIG: offsets need 64 bits. WORDS, HARDWARE: as in
    `load_fp8_rows`.
    """
    if DEPENDENT:
        # No later kernel starts before this one has ended. A multiprocessor divides its L1 and shared memory anew only
        # when it is idle, and if every launch overlapped with the next it never would be: after attention over long
        # contexts the experts of the same layer took 46 instead of 32 µs (H100; 0.35 ms of a step at 1M).
        tl.extra.cuda.gdc_wait()
    n, split = tl.program_id(0) // tl.cdiv(H, BH), tl.program_id(1)
    h, d = tl.program_id(0) % tl.cdiv(H, BH) * BH + tl.arange(0, BH), tl.arange(0, DP)
    b, t, n, col = (n // T).to(tl.int64), n % T, n.to(tl.int64), tl.arange(0, BN)
    seen, listed = K, K
    if not LISTED:  # unseen = entry[tile] >= visible
        seen, listed = tl.maximum(0, tl.minimum(tl.load(VISIBLE + b * v_b + t * v_t), K)).to(tl.int32), 0
    near = tl.cdiv(W, BN)
    tiles = near + tl.cdiv(seen, BN)
    each = tl.cdiv(tiles, splits)
    first, last = split * each, tl.minimum(split * each + each, tiles)
    if SPLIT:
        if first >= last:
            tl.store(LSE + (n * H + h) * splits + split, tl.full((BH,), float("-inf"), tl.float32), mask=h < H)
            return
    window_list, entry_list, run = WINDOW_INDEX + n * wi_n, ENTRY_INDEX + n * ei_n, ENTRIES + b * e_b
    if LISTED:
        rows = listed_rows(first, near, window_list, wi_k, W, entry_list, ei_k, listed, BN, LANES)
    inside = (h < H)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + t * q_t + h[:, None] * q_h + d[None, :], mask=inside, other=0.0)
    if FP32:
        q = widen(q)
    m = tl.full((BH,), float("-inf"), tl.float32)
    if not SPLIT:  # logits[:, :, -1] = sink
        sink = tl.load(SINK + h, mask=h < H, other=0.0).to(tl.float32) * LOG2E
        m = sink
    l, acc = tl.zeros((BH, BN), tl.float32), tl.zeros((BH, DP), tl.float32)
    # Each loop is behind a condition, so it runs at least once. Otherwise ptxas sees that a product in flight may meet
    # zeros at the end of the loop, and waits for every product.
    if ONE_LOOP:
        if first < last:
            for tile in tl.range(first, last, num_stages=STAGES):
                row = compact(rows, BIG)
                rows = listed_rows(tile + 1, near, window_list, wi_k, W, entry_list, ei_k, listed, BN, LANES)
                pool = tl.where(tile < near, WINDOW, ENTRIES)
                k = load_rows(pool, row, d, D, ROPE, DP, W_ROW, W_PACKED, WORDS, FP32, HARDWARE)
                m, l, acc = add_tile(q, k, row >= 0, m, l, acc, scale, T, UNCHAIN)
    else:
        middle = tl.minimum(last, near)
        if first < middle:
            for tile in tl.range(first, middle, num_stages=STAGES):
                if LISTED:
                    row = compact(rows, BIG)
                    rows = listed_rows(tile + 1, near, window_list, wi_k, W, entry_list, ei_k, listed, BN, LANES)
                else:
                    row = compact(
                        listed_rows(tile, near, window_list, wi_k, W, entry_list, ei_k, listed, BN, LANES), BIG
                    )
                k = load_rows(WINDOW, row, d, D, ROPE, DP, W_ROW, W_PACKED, WORDS, FP32, HARDWARE)
                m, l, acc = add_tile(q, k, row >= 0, m, l, acc, scale, T, UNCHAIN)
        first = tl.maximum(first, near)
        if first < last:
            for tile in tl.range(first, last, num_stages=STAGES):
                if LISTED:
                    row = compact(rows, BIG)
                    rows = listed_rows(tile + 1, near, window_list, wi_k, W, entry_list, ei_k, listed, BN, LANES)
                else:
                    e = (tile - near) * BN + col
                    row = tl.where(e < seen, e.to(tl.int64) if BIG else e, -1)
                k = load_rows(run, row, d, D, ROPE, DP, E_ROW, E_PACKED, WORDS, FP32, HARDWARE)
                m, l, acc = add_tile(q, k, row >= 0, m, l, acc, scale, T, UNCHAIN)
    total = tl.sum(l, 1)
    if SPLIT:
        tl.store(LSE + (n * H + h) * splits + split, m + tl.log2(total), mask=h < H)
    else:
        total += tl.exp2(sink - tl.where(m == float("-inf"), 0.0, m))
    tl.store(
        OUT + ((n * splits + split) * H + h)[:, None] * D + d[None, :],
        narrow(acc / total[:, None], OUT.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def listed_rows(tile, near, window_list, wi_k, W, entry_list, ei_k, K, BN: tl.constexpr, LANES: tl.constexpr):
    """Rows that the lists hold for a tile, int64 [BN, LANES], −1 beyond their ends and in all lanes but one.

    They are loaded one tile ahead, with lanes so that there are as many numbers as threads: every thread would load
    fewer numbers again, for each layout that is needed of them.
    """
    listed = tl.where(tile < near, window_list, entry_list)
    stride, limit = tl.where(tile < near, wi_k, ei_k), tl.where(tile < near, W, K)
    j, lane = (tile - tl.where(tile < near, 0, near)) * BN + tl.arange(0, BN), tl.arange(0, LANES)
    exists = (j < limit)[:, None] & (lane == 0)[None, :]
    return tl.load(listed + (j * stride)[:, None] + 0 * lane[None, :], mask=exists, other=-1)


@triton.jit
def compact(rows, BIG: tl.constexpr):
    """[BN, LANES] → the lane that exists, int32 [BN] (int64 if BIG)."""
    return tl.max(rows if BIG else rows.to(tl.int32), 1)


@triton.jit
def load_rows(
    pool,
    row,
    d,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    DP: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    WORDS: tl.constexpr,
    FP32: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """rows.masked_fill_(absent, 0): [BN, DP] in the type of the products. Absent rows (< 0) are not read."""
    if PACKED:
        k = load_fp8_rows(pool, row, STRIDE, D, ROPE, DP, WORDS, HARDWARE)
    elif D == DP:
        k = tl.load(pool + row[:, None] * STRIDE + d[None, :], mask=(row >= 0)[:, None], other=0.0)
    else:
        k = tl.load(pool + row[:, None] * STRIDE + d[None, :], mask=(row >= 0)[:, None] & (d < D)[None, :], other=0.0)
    return widen(k) if FP32 else k.to(tl.bfloat16)


@triton.jit
def add_tile(q, k, present, m, l, acc, scale, T, UNCHAIN: tl.constexpr):
    """One step of the running softmax. m [BH] maximum, l [BH, BN] sums by place in the tile, acc [BH, DP] weighted
    rows.

    UNCHAIN: when one product feeds another, the compiler gives each warp whole rows of both. 64 heads are rows for four
    warps, and the other four would repeat their work. This condition hides the chain from the compiler; it always
    holds, and is removed before the machine code.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if UNCHAIN:
        if (T & 1) < 2:
            top, keep, p = weigh(s, present, m, scale)
        else:
            top, keep, p = m, m, s
    else:
        top, keep, p = weigh(s, present, m, scale)
    acc = tl.dot(p.to(k.dtype), k, acc * keep[:, None], input_precision="ieee")
    return top, l * keep[:, None] + p, acc


@triton.jit
def weigh(s, present, m, scale):
    """The new maximum, the factor for old sums, and the weights 2^(s − maximum); absent keys weigh 0."""
    s = tl.where(present[None, :], s * scale, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # −inf − −inf is NaN
    return top, tl.exp2(m - safe), tl.exp2(s - safe[:, None])


@triton.jit(do_not_specialize=["splits"])
def merge(
    PARTIAL,
    LSE,
    SINK,
    OUT,
    H,
    splits,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Partial outputs [N, splits, H, D], each divided by its own sum, LSE [N, H, splits] and the sink → OUT [N, H, D].

    Splits are added one after another, and BS are read at a time; there are MOST or fewer.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    nh, d, s = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, MOST)
    n, h = nh // H, nh % H
    lses, parts = LSE + nh.to(tl.int64) * splits, PARTIAL + n.to(tl.int64) * splits * H * D + h * D + d
    sink = tl.load(SINK + h).to(tl.float32) * LOG2E
    top = tl.max(tl.load(lses + s, mask=s < splits, other=float("-inf")), 0)
    safe, total = opened(sink, tl.maximum(sink, top))
    acc = tl.zeros((BD,), tl.float32)
    for s0 in range(0, splits, BS):
        given = ()
        for i in tl.static_range(BS):
            live = (s0 + i < splits) & (d < D)
            given = given + (tl.load(parts + (s0 + i) * (H * D), mask=live, other=0.0),)
        for i in tl.static_range(BS):
            lse = tl.load(lses + s0 + i, mask=s0 + i < splits, other=float("-inf"))
            total, acc = added(total, acc, lse, given[i], safe)
    tl.store(OUT + nh.to(tl.int64) * D + d, narrow(acc / total, OUT.dtype.element_ty), mask=d < D)


@triton.jit
def opened(sink, top):
    """What is subtracted from logarithms, whose maximum is `top`, and the sum with the sink alone."""
    safe = tl.where(top == float("-inf"), 0.0, top)  # −inf − −inf is NaN
    return safe, tl.exp2(sink - safe)


@triton.jit
def added(total, acc, lse, part, safe):
    """The sum of weights and the weighted sum of outputs with one more split; an empty one (−inf) has no output, and
    its place counts as 0."""
    weight = tl.exp2(lse - safe)
    return total + weight, tl.fma(weight, tl.where(lse == float("-inf"), 0.0, part), acc)
