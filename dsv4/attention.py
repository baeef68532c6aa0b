"""Attention, one class per layer kind.

One shared latent serves as key and value (K = V), 512 wide in V4. Every layer reads the last
`sliding_window` tokens raw; a CSA layer also the entries its indexer selects, an HCA layer also
every visible entry. Recent tokens are seen both raw and compressed.
"""

import torch

from dsv4.cache import LayerCache
from dsv4.compressor import KV_BLOCK, MainCompressor
from dsv4.config import LayerKind, ModelConfig
from dsv4.errors import MissingSelection
from dsv4.indexer import LightningIndexer
from dsv4.linear import Linear, parameter
from dsv4.module import Module
from dsv4.norms import RMSNorm
from dsv4.numerics import Numerics
from dsv4.rope import BASES
from dsv4.step import Step


class WindowAttention(Module):
    """Sliding window only; the base of the other two.

    q = RoPE(rms(wq_b · q_norm(wq_a x))) per head; kv = RoPE(kv_norm(wkv x)); after attention the
    output's rotated dims are rotated back at the query's position, and each of o_groups groups of
    heads is projected by its own slice of wo_a before wo_b.
    """

    kind = LayerKind.WINDOW

    def __init__(self, config: ModelConfig, ratio: int, numerics: Numerics, store, op):
        super().__init__()
        c = config
        self.H, self.D, self.W, self.groups = c.num_attention_heads, c.head_dim, c.sliding_window, c.o_groups
        self.rope = c.qk_rope_head_dim
        self.wq_a = Linear(c.q_lora_rank, c.hidden_size, store("wq_a"), numerics, op)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps, store("q_norm").dtype, op)
        self.wq_b = Linear(self.H * self.D, c.q_lora_rank, store("wq_b"), numerics, op)
        self.wkv = Linear(self.D, c.hidden_size, store("wkv"), numerics, op)
        self.kv_norm = RMSNorm(self.D, c.rms_norm_eps, store("kv_norm").dtype, op)
        self.attn_sink = parameter(self.H)
        self.wo_a = GroupedLinear(c.o_groups * c.o_lora_rank, self.H * self.D // c.o_groups, store("wo_a"), numerics, op)
        self.wo_b = Linear(c.hidden_size, c.o_groups * c.o_lora_rank, store("wo_b"), numerics, op)
        self.ratio, self.base, self.scale, self.eps = ratio, BASES[self.kind], c.softmax_scale, c.rms_norm_eps
        self.numerics, self.op = numerics, op
        self.path: dict = {}

    def forward(self, x: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [N, d] (normalised) → [N, d]; writes this step's rows to the cache."""
        if step.captured:
            step.prepare(self.op.linears, x, None, 0.0, self.maps(step))
        qr, q = self.queries(x, step)
        window, window_index = cache.window.extend(step, self.latent(x, step)), cache.window.last(step, self.W)
        o = self._attend(x, qr, q, window, window_index, step, cache)
        if step.captured:
            return self.wo_b(self.op.project_heads(o, step.inverse_cis(self.base), self.wo_a.packed(), self.groups))
        o = self.op.rotate(o, step.inverse_cis(self.base).unsqueeze(1))
        return self.wo_b(self.wo_a(o.view(step.N, self.groups, -1)).flatten(1))

    def maps(self, step: Step) -> list:
        """The linear maps of x, with the dtype of those that are not rounded to x's."""
        return [(self.wq_a, None), (self.wkv, None)]

    def maps_of_queries(self, step: Step) -> list:
        """The linear maps of the normalised low-rank queries."""
        return [(self.wq_b, None)]

    def queries(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, d] → low-rank queries [N, q_lora_rank], which the indexer shares, and queries [N, H, D], rotated."""
        if step.captured:  # what is returned as qr is not normalised: its maps are ready
            qr = step.apply(self.wq_a, x)
            step.prepare(self.op.linears, qr, self.q_norm.weight, self.eps, self.maps_of_queries(step))
            return qr, self.op.query_heads(step.apply(self.wq_b, qr).view(step.N, self.H, self.D), step.cis(self.base), self.eps)
        qr = self.q_norm(self.wq_a(x))
        q = self.op.rms_norm(self.wq_b(qr).view(step.N, self.H, self.D), None, self.eps)
        return qr, self.op.rotate(q, step.cis(self.base).unsqueeze(1))

    def latent(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [N, d] → each token's key and value [N, D], rotated; through FP8 in simulated numerics."""
        kv = step.apply(self.wkv, x)
        if step.captured:
            return self.op.latent(kv, self.kv_norm.weight, self.eps, step.cis(self.base), self.numerics.simulate_kv)
        kv = self.op.rotate(self.kv_norm(kv), step.cis(self.base))
        return self.op.simulate_fp8_blocks(kv, KV_BLOCK, self.rope) if self.numerics.simulate_kv else kv

    def path_at(self, end: int) -> dict:
        """What the attention of a row that then holds `end` tokens reads: tokens of its window, entries visible and selected."""
        return {"window": min(self.W, end)}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        self.path = self.path_at(step.end)
        return self.op.sparse_attention(q, window, window_index, None, None, self.attn_sink, self.scale, step.window_full(self.W))


class CSAAttention(WindowAttention):
    """Window ∪ the entries that the lightning indexer selects."""

    kind = LayerKind.CSA

    def __init__(self, config: ModelConfig, ratio: int, numerics: Numerics, store, op):
        super().__init__(config, ratio, numerics, store, op)
        self.compressor = MainCompressor(config, self.kind, ratio, numerics, lambda leaf: store(f"compressor.{leaf}"), op)
        self.indexer = LightningIndexer(config, ratio, numerics, lambda leaf: store(f"indexer.{leaf}"), op)

    def maps(self, step: Step) -> list:
        found = [*super().maps(step), (self.compressor.wkv_gate, torch.float32), (self.indexer.compressor.wkv_gate, torch.float32)]
        return [*found, (self.indexer.weights_proj, None)] if self.indexer.chooses(step) else found

    def maps_of_queries(self, step: Step) -> list:
        return [(self.wq_b, None), (self.indexer.wq_b, None)] if self.indexer.chooses(step) else [(self.wq_b, None)]

    def path_at(self, end: int) -> dict:
        n = end // self.ratio
        return super().path_at(end) | {"visible": n, "selected": min(n, self.indexer.topk)}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        self.compressor(x, step, cache.main)
        with torch.no_grad():  # a choice has no derivative: the indexer learns from a loss of its own
            selection = self.indexer(x, qr, step, cache)
        if selection is None:
            raise MissingSelection("a CSA layer got no selection from its indexer and would attend to its window only")
        self.path = self.path_at(step.end)
        complete = step.window_full(self.W) and step.min_visible(self.ratio) >= self.path["selected"]
        return self.op.sparse_attention(q, window, window_index, *cache.main.entries.chosen(step, selection),
                                        self.attn_sink, self.scale, complete)


class HCAAttention(WindowAttention):
    """Window ∪ every visible entry."""

    kind = LayerKind.HCA

    def __init__(self, config: ModelConfig, ratio: int, numerics: Numerics, store, op):
        super().__init__(config, ratio, numerics, store, op)
        self.compressor = MainCompressor(config, self.kind, ratio, numerics, lambda leaf: store(f"compressor.{leaf}"), op)

    def maps(self, step: Step) -> list:
        return [*super().maps(step), (self.compressor.wkv_gate, torch.float32)]

    def path_at(self, end: int) -> dict:
        return super().path_at(end) | {"visible": end // self.ratio}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        self.compressor(x, step, cache.main)
        entries, n = cache.main.entries.visible(step), step.max_visible(self.ratio)
        self.path = self.path_at(step.end)
        q = q.view(step.B, step.T, self.H, self.D)
        complete = step.window_full(self.W) and step.min_visible(self.ratio) == n
        o = self.op.hca_attention(q, window, window_index, entries, step.visible(self.ratio), self.attn_sink, self.scale, complete)
        return o.view(step.N, self.H, self.D)


class GroupedLinear(Linear):
    """Block-diagonal projection: group g of the input meets rows [g·R, (g+1)·R) of the weight.

    Never simulated: the official code dequantises wo_a to bf16 and multiplies in bf16.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.simulate = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, G, K] → [N, G, R]."""
        return self.op.grouped_linear(x, self.packed())


ATTENTION = {c.kind: c for c in (WindowAttention, CSAAttention, HCAAttention)}
