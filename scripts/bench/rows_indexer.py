"""The indexer at the shapes of V4-Flash: scores, exact selection, both in one, and a whole prefill."""

from collections.abc import Iterator

import torch

from dsv4.kernels.cache_rows import RowFormat
from dsv4.kernels.indexer import reference, triton
from scripts.bench.inputs import difference, normal, packed
from scripts.bench.row import Row

H, D, RATIO = 64, 128, 4
CACHES = {"fp4": (RowFormat.INDEX_FP4, 68), "fp8": (RowFormat.INDEX_FP8, 132), "bf16": (None, 256)}
ROUNDING = 5e-5  # of fp32 sums of exact products in another order, relative to the largest score
SAMPLED = 48  # queries of a prefill that are held against the reference


def inputs(i: int, B: int, T: int, n: int, cache: str, device: str):
    """Queries bf16 [B, T, 64, 128], weights fp32 [B, T, 64], keys of n entries."""
    q = normal(3 * i, B, T, H, D, device=device)
    weights = normal(3 * i + 1, B, T, H, dtype=torch.float32, device=device) / H
    if CACHES[cache][0]:
        return q, weights, packed(CACHES[cache][0], D, 0, n, 3 * i + 2, batch=B, device=device)
    return q, weights, normal(3 * i + 2, B, n, D, device=device)


def lost(scores: torch.Tensor, selected: torch.Tensor, k: int) -> float:
    """How far the worst selected score is below the k-th best, relative to the largest; NaN if an entry is missing or
    double.

    scores fp32 [B, T, n], selected int64 [B, T, k].
    """
    order = selected.sort(-1).values
    missing = ((selected >= 0).sum(-1) != scores.isfinite().sum(-1).clamp(max=k)).any()
    double = ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any()
    if missing or double:
        return float("nan")
    finite = scores.masked_fill(~scores.isfinite(), 0.0)
    worst = finite.gather(-1, selected.clamp(min=0)).masked_fill(selected < 0, float("inf")).amin(-1)
    kth = scores.topk(k, -1).values[..., -1]
    return ((kth - worst) / finite.abs().amax(-1)).nan_to_num(neginf=0.0).amax().clamp(min=0).item()


def scores(B: int, n: int, cache: str, goal: float | None, device: str) -> Row:
    def make(i):
        q, weights, keys = inputs(i, B, 1, n, cache, device)
        visible = torch.full((B, 1), n, device=device)

        def run():
            return triton.index_scores(q, weights, keys, visible)

        return run, lambda: (difference(run(), reference.index_scores(q, weights, keys, visible)), ROUNDING)

    return Row(
        "index_scores",
        f"{cache} {n} entries B{B}",
        make,
        B * (n * CACHES[cache][1] + 2 * H * D),
        2 * H * D * n * B,
        goal,
        facts=dict(batch=B, entries=n, cache=cache),
    )


def select(B: int, n: int, k: int, goal: float | None, device: str) -> Row:
    def make(i):
        q, weights, keys = inputs(i, B, 1, n, "fp4", device)
        visible = torch.full((B, 1), n, device=device)

        def run():
            return triton.select_entries(q, weights, keys, visible, k)

        return run, lambda: (lost(reference.index_scores(q, weights, keys, visible), run(), k), ROUNDING)

    return Row(
        "select_entries",
        f"fp4 {n} entries k{k} B{B}",
        make,
        B * (n * 68 + 2 * H * D + 8 * k),
        2 * H * D * n * B,
        goal,
        facts=dict(batch=B, entries=n, k=k, cache="fp4"),
    )


def topk(B: int, n: int, k: int, goal: float | None, device: str) -> Row:
    def make(i):
        values = normal(i, B, 1, n, dtype=torch.float32, device=device)

        def run():
            return triton.topk_entries(values, k)

        def check():
            wanted = reference.topk_entries(values, k)
            return (run().sort(-1).values != wanted.sort(-1).values).sum().item(), 0

        return run, check

    return Row(
        "topk", f"{n} entries k{k} B{B}", make, B * (4 * n + 8 * k), 0, goal, facts=dict(batch=B, entries=n, k=k)
    )


def prefill(tokens: int, k: int, goal: float | None, device: str) -> Row:
    n = tokens // RATIO

    def make(i):
        q, weights, keys = inputs(i, 1, tokens, n, "fp4", device)
        visible = ((torch.arange(tokens, device=device) + 1) // RATIO).unsqueeze(0)

        def run():
            return triton.select_entries(q, weights, keys, visible, k)

        def check():
            got, t = run(), torch.linspace(0, tokens - 1, SAMPLED, device=device).long()
            wanted = reference.index_scores(q[:, t], weights[:, t], keys, visible[:, t])
            return lost(wanted, got[:, t], k), ROUNDING

        return run, check

    return Row(
        "index_prefill",
        f"fp4 {tokens} tokens k{k}",
        make,
        tokens * (2 * H * D + 4 * H + 8 * k) + 68 * n,
        H * D * tokens * n,
        goal,
        facts=dict(tokens=tokens, entries=n, k=k),
    )


SHORT, LONG, LONGEST = 2048, 32768, 262144  # entries of 8K, 128K and 1M tokens
# µs of FP4
SCORES = {(1, SHORT): None, (8, SHORT): None, (1, LONG): 4, (8, LONG): 11, (1, LONGEST): 10, (8, LONGEST): 75}
SELECT = {(1, SHORT): 7, (1, LONG): 10, (1, LONGEST): 20, (8, SHORT): None, (8, LONG): 20, (8, LONGEST): 95}
TOPK = {
    (1, SHORT, 512): None,
    (1, LONG, 512): None,
    (1, LONGEST, 512): 12,
    (8, LONGEST, 512): 16,
    (1, LONGEST, 1024): None,
}


def rows(device) -> Iterator[Row]:
    device = str(device)
    for cache in CACHES:
        for (B, n), goal in SCORES.items():
            yield scores(B, n, cache, goal if cache == "fp4" else None, device)
    for (B, n), goal in SELECT.items():
        yield select(B, n, 512, goal, device)
    for (B, n, k), goal in TOPK.items():
        yield topk(B, n, k, goal, device)
    yield prefill(8192, 512, None, device)
    yield prefill(131072, 512, 68_000, device)
