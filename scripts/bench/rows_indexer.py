"""The indexer at the shapes of V4-Flash: scores, exact selection, both in one, and a whole prefill."""

from collections.abc import Iterator

import torch

from dsv4.kernels.contracts import contract_of
from dsv4.kernels.indexer import reference, triton
from dsv4.kernels.indexer.contract import LONG, LONGEST, RATIO, SHORT
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import beside_definition
from scripts.bench.row import Row

H, D = FLASH.index_n_heads, FLASH.index_head_dim
KEY_BYTES = {"fp4": 68, "fp8": 132, "bf16": 256}
ROUNDING = 5e-5  # of fp32 sums of exact products in another order, relative to the largest score
SAMPLED = 48  # queries of a prefill that are held against the reference
# µs of FP4
SCORES = {(1, LONG): 4, (8, LONG): 11, (1, LONGEST): 10, (8, LONGEST): 75}
SELECT = {(1, SHORT): 7, (1, LONG): 10, (1, LONGEST): 20, (8, LONG): 20, (8, LONGEST): 95}
TOPK = {(1, LONGEST, 512): 12, (8, LONGEST, 512): 16}
PROMPT = {8192: 300, 131072: 42_000}


def rows(device) -> Iterator[Row]:
    device = str(device)
    made = {"index_scores": scores, "select_entries": select, "topk_entries": topk}
    for operation, row in made.items():
        production = contract_of(operation).production
        for sizes in production.sizes(FLASH)["bench"]:
            yield row(production, sizes, device)


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


def scores(production, sizes: dict, device: str) -> Row:
    cache, n, B = sizes["keys"], sizes["entries"], sizes["batch"]
    make = beside_definition(production, sizes, triton.index_scores, reference.index_scores, ROUNDING, device)
    return Row(
        "index_scores",
        f"{cache} {n} entries B{B}",
        make,
        B * (n * KEY_BYTES[cache] + 2 * H * D),
        2 * H * D * n * B,
        SCORES.get((B, n)) if cache == "fp4" else None,
        facts=dict(batch=B, entries=n, cache=cache),
    )


def select(production, sizes: dict, device: str) -> Row:
    """Decode steps, or a whole prompt, of which some queries are held against the reference."""
    n, k, B = sizes["entries"], sizes["k"], sizes.get("batch", 1)
    tokens = RATIO * n if sizes.get("prompt") else 1

    def make(i):
        args = production.drawn(FLASH, i, device, **sizes)
        q, weights, keys, visible, *_ = args
        run = lambda: triton.select_entries(*args[:5], rounded=tokens > 1)  # queries are drawn rounded

        def check():
            got, t = run(), torch.linspace(0, tokens - 1, min(SAMPLED, tokens)).long().to(device)
            wanted = reference.index_scores(q[:, t], weights[:, t], keys, visible[:, t])
            return lost(wanted, got[:, t], k), ROUNDING

        return run, check

    if tokens > 1:
        return Row(
            "index_prefill",
            f"fp4 {tokens} tokens k{k}, queries in FP4",
            make,
            tokens * (2 * H * D + 4 * H + 8 * k) + KEY_BYTES["fp4"] * n,
            H * D * tokens * n,
            PROMPT.get(tokens),
            facts=dict(tokens=tokens, entries=n, k=k),
        )
    return Row(
        "select_entries",
        f"fp4 {n} entries k{k} B{B}",
        make,
        B * (n * KEY_BYTES["fp4"] + 2 * H * D + 8 * k),
        2 * H * D * n * B,
        SELECT.get((B, n)),
        facts=dict(batch=B, entries=n, k=k, cache="fp4"),
    )


def topk(production, sizes: dict, device: str) -> Row:
    n, B, k = sizes["entries"], sizes["batch"], sizes["k"]

    def make(i):
        values, k, _ = production.drawn(FLASH, i, device, **sizes)

        def run():
            return triton.topk_entries(values, k)

        def check():
            wanted = reference.topk_entries(values, k)
            return (run().sort(-1).values != wanted.sort(-1).values).sum().item(), 0

        return run, check

    facts = dict(batch=B, entries=n, k=k)
    return Row("topk", f"{n} entries k{k} B{B}", make, B * (4 * n + 8 * k), 0, TOPK.get((B, n, k)), facts=facts)
