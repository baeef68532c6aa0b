"""Attention of V4-Flash: decode of CSA and HCA layers, sparse prefill, and the writing of packed rows."""

from collections.abc import Iterator
from functools import partial

import torch

from dsv4.kernels.attention import hca_attention, sparse_attention
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, encode_rows, pack_layout, write_rows
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import difference
from scripts.bench.row import Row

H, D, W, TOPK = FLASH.num_attention_heads, FLASH.head_dim, FLASH.sliding_window, FLASH.index_topk
# relative Frobenius error against the reference in fp32 of the same rows; bf16 rounding is 1.7e-3
TOLERANCE = 5e-3
BYTES = {"bf16": 2 * D, "fp8": pack_layout(RowFormat.KV_FP8, D, FLASH.qk_rope_head_dim).row}  # of a row
SAMPLED = 64  # queries of a prompt that are held against the reference
GOALS = {
    ("csa", TOPK, 1, "bf16"): 6,
    ("csa", TOPK, 8, "bf16"): 8,
    ("csa", TOPK, 1, "fp8"): 8,
    ("csa", TOPK, 8, "fp8"): 11,
    ("hca", 8192, 1, "bf16"): 7,
    ("hca", 8192, 8, "bf16"): 32,
    ("hca", 8192, 8, "fp8"): 24,
}
PREFILL = {1024: 165, 4096: 570}  # µs by tokens


def rows(device: str) -> Iterator[Row]:
    for sizes in contract_of("sparse_attention").production.sizes(FLASH)["bench"]:
        yield (_prefill if sizes.get("prompt") else _csa)(sizes, device)
    for sizes in contract_of("hca_attention").production.sizes(FLASH)["bench"]:
        yield _hca(sizes, device)
    for sizes in contract_of("write_rows").production.sizes(FLASH)["bench"]:
        yield _written(sizes, device)


def _csa(sizes: dict, device: str) -> Row:
    B, cache = sizes["tokens"], sizes["window"]
    return _decode(
        "csa", B, TOPK, cache, GOALS.get(("csa", TOPK, B, cache)), partial(_make, sparse_attention, sizes, device)
    )


def _hca(sizes: dict, device: str) -> Row:
    B, n, cache = sizes["batch"], sizes["entries"], sizes["window"]
    return _decode("hca", B, n, cache, GOALS.get(("hca", n, B, cache)), partial(_make, hca_attention, sizes, device))


def _decode(kind: str, B: int, entries: int, cache: str, goal: float | None, make) -> Row:
    keys = W + entries
    return Row(
        f"{kind}_decode",
        f"B{B} {W}+{entries} {cache}",
        make,
        B * (keys * BYTES[cache] + 4 * H * D),
        4 * H * D * keys * B,
        goal,
        facts={"batch": B, "window": W, "entries": entries, "cache": cache},
    )


def _prefill(sizes: dict, device: str) -> Row:
    T, pool = sizes["tokens"], sizes["each"]
    flops = 4 * H * D * (W + TOPK) * T
    return Row(
        "csa_prefill",
        f"{T} tokens",
        partial(_make, sparse_attention, sizes, device),
        T * 2 * H * D * 2 + (T + W + T // 4) * BYTES["bf16"],
        flops,
        PREFILL.get(T),
        facts={"tokens": T, "window": W, "entries": TOPK, "pool": pool},
    )


def _make(operation, sizes: dict, device: str, i: int):
    """run, and check against the reference in fp32; of a prompt some queries only, with their lists. Whether lists are
    complete is not said."""
    q, *rest = contract_of(operation.name).production.drawn(FLASH, i, device, **sizes)[:7]

    def run():
        return operation(q, *rest, backend="triton")

    def check():
        if not sizes.get("prompt"):
            return difference(run(), operation(q.float(), *rest)), TOLERANCE
        (window, near, entries, far, *others), some = rest, torch.linspace(0, len(q) - 1, SAMPLED).long().to(device)
        wanted = operation(q[some].float(), window, near[some], entries, far[some], *others)
        return difference(run()[some], wanted), TOLERANCE

    return run, check


def _written(sizes: dict, device: str) -> Row:
    M, form, width, rope = (sizes[name] for name in ("rows", "form", "width", "rope"))

    def make(i: int):
        pool, slots, values = contract_of("write_rows").production.drawn(FLASH, i, device, **sizes)

        def run() -> PackedRows:
            write_rows(pool, slots, values, backend="triton")
            return pool

        def check():
            run()
            payload, scales = encode_rows(values, form, rope)
            page, at = slots // PAGE, slots % PAGE
            return float((pool.payload[page, at] != payload).sum() + (pool.scales[page, at] != scales).sum()), 0.0

        return run, check

    moved = M * (2 * width + pack_layout(form, width, rope).row)
    return Row("write_rows", f"{form.value}, {M} rows", make, moved, 0)
