"""Attention and the writing of packed rows, to compile ahead of time, as their launchers launch them at V4-Flash's
shapes.

Tiles depend on the GPU: `cases()` are those that every generation takes, `cases_for(capability)` what one of them
launches.
"""

from unittest.mock import patch

import torch

from dsv4.kernels.attention import triton as attention
from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout
from dsv4.kernels.cache_rows import triton as cache_rows
from scripts.aot.linear import MULTIPROCESSORS, empty, launches

HEADS, WIDTH, ROPE, WINDOW, TOPK = 64, 512, 64, 128, 512
INDEX = torch.int64


def cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options): what a GPU of 99 KB of shared memory without FP8 conversion
    launches."""
    return [*cases_for((8, 6)), *_written()]


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """What `sparse_attention` and `hca_attention` launch on a GPU of that capability."""
    found = {}
    for formats in (
        ("bf16", "bf16"),
        ("fp8", "fp8"),
        ("bf16", "fp8"),
        ("fp8", "bf16"),
        ("fp32", "fp32"),
        ("fp32", "fp8"),
    ):
        dtype = torch.float32 if "fp32" in formats else torch.bfloat16
        for N in (1, 8, 64, 4096):
            found |= _launched(f"csa {N} {'+'.join(formats)}", capability, lambda: _csa(N, formats, dtype))
        for B, T, n in ((1, 1, 64), (1, 1, 8192), (8, 1, 8192), (1, 4096, 1024)):
            found |= _launched(
                f"hca {B}x{T} of {n} {'+'.join(formats)}", capability, lambda: _hca(B, T, n, formats, dtype)
            )
    found |= _launched("window only", capability, lambda: _csa(1, ("bf16", None), torch.bfloat16))
    found |= _launched("tiny", capability, lambda: _hca(1, 1, 33, ("bf16", "bf16"), torch.bfloat16, H=8, D=64, W=64))
    return list(found.values())


def _launched(name: str, capability: tuple[int, int], call) -> dict:
    """Cases by what makes them different: kernel, types and constants."""

    def run():
        with patch.multiple(
            attention,
            capability=lambda _: capability,
            processors=lambda _: MULTIPROCESSORS,
            dependent_launch=lambda _: capability >= (9, 0),
            require_device=lambda *_: None,
        ):
            call()

    return {
        (kernel, *signature.items(), *sorted(constants.items()), options["num_warps"]): (
            label,
            kernel,
            signature,
            constants,
            options,
        )
        for label, kernel, signature, constants, options in launches(name, run)
    }


def _pool(form: str | None, rows: int, D: int, batch: int | None = None):
    lead = () if batch is None else (batch,)
    if form == "fp8":
        data = empty(*lead, -(-rows // 64), pack_layout(RowFormat.KV_FP8, D, ROPE).page, dtype=torch.uint8)
        return PackedRows(RowFormat.KV_FP8, data, D, ROPE, rows)
    return None if form is None else empty(*lead, rows, D, dtype=torch.float32 if form == "fp32" else torch.bfloat16)


def _csa(N: int, formats, dtype):
    window, entries = _pool(formats[0], 8192, WIDTH), _pool(formats[1], 65536, WIDTH)
    index = None if entries is None else empty(N, TOPK, dtype=INDEX)
    attention.sparse_attention(
        empty(N, HEADS, WIDTH, dtype=dtype),
        window,
        empty(N, WINDOW, dtype=INDEX),
        entries,
        index,
        empty(HEADS, dtype=torch.float32),
        0.04,
    )


def _hca(B: int, T: int, n: int, formats, dtype, H: int = HEADS, D: int = WIDTH, W: int = WINDOW):
    attention.hca_attention(
        empty(B, T, H, D, dtype=dtype),
        _pool(formats[0], 8192, D),
        empty(B * T, W, dtype=INDEX),
        _pool(formats[1], n, D, B),
        empty(B, T, dtype=INDEX),
        empty(H, dtype=torch.float32),
        0.04,
    )


def _written() -> list[tuple]:
    found, kv = [], RowFormat.KV_FP8
    for form, D, rope in ((kv, 512, 64), (kv, 64, 32), (RowFormat.INDEX_FP8, 128, 0), (RowFormat.INDEX_FP4, 128, 0)):
        for dtype in (torch.bfloat16, torch.float32):
            pool = PackedRows(form, empty(16, pack_layout(form, D, rope).page, dtype=torch.uint8), D, rope, 1024)
            with patch.object(cache_rows, "require_device", lambda *_: None):
                found += launches(
                    f"write_rows {form.value} {D} {str(dtype)[6:]}",
                    lambda: cache_rows.write_rows(pool, empty(8, dtype=INDEX), empty(8, D, dtype=dtype)),
                )
    return found
