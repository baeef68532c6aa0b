"""The lightning indexer of a CSA layer (eqs. 13–17): which entries a query attends to."""

import torch

from dsv4.cache.layer import LayerCache
from dsv4.model.compressor import IndexerKeyCompressor
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear
from dsv4.model.module import Module, composed
from dsv4.model.numerics import Numerics
from dsv4.model.parts import Input
from dsv4.model.spec import LayerSpec
from dsv4.model.step import Step


class LightningIndexer(Module):
    """score(t, e) = Σ_h w[t,h] · relu(qI[t,h] · kI[e]); the best index_topk visible entries win.

    wq_b [H·D, q_lora_rank] makes the index queries from the layer's low-rank query, weights_proj
    [H, d] the head weights, scaled by D^−0.5 · H^−0.5. One key an entry serves all heads.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        super().__init__()
        self.H, self.D, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(self.H * self.D, config.q_lora_rank, store("wq_b"), numerics, op)
        self.weights_proj = Linear(self.H, config.hidden_size, store("weights_proj"), numerics, op)
        self.compressor = IndexerKeyCompressor(config, spec, numerics, lambda leaf: store(f"compressor.{leaf}"), op)
        self.scale = self.D**-0.5 * self.H**-0.5
        self.ratio, self.base, self.numerics, self.op = spec.ratio, spec.rope, numerics, op

    def forward(self, x: Input, qr: Input, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [N, d], qr [N, q_lora_rank] → selected entries int64 [B, T, k], −1 where fewer are visible.

        k = min(index_topk, entries visible to the last query). The step's keys are written first: a
        query at the last token of a window sees that window's entry.
        """
        self.compressor(x, step, cache.index)
        if not self.chooses(step):
            return cache.index.entries.all_visible(step)
        if "select_entries" in self.op.fused:
            return self.op.select_entries(*self.scored(x, qr, step, cache), self.topk)
        scores = self.scores(x, qr, step, cache)
        return self.op.topk_entries(scores, self.topk)

    def chooses(self, step: Step) -> bool:
        """Whether there may be more visible entries than are selected; otherwise nothing needs scores."""
        return step.max_visible(self.ratio) > self.topk

    def scores(self, x: Input, qr: Input, step: Step, cache: LayerCache) -> torch.Tensor:
        """Index scores fp32 [B, T, n] over the entries visible to the last query, −inf where invisible."""
        return self.op.index_scores(*self.scored(x, qr, step, cache))

    def scored(self, x: Input, qr: Input, step: Step, cache: LayerCache) -> tuple:
        """The inputs of the scores: queries [B, T, H, D], head weights fp32 [B, T, H], keys of a batch, visible int64
        [B, T]."""
        q, weights = (t.view(step.B, step.T, *t.shape[1:]) for t in step.parts.index_heads(self, x, qr, step))
        return q, weights, cache.index.entries.visible(step), step.visible(self.ratio)

    def queries(self, qr: Input, step: Step) -> torch.Tensor:
        """Index queries [N, H, D], rotated; in simulated numerics through Hadamard and FP4 like the keys."""
        q = self.wq_b(qr).view(step.N, self.H, self.D)
        return composed(self.op, "index_queries")(q, step.cis(self.base), self.numerics.simulate_index)
