"""Device code of grouped-query attention of single queries: one pass over a split's tiles of keys, and the merge of
such passes.

A program takes one token of a row, one KV head with all query heads of its group, and every `splits`-th of the token's
units. A unit is UNIT tokens: of the sequence, the first unit first and then the newest to the oldest, or of a list of
blocks in its order. Dividing units round-robin gives each split old and new keys, and equal work at every length.
Logits are kept in powers of two (scale comes multiplied by log2 e).
"""

import triton
import triton.language as tl

from dsv4.kernels.attention.triton_tiles import weigh
from dsv4.kernels.quantize.triton_codes import narrow, widen

LOG2E = 1.4426950408889634


@triton.jit
def unit_base(i, first, last, UNIT: tl.constexpr):
    """First position of unit i of a dense traversal: the first unit of the sequence if it is seen at all, then newest
    first."""
    back = tl.where(first == 0, i - 1, i)
    return tl.where((first == 0) & (i == 0), 0, last - back) * UNIT


@triton.jit
def listed_base(BLOCKS, at, n, BLOCK: tl.constexpr):
    """Position of token `at` of a list of n blocks; negative, by at least one block, where there is no block."""
    slot = at // BLOCK
    number = tl.load(BLOCKS + slot, mask=slot < n, other=-1)
    return tl.where(number < 0, -BLOCK, number * BLOCK + at % BLOCK)


