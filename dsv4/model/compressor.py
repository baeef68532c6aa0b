"""The two compressors of a compressed layer.

Both project each token to a row (kv, gate), add the learned position bias `ape` to the gate, and
pool the rows of a window of `ratio` tokens into one entry by a softmax per channel, in fp32
(eqs. 9–12 for CSA, 20–23 for HCA). They differ in width and in what a number format does to their entries:
`MainCompressor` makes the KV entries that attention reads, `IndexerKeyCompressor` the keys that
the indexer scores.
"""

import torch

from dsv4.cache.layer import CompressorCache
from dsv4.kernels.fusions.compositions import pool_windows
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear, parameter
from dsv4.model.module import Module
from dsv4.model.norms import RMSNorm
from dsv4.model.numerics import Numerics
from dsv4.model.parts import Input
from dsv4.model.spec import LayerSpec
from dsv4.model.step import Step


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

    def forward(self, x: Input, step: Step, cache: CompressorCache) -> None:
        """x [N, d]: store the rows; pool and store the entries of the windows that end here."""
        step.parts.entries(self, self.wkv_gate(x, exact=True), step, cache)

    def pooled(self, pool: torch.Tensor, rows: torch.Tensor, step: Step) -> torch.Tensor:
        """fp32 [M, D] of the windows that the step completes; pool, rows: of `CompressorCache.completed`."""
        return pool_windows(self.op, pool, rows, self.overlap)


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
