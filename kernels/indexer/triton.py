"""The lightning indexer on a GPU: scores, exact selection, and both in one."""

from collections.abc import Iterator

import torch
import triton

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer import triton_fp8
from dsv4.kernels.indexer.triton_choose import choose, choose_visible, plan
from dsv4.kernels.indexer.triton_scores import check, entries, launch_scores, maxima_layout
from dsv4.kernels.launch import processors, require_device

SCRATCH_BYTES = 48 << 20  # of scores: about what the L2 cache of an H100 holds
ALIGNED = 64  # entries to which a row of scores is padded
# Pairs of a query and an entry, of a batch row, from which rounded queries are scored as codes, and queries that there
# are at least. (`scripts/tune_index.py` on an H200: 2^18 pairs take 27 µs and 25 otherwise, 2^24 304 and 472.)
CODED_PAIRS, CODED_QUERIES = 1 << 20, 64
# Of their scores: in 208 MiB programs come out even at 32,768 entries, which takes a tenth less than in 96. With more
# than LONG entries caches leave no room for that.
CODES_SCRATCH_BYTES, LONG_SCRATCH_BYTES, LONG = 208 << 20, 96 << 20, 1 << 16


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor | PackedRows, visible: torch.Tensor
) -> torch.Tensor:
    """Computes what the reference does; keys that no query sees may be read, but have no effect. Products of bf16
    queries are exact, summed in fp32.

    q bf16 or fp32; keys bf16, fp32 or packed, with scales that are positive and at most 2^65. Beside bf16 queries, FP4
    keys below 2^−62 lose bits and FP8 codes of NaN count as 480. Raises UnsupportedInput for other dtypes, and for more
    than 32768 numbers of all heads of a query, heads and dims each padded to a power of two.
    """
    B, T = q.shape[:2]
    n = entries(keys)
    check(q, weights, keys, visible)
    scores = torch.empty(B, T, n, dtype=torch.float32, device=q.device)
    if scores.numel():
        launch_scores(q, weights, keys, visible, scores, n, True)
    return scores