@triton.jit
def base_of(
    j,
    split,
    splits,
    first,
    last,
    BLOCKS,
    n,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Position at which tile j of a split's tiles begins: a number, or [BN] positions where tiles hold several
    blocks."""
    SUB: tl.constexpr = UNIT // BN
    i, part = split + j // SUB * splits, j % SUB * BN
    if LISTED:
        if BLOCK >= BN:
            base = listed_base(BLOCKS, i * UNIT + part, n, BLOCK)
        else:
            base = listed_base(BLOCKS, i * UNIT + part + tl.arange(0, BN), n, BLOCK)
    else:
        base = unit_base(i, first, last, UNIT) + part
    return base


@triton.jit
def positions(base, LISTED: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr):
    """int32 [BN] positions of a tile that begins at `base`."""
    if LISTED and BLOCK < BN:
        place = base
    else:
        place = base + tl.arange(0, BN)
    return place


@triton.jit
def load_tile(
    POOL,
    base,
    seen,
    d,
    D: tl.constexpr,
    DP: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    FP32: tl.constexpr,
):
    """Keys or values [BN, DP] at a tile's positions; unseen positions are not read and give zeros."""
    if LISTED and BLOCK < BN:
        at = base[:, None].to(tl.int64) * D + d[None, :]
    else:
        POOL += base.to(tl.int64) * D
        at = tl.arange(0, BN)[:, None] * D + d[None, :]
    if D == DP:
        x = tl.load(POOL + at, mask=seen[:, None], other=0.0)
    else:
        x = tl.load(POOL + at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    return widen(x) if FP32 else x


@triton.jit
def add_tile(q, k, v, seen, m, l, acc, scale):
    """One step of the running softmax. m [BH] maximum, l [BH, BN] sums by place in the tile, acc [BH, DP] weighted
    values."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    m, keep, p = weigh(s, seen, m, scale)
    return m, l * keep[:, None] + p, tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")


@triton.jit
def met_by(base, seen, lowest, p, LISTED: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr):
    """1 if something of a tile is seen, else 0. The ends of consecutive positions say so; a maximum over `seen` would
    make the warps wait for each other at every tile."""
    if LISTED and BLOCK < BN:
        met = tl.max(seen.to(tl.int32), 0)
    else:
        met = ((base <= p) & (base + (BN - 1) > lowest)).to(tl.int32)
    return met


@triton.jit
def probe(l, acc, probed):
    """The probed channels of the output so far: [BH, DP], 0 elsewhere."""
    total = tl.sum(l, 1)
    return tl.where(probed[None, :], acc * (1.0 / tl.where(total == 0, 1.0, total))[:, None], 0.0)


@triton.jit
def _added(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def is_stable(x, before, tau, cosine, SCALE: tl.constexpr, DIRECTION: tl.constexpr):
    """int1 [BH]: whether a probe [BH, DP] is stable after the one before. NaN is not. All four sums are one reduction,
    because each makes the warps wait for each other."""
    change = x - before
    moved, along, square, norm = tl.reduce((change * change, x * before, x * x, before * before), 1, _added)
    if SCALE:  # ‖x⁽ᵗ⁾ − x⁽ᵗ⁻¹⁾‖₂ < τ
        stable = moved < tau * tau
        if DIRECTION:
            stable = stable & (along > cosine * tl.sqrt(square * norm))
    else:  # 1 − cos(x⁽ᵗ⁾, x⁽ᵗ⁻¹⁾) < φ
        stable = along > cosine * tl.sqrt(square * norm)
    return stable


@triton.jit(do_not_specialize=["T", "n", "splits", "window", "patience"])
def attend(
    Q,
    KEYS,
    VALUES,
    BLOCKS,
    START,
    OUT,
    LSE,
    READ,
    scale,
    window,
    tau,
    cosine,
    patience,
    T,
    S,
    KV,
    n,
    splits,
    q_b,
    q_t,
    q_h,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    ART: tl.constexpr,
    ENDS: tl.constexpr,
    SCALE: tl.constexpr,
    DIRECTION: tl.constexpr,
    STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    PROBED: tl.constexpr,
    CHUNK: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention of token t of row b to its keys under one KV head: axis 0 is (b·T + t)·KV + kv, axis 1 the split.

    Q [B, T, H, D]; KEYS, VALUES [B, KV, S, D]; BLOCKS int32 [B, T, KV, n] if LISTED; START int64 [B]. OUT [B·T, splits,
    H, D] in fp32 with LSE fp32 [B·T, H, splits] (base 2, −inf of an empty split) if SPLIT, else OUT [B·T, H, D]. ART:
    READ int32 [B·T·KV, splits] gets the units that were added. ENDS: terminates (some split may have enough units to
    leave one out). Channel d is probed if ((d − OFFSET)·STEP) mod D < PROBED, and only while stopping could still leave
    a unit out. Keys are then loaded CHUNK units at a time; units after the stop in the same chunk are loaded and not
    added.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, split = tl.program_id(0), tl.program_id(1)
    kv, token = row % KV, row // KV
    b, t = token // T, token % T
    p = tl.minimum(tl.load(START + b) + t, S - 1).to(tl.int32)
    lowest = tl.full((), -1, tl.int32)  # the last position that is not seen
    if WINDOWED:
        lowest = tl.maximum(p - window, -1)
    first, last = (lowest + 1) // UNIT, p // UNIT
    units = tl.cdiv(n * BLOCK, UNIT) if LISTED else last - first + 1
    mine = tl.maximum(tl.cdiv(units - split, splits), 0)
    h, d, head = tl.arange(0, BH), tl.arange(0, DP), b.to(tl.int64) * KV + kv
    KEYS += head * S * D
    VALUES += head * S * D
    BLOCKS += row.to(tl.int64) * n
    inside = (h < G)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b.to(tl.int64) * q_b + t * q_t + (kv * G + h)[:, None] * q_h + d[None, :], mask=inside, other=0.0)
    if FP32:
        q = widen(q)
    m = tl.full((BH,), float("-inf"), tl.float32)
    l, acc = tl.zeros((BH, BN), tl.float32), tl.zeros((BH, DP), tl.float32)
    SUB: tl.constexpr = UNIT // BN
    # units of which something was seen; of this unit: 1 if something was seen
    read, met = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if ENDS:
        probed = (d < D) & (((d + (D - OFFSET)) * STEP) % D < PROBED)
        before, streak = tl.zeros((BH, DP), tl.float32), tl.zeros((BH,), tl.int32)
        stopped, running = h >= G, mine > 0
        need = patience + tl.full((), 0, tl.int32)  # the least number of stable units until all heads have stopped
        # Triton (3.7) fails on this as a while loop; a skipped iteration costs a branch
        for c in tl.range(0, tl.cdiv(mine, CHUNK), num_stages=1):
            # a chunk whose tiles are loaded before it is known whether they are needed: all of it is read
            if running:
                for j in tl.range(c * (CHUNK * SUB), tl.minimum((c + 1) * CHUNK, mine) * SUB, num_stages=STAGES):
                    base = base_of(j, split, splits, first, last, BLOCKS, n, LISTED, BLOCK, BN, UNIT)
                    place = positions(base, LISTED, BLOCK, BN)
                    seen = (place > lowest) & (place <= p)
                    k = load_tile(KEYS, base, seen, d, D, DP, LISTED, BLOCK, BN, FP32)
                    v = load_tile(VALUES, base, seen, d, D, DP, LISTED, BLOCK, BN, FP32)
                    seen = seen & running
                    m, l, acc = add_tile(q, k, v, seen, m, l, acc, scale)
                    here = met_by(base, seen, lowest, p, LISTED, BLOCK, BN)
                    met = tl.maximum(met, tl.where(running, here, 0))
                    if j % SUB == SUB - 1:  # the end of a unit
                        # something of the unit is seen, and stopping may leave some out
                        if (met > 0) & (j // SUB + need < mine):
                            x = probe(l, acc, probed)
                            if read > 0:  # the first unit follows none
                                stable = is_stable(x, before, tau, cosine, SCALE, DIRECTION)
                                streak = tl.where(stable, streak + 1, 0)
                                stopped = stopped | (streak >= patience)
                                need = tl.max(tl.where(stopped, 0, patience - streak), 0)
                                running = need > 0
                            before = x
                        read += met
                        met = tl.full((), 0, tl.int32)
    else:
        # a block number carried from tile to tile would break the pipeline
        for j in tl.range(0, mine * SUB, num_stages=STAGES):
            base = base_of(j, split, splits, first, last, BLOCKS, n, LISTED, BLOCK, BN, UNIT)
            place = positions(base, LISTED, BLOCK, BN)
            seen = (place > lowest) & (place <= p)
            k = load_tile(KEYS, base, seen, d, D, DP, LISTED, BLOCK, BN, FP32)
            v = load_tile(VALUES, base, seen, d, D, DP, LISTED, BLOCK, BN, FP32)
            m, l, acc = add_tile(q, k, v, seen, m, l, acc, scale)
            if ART:
                met = tl.maximum(met, met_by(base, seen, lowest, p, LISTED, BLOCK, BN))
                ended = j % SUB == SUB - 1
                read, met = read + tl.where(ended, met, 0), tl.where(ended, 0, met)
    if ART:
        tl.store(READ + row * splits + split, read)
    total = tl.sum(l, 1)
    out = acc / tl.where(total == 0, 1.0, total)[:, None]  # no key: 0
    heads = KV * G
    at = ((token.to(tl.int64) * splits + split) * heads + kv * G + h)[:, None] * D + d[None, :]
    tl.store(OUT + at, narrow(out, OUT.dtype.element_ty), mask=inside)
    if SPLIT:
        tl.store(LSE + (token.to(tl.int64) * heads + kv * G + h) * splits + split, m + tl.log2(total), mask=h < G)


@triton.jit(do_not_specialize=["splits"])
def merge(
    PARTIAL,
    LSE,
    READ,
    OUT,
    TILES,
    H,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    ART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """PARTIAL fp32 [N, splits, H, D], each divided by its own sum, LSE [N, H, splits] → OUT [N, H, D]; the units that
    all splits read → TILES int32 [N, KV]. BS splits at a time, in order; an empty split counts as 0."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    nh, d, s = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, BS)
    n, h = nh // H, nh % H
    lses, parts = LSE + nh.to(tl.int64) * splits, PARTIAL + n.to(tl.int64) * splits * H * D + h * D
    top = tl.full((), float("-inf"), tl.float32)
    total, acc = tl.full((), 0.0, tl.float32), tl.zeros((BD,), tl.float32)
    count = tl.zeros((BS,), tl.int32)
    for s0 in range(0, splits, BS):
        lse = tl.load(lses + s0 + s, mask=s0 + s < splits, other=float("-inf"))
        if ART:  # loaded together with values that are waited for anyway
            count += tl.load(READ + (nh // G).to(tl.int64) * splits + s0 + s, mask=s0 + s < splits, other=0)
        live = (lse != float("-inf"))[:, None] & (d < D)[None, :]  # NaN is live
        part = tl.load(parts + ((s0 + s) * (H * D))[:, None] + d[None, :], mask=live, other=0.0)
        above = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(above == float("-inf"), 0.0, above)
        keep, weight = tl.exp2(top - safe), tl.exp2(lse - safe)
        total, acc = total * keep + tl.sum(weight, 0), acc * keep + tl.sum(weight[:, None] * part, 0)
        top = above
    tl.store(
        OUT + nh.to(tl.int64) * D + d, narrow(acc / tl.where(total == 0, 1.0, total), OUT.dtype.element_ty), mask=d < D
    )
    if ART:
        if (h % G == 0) & (tl.program_id(1) == 0):
            tl.store(TILES + nh // G, tl.sum(count, 0))
