"""The kernel of the lightning indexer's scores, and how it is launched.

A program holds a few queries of all heads and loops over pages of keys. Each page is decoded once, while the next one
is loaded. Keys are the rows of the product and heads its columns, so that the weighted sum over heads needs only two
exchanges between threads. Products overlap with decoding and sums because several programs share a multiprocessor.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.cache_rows import KEY_FORMATS, PAGE, PackedRows
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer.triton_keys import (
    PLAIN,
    WARPS,
    WORDS,
    dots_fp32,
    operand_keys,
    operand_queries,
    places,
    read_keys,
)
from dsv4.kernels.launch import capability, dependent_launch, dot_in_fp32, next_power, processors, require_device

GROUP = 8  # entries under one maximum; maxima of those in turn
MAX_OPERAND = 1 << 15  # numbers of all heads of one query, padded: 64 KB of shared memory in bf16
# programs that share a multiprocessor: over many queries, in decoding from plain and from packed keys
PROGRAMS = {(9, 0): (2, 3, 4)}
ROOMY = (9, 0), (10, 0), (10, 3)  # capabilities where a program can hold its keys for two products at once
_GROUP, _PAGE = tl.constexpr(GROUP), tl.constexpr(PAGE)


@triton.jit
def monotone(score):
    """fp32 → int32 in the same order, both zeros alike; −inf is −2139095041."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _places_of_keys(row, place, key_row, D: tl.constexpr, FORMAT: tl.constexpr, FP32: tl.constexpr):
    """Offsets of the keys of a page, and of their scales, in the units in which they are read (see `_scores`)."""
    if FORMAT == PLAIN:
        at, scale_at = row * key_row, row
    else:
        BYTES: tl.constexpr = D * (FORMAT % 16) // 8
        BLOCK: tl.constexpr = FORMAT // 16
        at = row * (BYTES if FP32 else BYTES // 4)
        if BLOCK == 0:
            scale_at = place + _PAGE * BYTES // 4
        elif D == 128 and not FP32:
            scale_at = row + _PAGE * BYTES // 4
        else:
            scale_at = row * (D // BLOCK) + _PAGE * BYTES
    return at, scale_at


@triton.jit
def _sum_heads(dots, weights, FORMAT: tl.constexpr, FP32: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Σ_h w · relu(dots): fp32 [keys, QUERIES·HEADS] → [keys, QUERIES], without the scale of a whole row."""
    dots = dots + tl.abs(dots)  # twice relu, exactly, and NaN stays NaN
    s = tl.sum(tl.reshape(dots * weights[None, :], [_PAGE, QUERIES, HEADS]), 2)
    if FORMAT // 16 != 0 and not FP32:
        s *= 9223372036854775808.0  # 2^63
    else:
        s *= 0.5
    return s


@triton.jit
def _store_maxima(
    MAXIMA,
    s,
    page,
    row,
    end,
    maxima_width,
    maxima_second,
    FP32: tl.constexpr,
    LEVELS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The maxima of a page's scores s [keys, QUERIES], whose order is that of `places`, of rows [QUERIES] with `end`
    entries."""
    best = tl.max(tl.reshape(monotone(s), [_PAGE // _GROUP, _GROUP, QUERIES]), 1)
    i = tl.arange(0, _PAGE // _GROUP)
    e8 = page * (_PAGE // _GROUP) + (i if FP32 else i % 2 * WARPS + i // 2)
    tl.store(MAXIMA + row[None, :] * maxima_width + e8[:, None], best, mask=(e8 * _GROUP)[:, None] < end[None, :])
    if LEVELS > 1:
        tl.store(MAXIMA + row * maxima_width + maxima_second + page, tl.max(best, 0), mask=page * _PAGE < end)


@triton.jit
def _store_unseen(SCORES, first_page, b, first, T, n, width, QUERIES: tl.constexpr):
    """−inf for every P-th page from the first on."""
    t = first + tl.arange(0, QUERIES)
    for page in range(first_page, tl.cdiv(n, _PAGE), tl.num_programs(1)):
        e = tl.arange(0, _PAGE) + page * _PAGE
        tl.store(
            SCORES + (b * T + t)[None, :] * width + e[:, None],
            tl.full([_PAGE, QUERIES], float("-inf"), tl.float32),
            mask=(e < n)[:, None] & (t < T)[None, :],
        )


@triton.jit(do_not_specialize=["T", "tiles_t", "n", "w_b", "w_t", "v_b", "v_t"])
def _scores(
    Q,
    WEIGHTS,
    KEYS,
    SCALES,
    VISIBLE,
    SCORES,
    MAXIMA,
    T,
    tiles_t,
    n,
    q_b,
    q_t,
    w_b,
    w_t,
    v_b,
    v_t,
    key_b,
    key_row,
    scale_b,
    scale_row,
    width,
    maxima_width,
    maxima_second,
    H: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    FP32: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    EVERY: tl.constexpr,
    LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of QUERIES·GROUPS queries of one batch row (axis 0) against every P-th page of 64 keys, P programs along
    axis 1.

    KEYS: numbers (PLAIN), else bytes if FP32 and words of 4 bytes if not; SCALES: fp32 (of whole rows),
    words (of blocks of 128 dims) or bytes.
    key_row, scale_row: from key to key (PLAIN) or page to page, in these. EVERY: −inf where invisible, which is
    otherwise not written. LEVELS: MAXIMA int32 [rows, maxima_width] gets the `monotone` maximum of each 8 entries, and
    with 2 from maxima_second on of each 64.
    """
    N: tl.constexpr = QUERIES * HEADS
    WHOLE: tl.constexpr = FORMAT != PLAIN and FORMAT // 16 == 0  # a row has one scale
    b = (tl.program_id(0) // tiles_t).to(tl.int64)
    first = (tiles_t - 1 - tl.program_id(0) % tiles_t) * (QUERIES * GROUPS)  # late queries see the most entries
    page, P = tl.program_id(1), tl.num_programs(1)
    column, row = tl.arange(0, N), tl.arange(0, _PAGE)  # order of the keys as read; as multiplied: `place`
    head, which, place = column % HEADS, tl.arange(0, QUERIES), row if FP32 else places(_PAGE)
    at, scale_at = _places_of_keys(row, place, key_row, D, FORMAT, FP32)
    KEYS += b * key_b
    SCALES += b * scale_b
    key_step = tl.full((), _PAGE if FORMAT == PLAIN else 1, tl.int64) * key_row
    scale_step = tl.full((), 1, tl.int64) * scale_row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if not FP32:  # the first keys are loaded before it is known how many are visible
        raw = read_keys(
            KEYS + page * key_step,
            SCALES + page * scale_step,
            at,
            scale_at,
            page * _PAGE + row < n,
            page * _PAGE + place < n,
            D,
            DIMS,
            FORMAT,
            PARTS,
        )
    ends, weights, queries = (), (), ()  # of each group
    for g in tl.static_range(GROUPS):
        t, u = first + g * QUERIES + which, first + g * QUERIES + column // HEADS  # the query of a result, of a column
        live = (u < T) & (head < H)
        ends = ends + (tl.minimum(tl.load(VISIBLE + b * v_b + t * v_t, mask=t < T, other=0), n).to(tl.int32),)
        weights = weights + (tl.load(WEIGHTS + b * w_b + u.to(tl.int64) * w_t + head, mask=live, other=0.0),)
        if not FP32:
            for part in tl.static_range(PARTS):
                queries = queries + (
                    operand_queries(
                        Q, b * q_b + u.to(tl.int64) * q_t + head * D, live, part, D, DIMS, FORMAT, PARTS, N
                    ),
                )
    end = tl.maximum(tl.max(ends[0], 0), tl.max(ends[GROUPS - 1], 0))
    for page in tl.range(tl.program_id(1), tl.cdiv(end, _PAGE), P, num_stages=1):
        e = place + page * _PAGE
        if FP32:
            keys, scales = KEYS + page * key_step, SCALES + page * scale_step
            if WHOLE:
                factor = tl.load(scales + scale_at, mask=e < end, other=0.0)
        else:
            if WHOLE:
                factor = raw[PARTS]
            k = ()
            for part in tl.static_range(PARTS):
                k = k + (operand_keys(raw, part, D, DIMS, FORMAT, PARTS, _PAGE),)
            ahead = page + P  # keys after `end` must not be read
            raw = read_keys(
                KEYS + ahead * key_step,
                SCALES + ahead * scale_step,
                at,
                scale_at,
                ahead * _PAGE + row < end,
                ahead * _PAGE + place < end,
                D,
                DIMS,
                FORMAT,
                PARTS,
            )
        for g in tl.static_range(GROUPS):
            # dots = torch.bmm(queries, keys.transpose(1, 2)).relu_()
            if FP32:
                u = first + g * QUERIES + column // HEADS
                q_at = b * q_b + u.to(tl.int64) * q_t + head * D
                dots = dots_fp32(
                    Q, q_at, (u < T) & (head < H), keys, at, scale_at, row + page * _PAGE < end, D, FORMAT, _PAGE, N
                )
            else:
                dots = tl.dot(k[0], queries[g * PARTS])
                for part in tl.static_range(1, PARTS):
                    dots = tl.dot(k[part], queries[g * PARTS + part], dots)
            # scores = torch.matmul(weights, dots)
            s = _sum_heads(dots, weights[g], FORMAT, FP32, QUERIES, HEADS)
            if WHOLE:
                s *= factor[:, None]  # positive: it commutes with relu
            # scores.masked_fill_(entry >= visible.unsqueeze(-1), float("-inf"))
            t = first + g * QUERIES + which
            rows = b * T + t
            seen = e[:, None] < ends[g][None, :]
            s = tl.where(seen, s, float("-inf"))
            stored = (e < n)[:, None] & (t < T)[None, :] if EVERY else seen
            tl.store(SCORES + rows[None, :] * width + e[:, None], s, mask=stored)
            if LEVELS:
                _store_maxima(MAXIMA, s, page, rows, ends[g], maxima_width, maxima_second, FP32, LEVELS, QUERIES)
    if EVERY:
        behind = tl.maximum(tl.cdiv(tl.cdiv(end, _PAGE) - tl.program_id(1), P), 0)
        for g in tl.static_range(GROUPS):
            _store_unseen(SCORES, tl.program_id(1) + behind * P, b, first + g * QUERIES, T, n, width, QUERIES)


def entries(keys: torch.Tensor | PackedRows) -> int:
    """Entries of each batch row."""
    return keys.count if isinstance(keys, PackedRows) else keys.shape[1]


def maxima_layout(n: int) -> tuple[int, int]:
    """Row width of the maxima of n entries, and where those of 64 begin; those of 8 come first."""
    second = 16 * triton.cdiv(n, 16 * GROUP)
    return second + 16 * triton.cdiv(n, 16 * GROUP * GROUP), second


def _shape(T: int, heads: int, dims: int, packed: bool, device: torch.device) -> tuple[int, int]:
    """(queries of a product, such products) of a program: one query in decoding, otherwise products of 128 columns: two
    of them if shared memory and registers hold them, because each decoded page of keys then serves twice as many
    queries. For packed keys Hopper has registers for one product of 256 columns, which is a little faster."""
    queries = min(next_power(T), max(1, 128 // heads), 16)
    if capability(device) not in ROOMY or T < 2 * queries or queries * heads * dims > 128 * 128:
        return queries, 1
    return (2 * queries, 1) if packed and capability(device) == (9, 0) else (queries, 2)


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
        raise UnsupportedInput(
            f"index_scores takes heads x dims up to {MAX_OPERAND}, padded to powers of two, not {H} x {D}"
        )
    if D != (keys.width if packed else keys.shape[-1]):
        raise UnsupportedInput(
            f"index_scores got queries of {D} dims and keys of {keys.width if packed else keys.shape[-1]}"
        )
    if data.stride(-1) != 1 and data.shape[-1] > 1:
        raise UnsupportedInput(
            f"index_scores takes keys whose dims lie next to each other, not with stride {data.stride(-1)}"
        )
    if not packed:
        if keys.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedInput(f"index_scores takes keys in bf16, fp32 or packed, not {keys.dtype}")
    elif keys.format not in KEY_FORMATS or data.dim() != 3 or D % 4:
        raise UnsupportedInput(
            f"index_scores takes packed index keys [B, pages, bytes] of a multiple of 4 dims, not "
            f"{keys.format.value} of {D} dims {tuple(data.shape)}"
        )


def launch_scores(q, weights, keys, visible, scores, width: int, every: bool, maxima=None, levels: int = 0) -> None:
    """Scores of all queries into `scores`, rows of `width`; invisible ones as −inf if `every`, else not written.

    levels > 0: maxima int32 [B·T, ·] as `maxima_layout` says, see `_scores`.
    """
    B, T, H, D = q.shape
    n, packed = entries(keys), isinstance(keys, PackedRows)
    data = keys.data if packed else keys
    fp32 = dot_in_fp32(q) or data.dtype is torch.float32
    form, whole = (keys.format.form, keys.format.block == 0) if packed else (PLAIN.value, False)
    words = data.view(torch.int32) if packed and not fp32 else data
    scales = data.view(torch.float32) if whole else words if D == 128 else data
    q, weights = q.contiguous(), weights if weights.stride(-1) == 1 else weights.contiguous()
    dims, heads = max(32, next_power(D)), next_power(H)
    parts = max(1, dims * keys.format.bits // 32 // WORDS.value) if packed else 1
    queries, groups = (1, 1) if fp32 else _shape(T, heads, dims, packed, q.device)
    heads = max(heads, 16 // queries)
    tiles_t = triton.cdiv(T, queries * groups)
    pages, many = triton.cdiv(n, PAGE), processors(q.device)
    # programs that run in parallel
    each = PROGRAMS.get(capability(q.device), (2, 2, 2))[0 if queries * groups > 1 else 1 + packed]
    if B * T * pages < 8 * many:  # then two pages a program are better, because one of them is loaded early
        each = min(each, 2)
    grid = B * tiles_t, max(1, min(pages, many * each // (B * tiles_t), 65535))
    overlap = dependent_launch(q.device)
    options = {"maxnreg": 168} if each == 3 and not fp32 else {}  # as many registers as three programs can have
    _scores[grid](
        q,
        weights,
        words,
        scales,
        visible,
        scores,
        maxima,
        T,
        tiles_t,
        n,
        *q.stride()[:2],
        *weights.stride()[:2],
        *visible.stride(),
        *words.stride()[:2],
        *scales.stride()[:2],
        width,
        *maxima_layout(n),
        H,
        D,
        dims,
        form,
        parts,
        fp32,
        heads,
        queries,
        groups,
        every,
        levels,
        overlap,
        num_warps=WARPS.value,
        launch_pdl=overlap,
        **options,
    )
