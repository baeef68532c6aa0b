"""The two compressors of a compressed layer.

Both project each token to a row (kv, gate), add the learned position bias `ape` to the gate, and
pool the rows of a window of `ratio` tokens into one entry by a softmax per channel, in fp32
(eqs. 9–12 for CSA, 20–23 for HCA). They differ in width and in what a number format does to their entries:
`MainCompressor` makes the KV entries that attention reads, `IndexerKeyCompressor` the keys that
the indexer scores.
"""

import torch

from dsv4.cache.layer import CompressorCache
from dsv4.kernels.fusions.compositions import Windows, finish_entries, pool_windows
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear, parameter
from dsv4.model.module import Module, fuses
from dsv4.model.norms import RMSNorm
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerSpec
from dsv4.model.step import CapturedStep, Step


class Compressor(Module):
    """Raw rows → entries [D].

    wkv_gate [2·c·D, d] (wkv over wgate), ape fp32 [ratio, c·D], norm [D], where c = 2 for CSA: a token's
    columns [:D] belong to the entry of the *next* window and [D:] to that of its own; c = 1 for HCA.
    simulation: what `finish_entries` simulates. Not `simulate`, which says of a matrix that its input is rounded.
    """

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, width: int, simulation: str | None, numerics: Numerics, store, op
    ):
        super().__init__()
        self.ratio, self.overlap, self.base, self.simulation = spec.ratio, spec.overlap, spec.rope, simulation
        rows = 2 * self.overlap * width
        self.wkv_gate = Linear(rows, config.hidden_size, store("wkv"), numerics, op, stacked=("wkv", "wgate"))
        self.ape = parameter(self.ratio, self.overlap * width)
        self.norm = RMSNorm(width, config.rms_norm_eps, store("norm").dtype, op)
        self.op, self.numerics = op, numerics

    def forward(self, x: torch.Tensor, step: Step, cache: CompressorCache) -> None:
        """x [N, d]: store the rows; pool and store the entries of the windows that end here."""
        found = cache.completed(step, self.wkv_gate(x, exact=True), self.ape)
        if found is None:
            return
        norm, cis, dtype = self.norm, step.window_cis(self.ratio, self.base), self.numerics.activation
        if fuses(self.op, "pool_entries", norm):
            given = self.overlap, dtype, norm.weight, norm.eps, cis, self.simulation
            entries = self.op.pool_entries(*found, *given)
        else:
            pooled = self.pooled(*found, step).to(dtype)
            entries = finish_entries(self.op, norm(pooled), cis, self.simulation)
        cache.entries.write(step, entries)

    def pooled(self, pool: torch.Tensor, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """fp32 [M, D] of the windows that the step completes; pool, rows: of `CompressorCache.completed`."""
        return pool_windows(self.op, pool, rows, self.overlap)

    def windows(self, raw: torch.Tensor, step: CapturedStep, cache: CompressorCache) -> Windows:
        """Store rows and pool entries of a captured step, from the projected rows fp32 [N, 2·c·D]: a part of
        `attention_inputs`."""
        return cache.windows(step, raw, self.ape, self.norm.weight, self.base, self.simulation)


class MainCompressor(Compressor):
    """KV entries [head_dim] of CSA (overlapping windows) and HCA (disjoint windows)."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        super().__init__(config, spec, config.head_dim, "kv" if numerics.simulate_kv else None, numerics, store, op)


class IndexerKeyCompressor(Compressor):
    """Index keys [index_head_dim]; overlapping windows, own weights, own width. In simulated numerics keys pass through
    a Hadamard transform and FP4."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        simulation = "key" if numerics.simulate_index else None
        super().__init__(config, spec, config.index_head_dim, simulation, numerics, store, op)
