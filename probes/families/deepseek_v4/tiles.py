"""Operations of DeepSeek-V4 models that go by tiles, for the probe `tiles`."""

from collections.abc import Iterator

import torch

from dsv4.kernels.attention import cpu as attention_cpu
from dsv4.kernels.attention import reference as attention
from dsv4.kernels.indexer import cpu as indexer_cpu
from dsv4.kernels.indexer import reference as indexer
from dsv4.kernels.linear import reference as linear
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, to_float
from dsv4.probes.oracle.pools import attend
from dsv4.probes.scenes.tile_cases import Rand, TileCase, W

D = 16  # of a head


def _index_scores(rand: Rand, g: torch.Generator) -> Iterator[TileCase]:
    """150 entries in tiles of 64; some queries see all of them, others end within a tile."""
    B, T, H, n = 2, 5, 3, 150
    for rows, queries in ((1, 1), (B, T)):
        q, w, keys = rand(rows, queries, H, D), rand(rows, queries, H), rand(rows, n, D)
        visible = torch.full((rows, queries), n)
        visible[:, : queries - 1] = torch.linspace(1, n, max(1, queries - 1)).long()
        dots = torch.relu(torch.einsum("bthd,bnd->bthn", q.double(), keys.double()))
        wanted = (w.double().unsqueeze(-1) * dots).sum(2)
        wanted = wanted.masked_fill(torch.arange(n) >= visible.unsqueeze(-1), float("-inf"))
        limits = {(indexer, "SCRATCH_BYTES"): 1, (indexer_cpu, "MAX_DOTS"): 0}
        label = f"{rows * queries} queries, {n} entries"
        yield TileCase("index_scores", label, [q, w, keys, visible], wanted, 2, 64, "entries", limits)


def _sparse(rand: Rand, g: torch.Generator) -> Iterator[TileCase]:
    """7 queries in tiles of 3; 37 window rows and up to 300 picks, which kernels take by 16, 64 or 128 keys."""
    N, H = 7, 4
    q, window, entries = rand(N, H, D), rand(60, D), rand(400, D)
    sink = torch.tensor([-8.0, -0.5, 0.5, 8.0])
    near = torch.stack([torch.randperm(60, generator=g)[:W] for _ in range(N)])
    for picks, full in ((0, True), (75, False), (300, True)):
        far = torch.stack([torch.randperm(400, generator=g)[:picks] for _ in range(N)])
        if not full:
            near = torch.where(torch.rand(near.shape, generator=g) < 0.2, -1, near)
            far[:, 60:] = -1
        # logits grow along the keys: a maximum that is not carried from tile to tile shows
        size = torch.linspace(0.2, 3, 400).unsqueeze(1)
        grown = entries * size
        wanted = attend(q, window, near, grown, far, sink, 0.25)
        limits = {(attention, "SCRATCH_BYTES"): 3 * 4 * (W + picks) * (D + 2 * H), (attention_cpu, "MAX_KEYS"): 0}
        given = [grown, far] if picks else [None, None]
        label = f"{N} queries, {W} window rows, {picks} picks" + ("" if full else ", some absent")
        yield TileCase(
            "sparse_attention", label, [q, window, near, *given, sink, 0.25, full], wanted, 0, 3, "queries", limits
        )


def _hca(rand: Rand, g: torch.Generator) -> Iterator[TileCase]:
    """7 queries in tiles of 2, 150 entries by 64, the last of them visible to some queries only."""
    T, H, n = 7, 4, 150
    q, window, entries = rand(1, T, H, D), rand(60, D), rand(1, n, D) * torch.linspace(0.2, 3, n).view(1, n, 1)
    sink = torch.tensor([-8.0, -0.5, 0.5, 8.0])
    near = torch.stack([torch.randperm(60, generator=g)[:W] for _ in range(T)])
    for full in (True, False):
        visible = torch.full((1, T), n) if full else torch.linspace(0, n, T).long().view(1, T)
        far = torch.arange(n).expand(T, n)
        far = torch.where(far < visible[0].unsqueeze(-1), far, -1)
        wanted = attend(q[0], window, near, entries[0], far, sink, 0.25).unsqueeze(0)
        limits = {(attention, "SCRATCH_BYTES"): 2 * 4 * (H * (W + n + 1) + W * D), (attention_cpu, "MAX_KEYS"): 0}
        label = f"{T} queries, {W} window rows, {n} entries" + ("" if full else ", some invisible")
        arguments = [q, window, near, entries, visible, sink, 0.25, full]
        yield TileCase("hca_attention", label, arguments, wanted, 1, 2, "queries", limits)


def _linear(rand: Rand, g: torch.Generator) -> Iterator[TileCase]:
    """300 outputs of an FP8 matrix in tiles of 128; a block-diagonal product whose tiles span groups."""
    x, w = rand(5, 160), rand(300, 160) / 12
    packed = PackedWeight(WeightFormat.FP8, *quantize_fp8(w))
    limits = {(linear, "SCRATCH_BYTES"): 1}
    whole = to_float(packed).double()
    yield TileCase("linear", "FP8, 300 outputs", [x, packed], x.double() @ whole.T, 1, 128, "outputs", limits)
    x, G = rand(5, 3, 160), 3
    wanted = torch.einsum("ngk,grk->ngr", x.double(), whole.view(G, 100, 160))
    yield TileCase("grouped_linear", "FP8, 3 groups of 100", [x, packed], wanted, 2, 100, "outputs", limits)


MAKERS = (_index_scores, _sparse, _hca, _linear)
