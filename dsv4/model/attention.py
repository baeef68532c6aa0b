"""Attention, one class per layer kind.

One shared latent serves as key and value (K = V), 512 wide in V4. Every layer reads the last
`sliding_window` tokens raw; a CSA layer also the entries its indexer selects, an HCA layer also
every visible entry. Recent tokens are seen both raw and compressed.
"""

import torch

from dsv4.cache.layer import LayerCache
from dsv4.errors import MissingSelection
from dsv4.kernels.fusions.compositions import KV_BLOCK, IndexHeads, Latents
from dsv4.model.compressor import MainCompressor
from dsv4.model.config import ModelConfig
from dsv4.model.indexer import LightningIndexer
from dsv4.model.linear import Linear, parameter
from dsv4.model.module import Module, composed, fuses
from dsv4.model.norms import RMSNorm
from dsv4.model.numerics import Numerics
from dsv4.model.spec import LayerKind, LayerSpec
from dsv4.model.step import CapturedStep, Step


class WindowAttention(Module):
    """Sliding window only; the base of the other two.

    q = RoPE(rms(wq_b · q_norm(wq_a x))) per head; kv = RoPE(kv_norm(wkv x)); after attention the
    output's rotated dims are rotated back at the query's position, and each of o_groups groups of
    heads is projected by its own slice of wo_a before wo_b.
    """

    kind = LayerKind.WINDOW

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
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
        self.wo_a = GroupedLinear(
            c.o_groups * c.o_lora_rank, self.H * self.D // c.o_groups, store("wo_a"), numerics, op
        )
        self.wo_b = Linear(c.hidden_size, c.o_groups * c.o_lora_rank, store("wo_b"), numerics, op)
        self.spec, self.ratio, self.base = spec, spec.ratio, spec.rope
        self.scale, self.eps = c.softmax_scale, c.rms_norm_eps
        self.numerics, self.op = numerics, op
        self.path: dict = {}

    def forward(self, x: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [N, d] (normalised) → [N, d]; writes this step's rows to the cache."""
        if step.captured:
            return self._captured(x, step, cache)
        qr, q = self.queries(x, step)
        window, window_index = cache.window.extend(step, self.latent(x, step)), cache.window.last(step, self.W)
        o = self._attend(x, qr, q, window, window_index, step, cache)
        o = self.op.rotate(o, step.inverse_cis(self.base).unsqueeze(1))
        return self.wo_b(self.wo_a(o.view(step.N, self.groups, -1)).flatten(1))

    def _captured(self, x: torch.Tensor, step: CapturedStep, cache: LayerCache) -> torch.Tensor:
        """`forward` for a captured step, whose positions are only on the device. One composition writes everything."""
        low, kv, *rest = self._maps(x, None, (self.wq_a, None), (self.wkv, None), *self._maps_of_compressed(step))
        q, *asked = self._maps(
            low, self.q_norm.weight, (self.wq_b, None), *((m, None) for m in self._maps_of_asked(step))
        )
        latents = Latents(
            kv, self.kv_norm.weight, self.numerics.simulate_kv, cache.window.flat, cache.window.slots(step)
        )
        found = self.op.attention_inputs(
            step.B,
            q.view(step.N, self.H, self.D),
            step.cis(self.base),
            self.eps,
            latents,
            *self._compressed(rest, asked, step, cache),
        )
        o = self._attend_captured(found, cache.window.flat, cache.window.last(step, self.W), step, cache)
        return self.wo_b(self.op.project_heads(o, step.inverse_cis(self.base), self.wo_a.packed(), self.groups))

    def _maps(self, x: torch.Tensor, norm: torch.Tensor | None, *modules: tuple) -> tuple[torch.Tensor, ...]:
        """Linear maps of x in one composition. modules: (Linear, dtype of a result that is not rounded to x's dtype, or
        None)."""
        maps, dtypes = zip(*modules)
        return self.op.linears(
            x, norm, self.eps, tuple(m.packed() for m in maps), tuple(m.simulate for m in maps), dtypes
        )

    def _maps_of_compressed(self, step: CapturedStep) -> list:
        """Further linear maps of x, in the form of `_maps`: the first input of `_compressed`."""
        return []

    def _maps_of_asked(self, step: CapturedStep) -> list:
        """Further linear maps of the normalised low-rank queries: the second input of `_compressed`."""
        return []

    def _compressed(
        self, rest: list, asked: list, step: CapturedStep, cache: LayerCache
    ) -> tuple[IndexHeads | None, tuple]:
        """The indexer's queries and weights, and each compressor's part of the step."""
        return None, ()

    def _attend_captured(
        self, found: tuple, window, window_index, step: CapturedStep, cache: LayerCache
    ) -> torch.Tensor:
        """Attention on the results of `attention_inputs`."""
        return self.attend(found[0], window, window_index, None, step, cache)

    def queries(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, d] → low-rank queries [N, q_lora_rank], which the indexer shares, and queries [N, H, D], rotated."""
        qr = self.q_norm(self.wq_a(x))
        return qr, composed(self.op, "query_heads")(
            self.wq_b(qr).view(step.N, self.H, self.D), step.cis(self.base), self.eps
        )

    def latent(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [N, d] → each token's key and value [N, D], rotated; through FP8 in simulated numerics."""
        kv, cis = self.wkv(x), step.cis(self.base)
        if fuses(self.op, "latent", self.kv_norm):
            return self.op.latent(kv, self.kv_norm.weight, self.kv_norm.eps, cis, self.numerics.simulate_kv)
        kv = self.op.rotate(self.kv_norm(kv), cis)
        return self.op.simulate_fp8_blocks(kv, KV_BLOCK, self.rope) if self.numerics.simulate_kv else kv

    def remember(self, x: torch.Tensor, step: Step, cache: LayerCache) -> None:
        """x [N, d] (normalised): write to a window-only cache what `forward` would write, without attention."""
        cache.window.extend(step, self.latent(x, step))

    def path_at(self, end: int) -> dict:
        """What the attention of a row that then holds `end` tokens reads: window tokens, visible entries and selected
        entries."""
        return {"window": min(self.W, end)}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        """Compress, select, and attend."""
        return self.attend(q, window, window_index, None, step, cache)

    def attend(self, q, window, window_index, selection, step: Step, cache: LayerCache) -> torch.Tensor:
        """q [N, H, D]; window: rows, of which those of window_index [N, W] are read; selection: of the indexer → [N, H,
        D]."""
        self.path = self.path_at(step.end)
        complete = step.window_full(self.W)
        return self.op.sparse_attention(
            q, window, window_index, None, None, self.attn_sink, self.scale, complete, step.T
        )


class CSAAttention(WindowAttention):
    """Window ∪ the entries that the lightning indexer selects."""

    kind = LayerKind.CSA

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        super().__init__(config, spec, numerics, store, op)
        self.compressor = MainCompressor(config, spec, numerics, lambda leaf: store(f"compressor.{leaf}"), op)
        self.indexer = LightningIndexer(config, spec, numerics, lambda leaf: store(f"indexer.{leaf}"), op)

    def _maps_of_compressed(self, step: CapturedStep) -> list:
        found = [(self.compressor.wkv_gate, torch.float32), (self.indexer.compressor.wkv_gate, torch.float32)]
        return [*found, (self.indexer.weights_proj, None)] if self.indexer.chooses(step) else found

    def _maps_of_asked(self, step: CapturedStep) -> list:
        return [self.indexer.wq_b] if self.indexer.chooses(step) else []

    def _compressed(
        self, rest: list, asked: list, step: CapturedStep, cache: LayerCache
    ) -> tuple[IndexHeads | None, tuple]:
        raw, index_raw, *weights = rest
        windows = (
            self.compressor.windows(raw, step, cache.main),
            self.indexer.compressor.windows(index_raw, step, cache.index),
        )
        return self.indexer.index_heads(*asked, *weights, step) if asked else None, windows

    def _attend_captured(
        self, found: tuple, window, window_index, step: CapturedStep, cache: LayerCache
    ) -> torch.Tensor:
        q, *asked = found[:3]
        return self.attend(q, window, window_index, self.indexer.captured(asked, step, cache), step, cache)

    def path_at(self, end: int) -> dict:
        n = end // self.ratio
        return super().path_at(end) | {"visible": n, "selected": min(n, self.indexer.topk)}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        self.compressor(x, step, cache.main)
        with torch.no_grad():  # a choice has no derivative, so the indexer has a loss of its own
            selection = self.indexer(x, qr, step, cache)
        return self.attend(q, window, window_index, selection, step, cache)

    def attend(self, q, window, window_index, selection, step: Step, cache: LayerCache) -> torch.Tensor:
        if selection is None:
            raise MissingSelection("a CSA layer got no selection from its indexer and would attend to its window only")
        self.path = self.path_at(step.end)
        complete = step.window_full(self.W) and step.min_visible(self.ratio) >= self.path["selected"]
        entries = cache.main.entries
        chosen = entries.chosen(step, selection, self.op)
        return self.op.sparse_attention(q, window, window_index, *chosen, self.attn_sink, self.scale, complete, step.T)


class HCAAttention(WindowAttention):
    """Window ∪ every visible entry."""

    kind = LayerKind.HCA

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op):
        super().__init__(config, spec, numerics, store, op)
        self.compressor = MainCompressor(config, spec, numerics, lambda leaf: store(f"compressor.{leaf}"), op)

    def _maps_of_compressed(self, step: CapturedStep) -> list:
        return [(self.compressor.wkv_gate, torch.float32)]

    def _compressed(
        self, rest: list, asked: list, step: CapturedStep, cache: LayerCache
    ) -> tuple[IndexHeads | None, tuple]:
        return None, (self.compressor.windows(*rest, step, cache.main),)

    def path_at(self, end: int) -> dict:
        return super().path_at(end) | {"visible": end // self.ratio}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        self.compressor(x, step, cache.main)
        return self.attend(q, window, window_index, None, step, cache)

    def attend(self, q, window, window_index, selection, step: Step, cache: LayerCache) -> torch.Tensor:
        entries, n = cache.main.entries.visible(step), step.max_visible(self.ratio)
        self.path = self.path_at(step.end)
        q = q.view(step.B, step.T, self.H, self.D)
        complete = step.window_full(self.W) and step.min_visible(self.ratio) == n
        o = self.op.hca_attention(
            q, window, window_index, entries, step.visible(self.ratio), self.attn_sink, self.scale, complete
        )
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
