"""Device code of block choice: scores of blocks in one pass over their summaries, and exact top-k without sorting.

A keep-set is written in three runs: sink blocks, distant blocks, local blocks. By importance the runs are sinks, local
blocks from the newest on, distant blocks by falling score.
"""

import triton
import triton.language as tl

from dsv4.kernels.indexer.triton_scores import monotone
from dsv4.kernels.indexer.triton_topk import _threshold, sortable
from dsv4.kernels.quantize.triton_codes import widen

_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def current_block(START, row, T, KV, BLOCK: tl.constexpr):
    """(row of the batch, its token, the block of the token's position) of one query and KV head."""
    token = row // KV
    b, t = token // T, token % T
    return b, t, ((tl.load(START + b) + t) // BLOCK).to(tl.int32)


@triton.jit
def summaries(POOL, number, live, d, D: tl.constexpr, FP32: tl.constexpr):
    x = tl.load(POOL + number.to(tl.int64)[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    return widen(x) if FP32 else x


@triton.jit(do_not_specialize=["T", "sink", "local"])
def score_blocks(
    Q,
    FIRST,
    SECOND,
    START,
    SCORES,
    VISIBLE,
    T,
    KV,
    N,
    sink,
    local,
    q_b,
    q_t,
    q_h,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUND: tl.constexpr,
    EVERY: tl.constexpr,
    FP32: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SCORES fp32 [rows, N] of the distant blocks of query and KV head (axis 0); programs of axis 1 share the tiles of
    BN blocks.

    FIRST, SECOND [B, KV, N, D]: high and low if BOUND, else the mean twice. EVERY: writes −inf for all other blocks;
    otherwise only sinks get −inf. VISIBLE int64 [rows]: the end of the distant blocks.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    b, t, current = current_block(START, row, T, KV, BLOCK)
    kv, until = row % KV, tl.minimum(current - local + 1, N)
    h, d = tl.arange(0, BH), tl.arange(0, DP)
    inside = (h < G)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b.to(tl.int64) * q_b + t * q_t + (kv * G + h)[:, None] * q_h + d[None, :], mask=inside, other=0.0)
    if FP32:
        q = widen(q)
    FIRST += (b.to(tl.int64) * KV + kv) * N * D
    SECOND += (b.to(tl.int64) * KV + kv) * N * D
    if tl.program_id(1) == 0:
        tl.store(VISIBLE + row, tl.maximum(until, 0).to(tl.int64))
    up, down = tl.maximum(q, 0.0).to(q.dtype), tl.minimum(q, 0.0).to(q.dtype)  # min(q, 0) = −relu(−q)
    for tile in tl.range(tl.program_id(1), tl.cdiv(N if EVERY else until, BN), tl.num_programs(1), num_stages=STAGES):
        number = tile * BN + tl.arange(0, BN)
        live = (number >= sink) & (number < until)
        first = summaries(FIRST, number, live, d, D, FP32)
        if BOUND:  # [relu(q), −relu(−q)]·[high; low]
            s = tl.dot(first, tl.trans(up), input_precision="ieee")
            s = tl.dot(summaries(SECOND, number, live, d, D, FP32), tl.trans(down), s, input_precision="ieee")
            score = tl.max(tl.where((h < G)[None, :], s, float("-inf")), 1)
        else:  # heads beyond the group are zeros
            score = tl.sum(tl.dot(first, tl.trans(q), input_precision="ieee"), 1) / G
        score = tl.where(live, score, float("-inf"))
        tl.store(SCORES + row.to(tl.int64) * N + number, score, mask=(number < N) & ((number < until) | EVERY))


@triton.jit
def runs(current, sink, local, RANKED: tl.constexpr):
    """(sinks, the oldest local block, local blocks, where the run of distant blocks begins) of a keep-set."""
    sinks, oldest = tl.minimum(sink, current + 1), tl.maximum(current - local + 1, sink)
    nearby = tl.maximum(current - oldest + 1, 0)
    return sinks, oldest, nearby, sinks + nearby if RANKED else sinks


@triton.jit
def fixed_blocks(OUT, current, sink, local, found, kept, BK: tl.constexpr, RANKED: tl.constexpr):
    """Write sinks, local blocks and −1 around a run of `found` distant blocks; returns where that run begins."""
    sinks, oldest, nearby, begin = runs(current, sink, local, RANKED)
    s = tl.arange(0, BK)
    j = s - sinks if RANKED else s - sinks - found
    near = tl.where((j >= 0) & (j < nearby), current - j if RANKED else oldest + j, -1)
    tl.store(OUT + s, tl.where(s < sinks, s, near), mask=(s < kept) & ((s < begin) | (s >= begin + found)))
    return begin


@triton.jit
def place_key(SCORES, number, live, RANKED: tl.constexpr):
    """int64 keys of blocks, greater for those that come first: of the highest score, or else of the lowest number."""
    if RANKED:
        key = sortable(monotone(tl.load(SCORES + number, mask=live, other=0.0)), number)
    else:
        key = -number.to(tl.int64)
    return key


@triton.jit
def ranks(SCORES, RUN, number, live, found, BN: tl.constexpr, RANKED: tl.constexpr):
    """How many of the `found` blocks at RUN come before each of `number`. BN are compared at a time, because one at a
    time costs a load's latency each."""
    mine, rank = place_key(SCORES, number, live, RANKED), tl.zeros_like(number)
    for first in range(0, found, BN):
        j = first + tl.arange(0, BN)
        other = tl.load(RUN + j, mask=j < found, other=-1)
        before = place_key(SCORES, other, other >= 0, RANKED)
        rank += tl.sum(((other >= 0)[None, :] & (before[None, :] > mine[:, None])).to(tl.int32), 1)
    return rank


@triton.jit
def by_score(SCORES, OUT, found, BK: tl.constexpr, BN: tl.constexpr):
    """Order `found` blocks at OUT by falling score; of equal scores the lowest block comes first."""
    tl.debug_barrier()  # other threads wrote them
    i = tl.arange(0, BK)
    number = tl.load(OUT + i, mask=i < found, other=0)
    rank = ranks(SCORES, OUT, number, i < found, found, BN, True)
    tl.debug_barrier()
    tl.store(OUT + rank, number, mask=i < found)


@triton.jit(do_not_specialize=["T", "sink", "local", "k", "kept"])
def choose_rows(
    SCORES,
    START,
    OUT,
    T,
    KV,
    N,
    sink,
    local,
    k,
    kept,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CLASSES: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    RANKED: tl.constexpr,
    ORDERED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The keep-set int32 [kept] of one row of scores a program, which holds all N of them. Distant blocks are
    ascending, or by falling score if ORDERED, which goes with RANKED."""
    row = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, _, current = current_block(START, row, T, KV, BLOCK)
    until = tl.minimum(current - local + 1, N)
    SCORES += row.to(tl.int64) * N
    OUT += row.to(tl.int64) * kept
    i = tl.arange(0, CANDIDATES)
    live = (i >= sink) & (i < until)
    key = tl.where(live, monotone(tl.load(SCORES + i, mask=live, other=0.0)), _LOWEST)
    bound, reach, above = _threshold(key, live, tl.full((), _LOWEST, tl.int32), k, k, CLASSES, CANDIDATES)
    wanted = tl.where(reach > k, k - above, CANDIDATES)  # of those that equal the bound, the first ones
    higher, equal = live & (key > bound), live & (key == bound)
    one = higher.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(one, 0) - one
    ties = (before >> 16) & 0xFFFF
    found = tl.minimum(k, tl.maximum(until - sink, 0))
    begin = fixed_blocks(OUT, current, sink, local, found, kept, BK, RANKED)
    tl.store(OUT + begin + (before & 0xFFFF) + tl.minimum(ties, wanted), i, mask=higher | (equal & (ties < wanted)))
    if ORDERED:
        by_score(SCORES, OUT + begin, found, BK, BN)


@triton.jit(do_not_specialize=["T", "sink", "local", "k", "kept"])
def arrange_rows(
    START,
    BEST,
    OUT,
    T,
    KV,
    sink,
    local,
    k,
    kept,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
    CHOSEN: tl.constexpr,
    RANKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The keep-set int32 [kept] of one row a program, with the distant blocks of BEST int64 [rows, k], in its order, if
    CHOSEN."""
    row = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, _, current = current_block(START, row, T, KV, BLOCK)
    OUT += row.to(tl.int64) * kept
    if CHOSEN:
        i = tl.arange(0, BK)
        number = tl.load(BEST + row.to(tl.int64) * k + i, mask=i < k, other=-1)
        one = (number >= 0).to(tl.int32)
        begin = fixed_blocks(OUT, current, sink, local, tl.sum(one, 0), kept, BK, RANKED)
        tl.store(OUT + begin + tl.cumsum(one, 0) - one, number.to(tl.int32), mask=number >= 0)
    else:
        fixed_blocks(OUT, current, sink, local, 0, kept, BK, RANKED)


@triton.jit(do_not_specialize=["T", "sink", "local", "k", "kept"])
def order_rows(
    SCORES,
    START,
    LOOSE,
    OUT,
    T,
    KV,
    N,
    sink,
    local,
    k,
    kept,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    RANKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The keep-sets of LOOSE int32 [rows, kept], their distant blocks by falling score if RANKED, else ascending. A
    program puts BM entries of one row in their places."""
    row = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _, _, current = current_block(START, row, T, KV, BLOCK)
    _, _, _, begin = runs(current, sink, local, RANKED)
    found = tl.minimum(k, tl.maximum(tl.minimum(current - local + 1, N) - sink, 0))
    LOOSE += row.to(tl.int64) * kept
    s = tl.program_id(1) * BM + tl.arange(0, BM)
    number = tl.load(LOOSE + s, mask=s < kept, other=-1)
    moved = (s >= begin) & (s < begin + found) & (number >= 0)
    rank = ranks(SCORES + row.to(tl.int64) * N, LOOSE + begin, number, moved, found, BN, RANKED)
    tl.store(OUT + row.to(tl.int64) * kept + tl.where(moved, begin + rank, s), number, mask=s < kept)