def topk_entries(scores: torch.Tensor, k: int, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Computes what the reference does, in another order that is the same every time. Scores from `visible` on are not
    read.

    Raises UnsupportedInput for k above 4096 of more than 32768 entries, and for more than 2097152 entries.
    """
    require_device("topk_entries", scores, visible)
    if scores.dtype is not torch.float32:
        raise UnsupportedInput(f"topk_entries takes scores in fp32, not {scores.dtype}")
    B, T, n = scores.shape
    k = min(k, n)
    out = torch.empty(B, T, k, dtype=torch.int64, device=scores.device)
    if out.numel():
        scores = scores if scores.stride(-1) == 1 else scores.contiguous()
        choose(plan(B * T, n, k), scores, n, k, visible, out)
    return out


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor | PackedRows,
    visible: torch.Tensor,
    k: int,
    rounded: bool = False,
    run: int | None = None,
) -> torch.Tensor:
    """`topk_entries` of `index_scores`: int64 [B, T, min(k, n)], in another order. If n ≤ k nothing is scored: the
    result is every visible entry, and −1 for the others. So is that of a query that sees at most k, if it is one of
    many. At most 48 MiB of scores exist at a time (of codes 208, or 96 of many entries), or those of one query if
    these are more.

    q [B, T, H, D]; weights fp32 [B, T, H]; keys [B, n, D] or PackedRows of a batch; visible int64 [B, T]. rounded: q,
    and keys that are not packed, were rounded by `simulate_fp4_blocks`: they may be multiplied as FP8 codes
    (`triton_fp8`), whose sums keep fewer bits. run: entries are written as rows b · run + entry of a pool.
    """
    check(q, weights, keys, visible)
    B, T = q.shape[:2]
    n, device = entries(keys), q.device
    k = min(k, n)
    out = torch.empty(B, T, k, dtype=torch.int64, device=device)
    if not out.numel():
        return out
    if n == k:
        choose_visible(visible, out, run)
        return out
    coded = rounded and T >= CODED_QUERIES and T * n >= CODED_PAIRS and triton_fp8.takes(q, keys)
    (_select_by_codes if coded else _select_by_products)(q, weights, keys, visible, n, k, out, run)
    return out


def _select_by_products(q, weights, keys, visible, n: int, k: int, out: torch.Tensor, run: int | None) -> None:
    """The selection of scores by `launch_scores`, k < n."""
    width, maxima_width = _width(n), maxima_layout(n)[0]
    (B, T), device = q.shape[:2], q.device
    batches, queries = _chunk(B, T, max(1, SCRATCH_BYTES // (4 * width)), 2 * processors(device))
    rows = batches * queries
    how = plan(rows, n, k)
    scores = torch.empty(rows * width, dtype=torch.float32, device=device)
    maxima = torch.empty(rows * maxima_width, dtype=torch.int32, device=device) if how.levels else None
    for c, s in _chunks(B, T, batches, queries):
        held = keys._replace(data=keys.data[c]) if isinstance(keys, PackedRows) else keys[c]
        seen, part = visible[c, s], _part(scores, visible[c, s], width)
        launch_scores(q[c, s], weights[c, s], held, seen, part, width, False, maxima, how.levels)
        choose(how, part, n, k, seen, out[c, s], maxima, not how.by_number, run, c.start)


def _select_by_codes(q, weights, keys, visible, n: int, k: int, out: torch.Tensor, run: int | None) -> None:
    """The selection of scores by `launch_codes`, k < n."""
    width, (B, T), device = _width(n), q.shape[:2], q.device
    batches, queries = _chunk_of_codes(B, T, max(1, codes_scratch(n) // (4 * width)), device)
    how = plan(batches * queries, n, k)
    scores = torch.empty(batches * queries * width, dtype=torch.float32, device=device)
    codes, known = triton_fp8.coded_keys(keys), k if how.by_number else 0
    for c, s in _chunks(B, T, batches, queries):
        seen, part = visible[c, s], _part(scores, visible[c, s], width)
        triton_fp8.launch_codes(q[c, s], weights[c, s], codes.rows(c), seen, part, width, known)
        choose(how, part, n, k, seen, out[c, s], None, not how.by_number, run, c.start)


def codes_scratch(n: int) -> int:
    """Bytes of scores of codes at a time, of n entries."""
    return CODES_SCRATCH_BYTES if n <= LONG else min(LONG_SCRATCH_BYTES, CODES_SCRATCH_BYTES)


def _width(n: int) -> int:
    """Numbers of a row of n scores, padded."""
    return ALIGNED * triton.cdiv(n, ALIGNED)


def _part(scores: torch.Tensor, seen: torch.Tensor, width: int) -> torch.Tensor:
    """fp32 [B, T, width] at the front of `scores`, of queries that see int64 [B, T]."""
    return scores[: seen.numel() * width].view(*seen.shape, width)


def _chunks(B: int, T: int, batches: int, queries: int) -> Iterator[tuple[slice, slice]]:
    """(batch rows, queries) of each chunk."""
    return ((slice(b, b + batches), slice(t, t + queries)) for b in range(0, B, batches) for t in range(0, T, queries))


def _chunk(B: int, T: int, rows: int, slots: int) -> tuple[int, int]:
    """(batch rows, queries of each) that make at most `rows` together. For one batch row it is a part of `slots`, the
    programs of 4 queries that run in parallel, such that a whole number of programs shares each query's keys."""
    if T <= rows:
        return min(B, rows // T), T
    whole = [4 * slots // p for p in range(1, slots + 1) if slots % p == 0 and 4 * slots // p <= rows]
    return 1, whole[0] if whole else rows


def _chunk_of_codes(B: int, T: int, rows: int, device: torch.device) -> tuple[int, int]:
    """As `_chunk`, of programs that stay: several of their rounds if so many rows have room."""
    whole = 4 * processors(device)
    if T > rows >= whole:
        return 1, rows // whole * whole
    return _chunk(B, T, rows, processors(device))
