"""Operations of GQA models that go by tiles, for the probe `tiles`."""

from collections.abc import Iterator

import torch

from dsv4.kernels.grouped_attention import cpu as grouped_cpu
from dsv4.kernels.grouped_attention import reference as grouped
from dsv4.probes.scenes.tile_cases import Rand, TileCase, W


def _grouped(rand: Rand, g: torch.Generator) -> Iterator[TileCase]:
    """7 and 19 queries in pieces of 3 and 5, over 150 slots of which the last are unwritten."""
    B, H, KV, S, D, scale = 2, 4, 2, 150, 32, 0.2
    for T, window, tile in ((7, None, 3), (7, W, 3), (19, None, 5), (19, W, 5)):
        q, keys, values = rand(B, T, H, D), rand(B, KV, S, D), rand(B, KV, S, D)
        start = torch.tensor([100, 61])
        keys[:, :, 100 + T :], values[:, :, 100 + T :] = float("nan"), float("nan")
        keys[1, :, 61 + T :], values[1, :, 61 + T :] = float("nan"), float("nan")
        wanted = torch.zeros(B, T, H, D, dtype=torch.float64)
        for b in range(B):
            for t in range(T):
                end = int(start[b]) + t + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                k, v = (x[b, :, seen].double().repeat_interleave(H // KV, 0) for x in (keys, values))
                logits = scale * torch.einsum("hd,hsd->hs", q[b, t].double(), k)
                wanted[b, t] = torch.einsum("hs,hsd->hd", torch.softmax(logits, -1), v)
        limits = {(grouped, "SCRATCH_BYTES"): tile * 4 * B * H * S, (grouped_cpu, "PIECE"): tile}
        label = f"{T} queries" + ("" if window is None else f", a window of {window}")
        arguments = [q, keys, values, start, window, scale]
        yield TileCase("grouped_attention", label, arguments, wanted, 1, tile, "queries", limits)


MAKERS = (_grouped,)
