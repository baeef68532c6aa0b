"""The kernel of the lightning indexer's scores, and how it is launched.

A program holds a few queries of all heads and goes over tiles of keys, each decoded once. Keys are the rows of the product and
heads its columns, so that the weighted sum over heads stays within a thread but for two exchanges.
"""

import torch
import triton
import triton.language as tl

from kernels.cache_rows.formats import PAGE, PackedRows, RowFormat
from kernels.errors import UnsupportedInput
from kernels.indexer.triton_keys import FP4, FP8, PLAIN, dots_fp32, load_queries, operand_keys, operand_queries
from kernels.launch import capability, dot_in_fp32, next_power, processors, require_device

MAX_OPERAND = 1 << 15  # numbers of all heads of one query, padded: 64 KB of shared memory in bf16
GROUP = 8              # entries under one maximum; maxima of those in turn
_GROUP, _PAGE = tl.constexpr(GROUP), tl.constexpr(PAGE)


@triton.jit
def monotone(score):
    """fp32 → int32 in the same order, both zeros alike; −inf is −2139095041."""
    bits = tl.where(score == 0.0, 0, score.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["T", "tiles_t", "n", "w_b", "w_t", "v_b", "v_t"])
def _scores(Q, WEIGHTS, KEYS, SCALES, VISIBLE, SCORES, MAXIMA, COUNT, T, tiles_t, n, q_b, q_t, w_b, w_t, v_b, v_t, key_b,
            key_row, scale_b, scale_row, width, maxima_width, maxima_second, H: tl.constexpr, D: tl.constexpr,
            DIMS: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
            GROUPS: tl.constexpr, TILE: tl.constexpr, EVERY: tl.constexpr, LEVELS: tl.constexpr, STAGES: tl.constexpr):
    """Scores of QUERIES·GROUPS queries of one batch row (axis 0) against every P-th tile of keys, P programs along axis 1.

    key_row, scale_row: elements from key to key (PLAIN), or bytes (FP8 scales: numbers) from page to page. EVERY: −inf where
    invisible, which is otherwise not written. LEVELS: MAXIMA int32 [rows, maxima_width] gets the `monotone` maximum of each 8
    entries, and with 2 from maxima_second on of each 64. COUNT int32 [rows], if there are levels, is zeroed for the selection.
    """
    N: tl.constexpr = QUERIES * HEADS
    b, first = (tl.program_id(0) // tiles_t).to(tl.int64), tl.program_id(0) % tiles_t * (QUERIES * GROUPS)
    column, entry = tl.arange(0, N), tl.arange(0, TILE)
    head, which = column % HEADS, tl.arange(0, QUERIES)
    ends, weights, rows, queries = (), (), (), ()  # of each group
    for g in tl.static_range(GROUPS):
        t, u = first + g * QUERIES + which, first + g * QUERIES + column // HEADS  # the query of a result, of a column
        live = (u < T) & (head < H)
        ends = ends + (tl.minimum(tl.load(VISIBLE + b * v_b + t * v_t, mask=t < T, other=0), n).to(tl.int32),)
        weights = weights + (tl.load(WEIGHTS + b * w_b + u.to(tl.int64) * w_t + head, mask=live, other=0.0),)
        if not FP32:
            at = b * q_b + u.to(tl.int64) * q_t + head * (D // 2 if FORMAT == FP4 else D)
            rows = rows + (load_queries(Q, at, live, D, DIMS, FORMAT),)
        if LEVELS:
            if tl.program_id(1) == 0:
                tl.store(COUNT + b * T + t, tl.zeros([QUERIES], tl.int32), mask=t < T)
    end = tl.maximum(tl.max(ends[0], 0), tl.max(ends[GROUPS - 1], 0))
    if not EVERY:
        if tl.program_id(1) * TILE >= end:
            return
    if not FP32:
        for g in tl.static_range(GROUPS):
            queries = queries + (operand_queries(rows[g], DIMS, FORMAT, N),)
    KEYS += b * key_b
    SCALES += b * scale_b
    if FORMAT == PLAIN:
        at = entry * key_row
        scale_at = at
    elif FORMAT == FP8:
        at = entry // _PAGE * key_row + entry % _PAGE * D
        scale_at = entry // _PAGE * scale_row + entry % _PAGE + _PAGE * D // 4
    else:
        at = entry // _PAGE * key_row + entry % _PAGE * (D // 2)
        scale_at = entry // _PAGE * key_row + entry % _PAGE * (D // 32) + _PAGE * D // 2
    step = tl.full((), TILE if FORMAT == PLAIN else TILE // _PAGE, tl.int64)  # rows or pages of a tile
    for tile in tl.range(tl.program_id(1), tl.cdiv(end, TILE), tl.num_programs(1), num_stages=STAGES):
        e = tile * TILE + entry
        seen_tile = e < end  # what lies beyond must not be read
        keys = KEYS + step * tile * key_row
        if FORMAT == FP8:
            factor = tl.load(SCALES + step * tile * scale_row + scale_at, mask=seen_tile, other=0.0)
        if not FP32:
            k = operand_keys(keys, at, scale_at, seen_tile, D, DIMS, FORMAT, TILE)
        for g in tl.static_range(GROUPS):
            # dots = torch.bmm(queries, keys.transpose(1, 2)).relu_()
            if FP32:
                u = first + g * QUERIES + column // HEADS
                q_at = b * q_b + u.to(tl.int64) * q_t + head * D
                dots = dots_fp32(Q, q_at, (u < T) & (head < H), keys, at, scale_at, seen_tile, D, FORMAT, TILE, N)
            else:
                dots = tl.dot(k, queries[g])
            dots = dots + tl.abs(dots)  # twice relu, exactly, and NaN stays NaN
            # scores = torch.matmul(weights, dots)
            s = tl.sum(tl.reshape(dots * weights[g][None, :], [TILE, QUERIES, HEADS]), 2)
            if FORMAT == FP4 and not FP32:
                s *= 9223372036854775808.0  # 2^63
            else:
                s *= 0.5
            if FORMAT == FP8:
                s *= factor[:, None]  # positive: it commutes with relu
            # scores.masked_fill_(entry >= visible.unsqueeze(-1), float("-inf"))
            t = first + g * QUERIES + which
            seen = e[:, None] < ends[g][None, :]
            s = tl.where(seen, s, float("-inf"))
            row = b * T + t
            if EVERY:
                tl.store(SCORES + row[None, :] * width + e[:, None], s, mask=(e < n)[:, None] & (t < T)[None, :])
            else:
                tl.store(SCORES + row[None, :] * width + e[:, None], s, mask=seen)
            if LEVELS:
                best = tl.max(tl.reshape(monotone(s), [TILE // _GROUP, _GROUP, QUERIES]), 1)
                e8 = tile * (TILE // _GROUP) + tl.arange(0, TILE // _GROUP)
                tl.store(MAXIMA + row[None, :] * maxima_width + e8[:, None], best,
                         mask=(e8 * _GROUP)[:, None] < ends[g][None, :])
                if LEVELS > 1:
                    best = tl.max(tl.reshape(best, [TILE // 64, _GROUP, QUERIES]), 1)
                    e64 = tile * (TILE // 64) + tl.arange(0, TILE // 64)
                    tl.store(MAXIMA + row[None, :] * maxima_width + maxima_second + e64[:, None], best,
                             mask=(e64 * 64)[:, None] < ends[g][None, :])
    if EVERY:
        P = tl.num_programs(1)
        behind = tl.cdiv(tl.cdiv(end, TILE) - tl.program_id(1), P)
        for tile in range(tl.program_id(1) + tl.maximum(behind, 0) * P, tl.cdiv(n, TILE), P):
            e = tile * TILE + entry
            for g in tl.static_range(GROUPS):
                t = first + g * QUERIES + which
                unseen = tl.full([TILE, QUERIES], float("-inf"), tl.float32)
                tl.store(SCORES + (b * T + t)[None, :] * width + e[:, None], unseen, mask=(e < n)[:, None] & (t < T)[None, :])


def entries(keys: torch.Tensor | PackedRows) -> int:
    """Entries of each batch row."""
    return keys.count if isinstance(keys, PackedRows) else keys.shape[1]


def maxima_layout(n: int) -> tuple[int, int]:
    """Row width of the maxima of n entries, and where those of 64 begin; those of 8 come first."""
    second = 16 * triton.cdiv(n, 16 * GROUP)
    return second + 16 * triton.cdiv(n, 16 * GROUP * GROUP), second


def _shape(T: int, n: int, heads: int, dims: int, key_bytes: int, fp32: bool, device: torch.device) -> tuple[int, ...]:
    """(queries of a product, such products, keys of a tile, stages) of a program.

    One query at a time in decoding, where small tiles spread few keys over many programs; otherwise products of 128 columns,
    two of them where shared memory holds the queries, since each decoded tile of keys then serves twice as many.
    """
    if fp32:
        return 1, 1, 64, 1
    roomy = capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))
    queries = min(next_power(T), max(1, 128 // heads), 16)
    groups = 2 if roomy and T >= 2 * queries and queries * heads * dims <= 128 * 128 else 1
    tile = 128 if T == 1 and n > 128 * processors(device) and heads <= 64 else 64
    held = 2 * groups * max(16, queries * heads) * dims
    stages = 3 if held + 2 * tile * key_bytes <= (160 if roomy else 96) << 10 else 1
    return queries, groups, tile, stages


def check(q, weights, keys, visible) -> None:
    """Raise UnsupportedInput for what the kernel cannot take."""
    packed = isinstance(keys, PackedRows)
    data = keys.data if packed else keys
    require_device("index_scores", q, weights, data, visible)
    H, D = q.shape[2:]
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedInput(f"index_scores takes queries in bf16 or fp32, not {q.dtype}")
    if weights.dtype is not torch.float32:
        raise UnsupportedInput(f"index_scores takes weights in fp32, not {weights.dtype}")
    if next_power(H) * next_power(D) > MAX_OPERAND:
        raise UnsupportedInput(f"index_scores takes heads x dims up to {MAX_OPERAND}, padded to powers of two, not {H} x {D}")
    if D != (keys.width if packed else keys.shape[-1]):
        raise UnsupportedInput(f"index_scores got queries of {D} dims and keys of {keys.width if packed else keys.shape[-1]}")
    if data.stride(-1) != 1 and data.shape[-1] > 1:
        raise UnsupportedInput(f"index_scores takes keys whose dims lie next to each other, not with stride {data.stride(-1)}")
    if not packed:
        if keys.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedInput(f"index_scores takes keys in bf16, fp32 or packed, not {keys.dtype}")
    elif keys.format not in (RowFormat.INDEX_FP8, RowFormat.INDEX_FP4) or data.dim() != 3 or D % 2:
        raise UnsupportedInput(f"index_scores takes packed index keys of an even number of dims [B, pages, bytes], not "
                               f"{keys.format.value} of {D} dims {tuple(data.shape)}")


def launch_scores(q, weights, keys, visible, scores, width: int, every: bool, maxima=None, count=None, levels: int = 0) -> None:
    """Scores of all queries into `scores`, rows of `width`; invisible ones as −inf if `every`, else not written.

    levels > 0: maxima int32 [B·T, ·] as `maxima_layout` says and count int32 [B·T], see `_scores`.
    """
    B, T, H, D = q.shape
    n, packed = entries(keys), isinstance(keys, PackedRows)
    data = keys.data if packed else keys
    fp32 = dot_in_fp32(q) or data.dtype is torch.float32
    form = {RowFormat.INDEX_FP8: FP8, RowFormat.INDEX_FP4: FP4}[keys.format].value if packed else PLAIN.value
    scales = data.view(torch.float32) if form == FP8.value else data
    q, weights = q.contiguous(), weights if weights.stride(-1) == 1 else weights.contiguous()
    if form == FP4.value and not fp32:
        q = q.view(torch.int32)
    dims, heads = max(32, next_power(D)), next_power(H)
    key_bytes = keys.layout.row if packed else D * data.element_size()
    queries, groups, tile, stages = _shape(T, n, heads, dims, key_bytes, fp32, q.device)
    heads = max(heads, 16 // queries)
    tiles_t = triton.cdiv(T, queries * groups)
    # Two programs for each multiprocessor in decoding; over many queries more, since those that see little end early.
    wanted = triton.cdiv(processors(q.device) * (2 if tiles_t <= 4 else 8), B * tiles_t)
    grid = B * tiles_t, max(1, min(triton.cdiv(n, tile), wanted, 65535))
    stride_m, second = maxima_layout(n)
    _scores[grid](
        q, weights, data, scales, visible, scores, maxima, count, T, tiles_t, n, *q.stride()[:2], *weights.stride()[:2],
        *visible.stride(), *data.stride()[:2], *scales.stride()[:2], width, stride_m, second, H, D, dims, form, fp32, heads,
        queries, groups, tile, every, levels, stages, num_warps=4)
