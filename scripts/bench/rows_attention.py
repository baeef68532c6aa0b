"""Attention of V4-Flash: decode of CSA and HCA layers, sparse prefill, and the writing of packed rows."""

from collections.abc import Iterator

import torch

from dsv4.kernels.attention import hca_attention, sparse_attention
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, encode_rows, pack_layout, write_rows
from scripts.bench.inputs import choose, difference, normal, packed
from scripts.bench.row import Row

H, D, ROPE, W, TOPK = 64, 512, 64, 128, 512
SCALE = D**-0.5
# relative Frobenius error against the reference in fp32 of the same rows; bf16 rounding is 1.7e-3
TOLERANCE = 5e-3
BYTES = {"bf16": 1024, "fp8": 584}  # of a row
GOALS = {
    ("csa", 1): 6,
    ("csa", 8): 8,
    ("hca", 8192, 1, "bf16"): 7,
    ("hca", 8192, 8, "bf16"): 32,
    ("hca", 8192, 8, "fp8"): 24,
}


def rows(device: str) -> Iterator[Row]:
    for cache in ("bf16", "fp8"):
        for B in (1, 8, 64):
            yield _decode("csa_decode", B, TOPK, cache, GOALS.get(("csa", B)), _csa, device)
        for entries in (1024, 8192):  # contexts of 128K and 1M
            for B in (1, 8):
                yield _decode("hca_decode", B, entries, cache, GOALS.get(("hca", entries, B, cache)), _hca, device)
    for T in (1024, 4096):
        flops = 4 * H * D * (W + TOPK) * T
        moved = T * 2 * H * D * 2 + (T + W + T // 4) * BYTES["bf16"]
        yield Row(
            "csa_prefill",
            f"{T} tokens",
            lambda i, T=T: _prefill(i, T, device),
            moved,
            flops,
            flops / 350e12 * 1e6,
            facts={"tokens": T, "window": W, "entries": TOPK, "pool": max(TOPK, T // 4)},
        )
    for form, width, rope in (
        (RowFormat.KV_FP8, D, ROPE),
        (RowFormat.INDEX_FP4, 128, 0),
        (RowFormat.INDEX_FP8, 128, 0),
    ):
        for M in (8, 4096):
            yield Row(
                "write_rows",
                f"{form.value}, {M} rows",
                lambda i, a=(M, form, width, rope): _write(i, *a, device),
                M * (2 * width + pack_layout(form, width, rope).row),
                0,
            )


def _decode(op: str, B: int, entries: int, cache: str, goal: float | None, make, device: str) -> Row:
    keys = W + entries
    return Row(
        op,
        f"B{B} {W}+{entries} {cache}",
        lambda i: make(i, B, entries, cache, device),
        B * (keys * BYTES[cache] + 4 * H * D),
        4 * H * D * keys * B,
        goal,
        facts={"batch": B, "window": W, "entries": entries, "cache": cache},
    )


def _pool(cache: str, rows: int, seed: int, device: str, batch: int | None = None):
    if cache == "fp8":
        return packed(RowFormat.KV_FP8, D, ROPE, rows, seed, batch, device)
    return normal(seed, *(() if batch is None else (batch,)), rows, D, device=device)


def _checked(operation, q, *rest, some: torch.Tensor | None = None):
    """run, and check against the reference in fp32; of the queries `some` only (with their indices) if given."""

    def run():
        return operation(q, *rest, backend="triton")

    def check():
        if some is None:
            return difference(run(), operation(q.float(), *rest)), TOLERANCE
        window, near, entries, far, *others = rest
        return difference(
            run()[some], operation(q[some].float(), window, near[some], entries, far[some], *others)
        ), TOLERANCE

    return run, check


def _csa(i: int, B: int, entries: int, cache: str, device: str):
    each, row = 8192, torch.arange(B, device=device).unsqueeze(1)
    near = torch.arange(W, device=device) + row * W
    far = choose(4 * i + 2, B, entries, each, device) + row * each
    return _checked(
        sparse_attention,
        normal(4 * i + 3, B, H, D, device=device),
        _pool(cache, B * W, 4 * i, device),
        near,
        _pool(cache, B * each, 4 * i + 1, device),
        far,
        torch.linspace(-2, 2, H, device=device),
        SCALE,
    )


def _hca(i: int, B: int, entries: int, cache: str, device: str):
    near = torch.arange(B * W, device=device).view(B, W)
    seen = torch.full((B, 1), entries, device=device)
    return _checked(
        hca_attention,
        normal(3 * i, B, 1, H, D, device=device),
        _pool(cache, B * W, 3 * i + 1, device),
        near,
        _pool(cache, entries, 3 * i + 2, device, B),
        seen,
        torch.linspace(-2, 2, H, device=device),
        SCALE,
    )


def _prefill(i: int, T: int, device: str):
    pool = max(TOPK, T // 4)
    near = torch.arange(T, device=device).unsqueeze(1) + torch.arange(1, W + 1, device=device)
    far = torch.cat([choose(4 * i + 2 + c, min(1024, T - c), TOPK, pool, device) for c in range(0, T, 1024)])
    return _checked(
        sparse_attention,
        normal(4 * i, T, H, D, device=device),
        _pool("bf16", T + W, 4 * i + 1, device),
        near,
        _pool("bf16", pool, 4 * i + 3, device),
        far,
        torch.linspace(-2, 2, H, device=device),
        SCALE,
        some=torch.linspace(0, T - 1, 64, device=device).long(),
    )


def _write(i: int, M: int, form: RowFormat, width: int, rope: int, device: str):
    pool, values = (
        packed(form, width, rope, 2 * M + PAGE, 2 * i, device=device),
        normal(2 * i + 1, M, width, device=device),
    )
    slots = torch.arange(M, device=device) * 2 + i % 2

    def run() -> PackedRows:
        write_rows(pool, slots, values, backend="triton")
        return pool

    def check():
        run()
        payload, scales = encode_rows(values, form, rope)
        page, at = slots // PAGE, slots % PAGE
        return float((pool.payload[page, at] != payload).sum() + (pool.scales[page, at] != scales).sum()), 0.0

    return run, check
