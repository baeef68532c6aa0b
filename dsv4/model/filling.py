"""Plausible numbers in a cache that no prompt was run through: for timings."""

import torch

from dsv4.cache.cache import Cache
from dsv4.kernels.cache_rows import PackedRows


def fill_latents(cache: Cache, lengths: list[int], seed: int = 0) -> None:
    """Of a DeepSeek-V4 model: numbers in every buffer, as if row b held lengths[b] tokens."""
    for layer in cache.layers + cache.mtp_layers:
        for stream in (
            layer.window,
            *(part for c in (layer.main, layer.index) if c is not None for part in (c.raw, c.entries)),
        ):
            _fill_rows(stream.flat, seed)
    for held in (cache._main, cache._mtp)[: 1 + bool(cache.mtp_layers)]:
        held.now, held.high = list(lengths), list(lengths)


def _fill_rows(rows: torch.Tensor | PackedRows, seed: int) -> None:
    if not isinstance(rows, PackedRows):
        rows.normal_(generator=torch.Generator(rows.device).manual_seed(seed))
        return
    g = torch.Generator(rows.data.device).manual_seed(seed)
    rows.data.random_(0, 256, generator=g)
    if rows.format.bits == 8:
        rows.payload.bitwise_and_(0xB7)  # magnitudes below 2 in E4M3, and finite in bf16
    if rows.format.block:
        rows.scales.fill_(127)
    else:
        rows.scales.copy_(torch.ones(1, device=rows.data.device).view(torch.uint8))
