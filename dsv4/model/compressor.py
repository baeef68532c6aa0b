"""The two compressors of a compressed layer.

Both project each token to a row (kv, gate), add the learned position bias `ape` to the gate, and
pool the rows of a window of `ratio` tokens into one entry by a softmax per channel, in fp32
(eqs. 9–12 for CSA, 20–23 for HCA). They differ in everything else, so they are two classes:
`MainCompressor` makes the KV entries that attention reads, `IndexerKeyCompressor` the keys that
the indexer scores.
"""

import torch

from dsv4.cache.layer import CompressorCache
from dsv4.kernels.fusions.compositions import INDEX_KEY_BLOCK, KV_BLOCK, Windows
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear, parameter
from dsv4.model.module import Module, fuses
from dsv4.model.norms import RMSNorm
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerSpec
from dsv4.model.step import CapturedStep, Step


class MainCompressor(Module):
    """Raw rows → KV entries [head_dim] of CSA (overlapping windows) and HCA (disjoint windows).

    wkv_gate [2·c·D, d] (wkv over wgate), ape fp32 [ratio, c·D], norm [D], where c = 2 for CSA: a token's
    columns [:D] belong to the entry of the *next* window and [D:] to that of its own; c = 1 for HCA.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        super().__init__()
        self.ratio, self.overlap, self.base = spec.ratio, spec.overlap, spec.rope
        width = self.overlap * config.head_dim
        self.wkv_gate = Linear(2 * width, config.hidden_size, store("wkv"), numerics, op, stacked=("wkv", "wgate"))
        self.ape = parameter(self.ratio, width)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, store("norm").dtype, op)
        self.op, self.numerics = op, numerics
        self.rope = config.qk_rope_head_dim

    def forward(self, x: torch.Tensor, step: Step, cache: CompressorCache) -> None:
        """x [N, d]: store the rows; pool and store the entries of the windows that end here."""
        raw = self.wkv_gate(x, exact=True)
        if fuses(self.op, "pool_entries", self.norm):
            return _write_as_one(self, raw, step, cache, self.base, "kv" if self.numerics.simulate_kv else None)
        pooled = cache.pool(step, raw, self.ape, self.op)
        if pooled is None:
            return
        entries = self.norm(pooled.to(self.numerics.activation))
        entries = self.op.rotate(entries, step.window_cis(self.ratio, self.base))
        if self.numerics.simulate_kv:
            entries = self.op.simulate_fp8_blocks(entries, KV_BLOCK, self.rope)
        cache.entries.write(step, entries)

    def windows(self, raw: torch.Tensor, step: CapturedStep, cache: CompressorCache) -> Windows:
        """Store rows and pool entries of a captured step, from the projected rows fp32 [N, 2·c·D]: a part of
        `attention_inputs`."""
        return cache.windows(
            step, raw, self.ape, self.norm.weight, self.base, "kv" if self.numerics.simulate_kv else None
        )


class IndexerKeyCompressor(Module):
    """Raw rows → index keys [index_head_dim]; overlapping windows, own weights, own width.

    wkv_gate [4·D, d] (wkv over wgate), ape fp32 [ratio, 2·D], norm [D]. In simulated numerics keys pass
    through a Hadamard transform and FP4.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        super().__init__()
        self.ratio, self.overlap, self.base = spec.ratio, spec.overlap, spec.rope
        width = self.overlap * config.index_head_dim
        self.wkv_gate = Linear(2 * width, config.hidden_size, store("wkv"), numerics, op, stacked=("wkv", "wgate"))
        self.ape = parameter(self.ratio, width)
        self.norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, store("norm").dtype, op)
        self.op, self.numerics = op, numerics

    def forward(self, x: torch.Tensor, step: Step, cache: CompressorCache) -> None:
        """x [N, d]: store the rows; pool and store the keys of the windows that end here."""
        raw, base = self.wkv_gate(x, exact=True), self.base
        if fuses(self.op, "pool_entries", self.norm):
            return _write_as_one(self, raw, step, cache, base, "key" if self.numerics.simulate_index else None)
        pooled = cache.pool(step, raw, self.ape, self.op)
        if pooled is None:
            return
        keys = self.norm(pooled.to(self.numerics.activation))
        keys = self.op.rotate(keys, step.window_cis(self.ratio, base))
        if self.numerics.simulate_index:
            keys = self.op.simulate_fp4_blocks(self.op.hadamard(keys), INDEX_KEY_BLOCK)
        cache.entries.write(step, keys)

    def windows(self, raw: torch.Tensor, step: CapturedStep, cache: CompressorCache) -> Windows:
        """Store rows and pool keys of a captured step, from the projected rows fp32 [N, 4·D]: a part of
        `attention_inputs`."""
        simulate = "key" if self.numerics.simulate_index else None
        return cache.windows(step, raw, self.ape, self.norm.weight, self.base, simulate)


def _write_as_one(
    compressor: MainCompressor | IndexerKeyCompressor,
    raw: torch.Tensor,
    step: Step,
    cache: CompressorCache,
    base: str,
    simulate: str | None,
) -> None:
    """`forward` after the projection, by the composition `pool_entries`."""
    found, norm = cache.completed(step, raw, compressor.ape), compressor.norm
    if found is not None:
        entries = compressor.op.pool_entries(
            *found,
            compressor.overlap,
            compressor.numerics.activation,
            norm.weight,
            norm.eps,
            step.window_cis(compressor.ratio, base),
            simulate,
        )
        cache.entries.write(step, entries)
