"""Device code of grouped-query attention of many queries: tiles of queries of one head against tiles of keys, causal
from `start`.

Tiles of keys that all queries of a tile see need no mask; only those on the diagonal, and at the far edge of a window,
have one.
"""

import triton
import triton.language as tl

from dsv4.kernels.quantize.triton_codes import narrow, widen


@triton.jit
def _rows(
    POOL, first, limit, d, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, FP32: tl.constexpr
):
    """Rows first … first + BN − 1 of one head [BN, DP]; MASKED: zeros after `limit`, where nothing is read."""
    i = tl.arange(0, BN)
    at = POOL + (tl.full((), 0, tl.int64) + first) * D + i[:, None] * D + d[None, :]
    if MASKED:
        x = tl.load(at, mask=(first + i <= limit)[:, None] & (d < D)[None, :], other=0.0)
    elif D == DP:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(d < D)[None, :], other=0.0)
    return widen(x) if FP32 else x


@triton.jit
def _over(
    q,
    KEYS,
    VALUES,
    begin,
    end,
    place,
    limit,
    window,
    scale,
    m,
    l,
    acc,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add tiles begin … end − 1 of keys to the running softmax of queries at positions `place`."""
    for tile in tl.range(begin, end, num_stages=STAGES):
        k = _rows(KEYS, tile * BN, limit, d, D, DP, BN, MASKED, FP32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            key = tile * BN + tl.arange(0, BN)
            seen = key[None, :] <= place[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > (place - window)[:, None])
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(top == float("-inf"), 0.0, top) if MASKED else top  # −inf − −inf is NaN
        keep, w = tl.exp2(m - safe), tl.exp2(s - safe[:, None])
        v = _rows(VALUES, tile * BN, limit, d, D, DP, BN, MASKED, FP32)
        acc = tl.dot(w.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        m, l = top, l * keep + tl.sum(w, 1)
    return m, l, acc


@triton.jit(do_not_specialize=["T", "window"])
def prefill(
    Q,
    KEYS,
    VALUES,
    START,
    OUT,
    scale,
    window,
    T,
    S,
    H,
    q_b,
    q_t,
    q_h,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOWED: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BM queries (axis 1, the latest first: they see the most) of head h (axis 0) of row b (axis 2).

    Q, OUT [B, T, H, D]; KEYS, VALUES [B, KV, S, D]; START int64 [B]. Heads of a group run side by side, over the same
    keys.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    h, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    t = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM + tl.arange(0, BM)
    start, d = tl.load(START + b).to(tl.int32), tl.arange(0, DP)
    head = (b * (H // G) + h // G) * S * D
    KEYS += head
    VALUES += head
    inside = (t < T)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + t.to(tl.int64)[:, None] * q_t + h * q_h + d[None, :], mask=inside, other=0.0)
    if FP32:
        q = widen(q)
    place = start + t
    low = start + (tl.num_programs(1) - 1 - tl.program_id(1)) * BM  # the first query's position, and the last one's
    limit = tl.minimum(tl.minimum(low + BM, start + T) - 1, S - 1)
    end, whole, full = limit // BN + 1, (low + 1) // BN, tl.full((), 0, tl.int32)
    m, l, acc = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, DP), tl.float32)
    if WINDOWED:
        far = tl.maximum(low - window + 1, 0) // BN
        full = tl.where(limit >= window, tl.minimum(tl.maximum((limit - window) // BN + 1, far), end), far)
        m, l, acc = _over(
            q,
            KEYS,
            VALUES,
            far,
            full,
            place,
            limit,
            window,
            scale,
            m,
            l,
            acc,
            d,
            D,
            DP,
            BN,
            True,
            WINDOWED,
            FP32,
            STAGES,
        )
    whole = tl.maximum(whole, full)
    m, l, acc = _over(
        q,
        KEYS,
        VALUES,
        full,
        whole,
        place,
        limit,
        window,
        scale,
        m,
        l,
        acc,
        d,
        D,
        DP,
        BN,
        False,
        WINDOWED,
        FP32,
        STAGES,
    )
    m, l, acc = _over(
        q, KEYS, VALUES, whole, end, place, limit, window, scale, m, l, acc, d, D, DP, BN, True, WINDOWED, FP32, STAGES
    )
    at = OUT + ((b * T + t)[:, None] * H + h) * D + d[None, :]
    tl.store(at, narrow(acc / l[:, None], OUT.dtype.element_ty), mask=inside)
