"""Attention, one class per layer kind.

One shared latent serves as key and value (K = V), 512 wide in V4. Every layer reads the last
`sliding_window` tokens raw; a CSA layer also the entries its indexer selects, an HCA layer also
every visible entry. Recent tokens are seen both raw and compressed.

Compressors project each token to a row (kv, gate), add the learned position bias `ape` to the gate, and pool the rows
of a window of `ratio` tokens into one entry by a softmax per channel, in fp32 (eqs. 9–12 for CSA, 20–23 for HCA). They
differ in width and in what a number format does to their entries: `MainCompressor` makes the KV entries that attention
reads, `IndexerKeyCompressor` the keys that the lightning indexer scores (eqs. 13–17).
"""

import torch

from dsv4.cache.layer import CompressorCache, LayerCache
from dsv4.cache.rows import ChosenRows
from dsv4.errors import MissingSelection
from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.fusions.compositions import KV_BLOCK, pool_windows
from dsv4.kernels.quantize.coded import Rows, plain
from dsv4.loaders.cuts import Cut
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Linear, RMSNorm, parameter
from dsv4.model.module import Input, Map, Module, composed, fuses
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.spec import LayerKind, LayerSpec
from dsv4.model.step import Step

MANY = 64  # tokens of a row from which products, and not reading the keys, take the time of an index


class WindowAttention(Module):
    """Sliding window only; the base of the other two.

    q = RoPE(rms(wq_b · q_norm(wq_a x))) per head; kv = RoPE(kv_norm(wkv x)); after attention the
    output's rotated dims are rotated back at the query's position, and each of o_groups groups of
    heads is projected by its own slice of wo_a before wo_b. Of several ranks each has some groups and their heads, and
    adds the others' results.
    """

    kind = LayerKind.WINDOW

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__()
        c, self.ranks = config, ranks
        self.D, self.W = c.head_dim, c.sliding_window
        heads = ranks.even(c.num_attention_heads, "num_attention_heads")
        groups = ranks.even(c.o_groups, "o_groups", c.o_lora_rank)
        self.H, self.groups = heads.size, groups.size // c.o_lora_rank
        self.rope = c.qk_rope_head_dim
        self.wq_a = Linear(c.q_lora_rank, c.hidden_size, store("wq_a"), numerics, op)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps, store("q_norm").dtype, op)
        rows = ranks.even(c.num_attention_heads, "num_attention_heads", self.D)
        self.wq_b = Linear(rows.size, c.q_lora_rank, store("wq_b"), numerics, op, cut=rows)
        self.wkv = Linear(self.D, c.hidden_size, store("wkv"), numerics, op)
        self.kv_norm = RMSNorm(self.D, c.rms_norm_eps, store("kv_norm").dtype, op)
        self.attn_sink = parameter(self.H)
        if ranks.size > 1:
            self.cuts = {"attn_sink": heads}
        per_group = c.num_attention_heads * self.D // c.o_groups
        self.wo_a = GroupedLinear(groups.size, per_group, store("wo_a"), numerics, op, cut=groups)
        self.wo_b = Linear(c.hidden_size, groups.size, store("wo_b"), numerics, op, cut=groups.columns)
        self.spec, self.ratio, self.base = spec, spec.ratio, spec.rope
        self.scale, self.eps = c.softmax_scale, c.rms_norm_eps
        self.numerics, self.simulate_kv, self.op = numerics, numerics.simulate_kv, op
        self.path: dict = {}

    def takes_rounded(self, step: Step) -> tuple[bool, bool]:
        """Whether the layer's input may be `CodedRows`, and `RoundedRows`: a map takes it so, and no hook sees it."""
        if not step.parts.takes_rounded or self.watched:
            return False, False
        maps = [m.module for m in self.maps(step)]
        return any(m.takes_codes for m in maps), any(m.simulate and m.exact_sums for m in maps)

    def forward(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [N, d] (normalised) → [N, d]; writes this step's rows to the cache."""
        return self.ranks.sum(self.part(x, step, cache), plain(x).dtype)

    def defers(self, x: torch.Tensor) -> bool:
        """Whether the sum over ranks of so many tokens can be left to the kernel that reads it."""
        return self.ranks.defers(x)

    def deferred(self, x: Rows, step: Step, cache: LayerCache) -> Unsummed:
        """`forward`, summed over ranks by the kernel that reads it."""
        return self.ranks.deferred(self.part(x, step, cache), plain(x).dtype)

    def part(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        """What this rank's heads add to the sum over ranks: [N, d], of several ranks fp32."""
        given = step.parts.mapped(self.op, x, self.maps, step)
        qr, q = self.queries(given, step)
        window = step.parts.window(self, given, step, cache.window)
        o = self._attend(given, qr, q, window, cache.window.last(step, self.W), step, cache)
        o = step.parts.project_heads(self.op, o, step.inverse_cis(self.base), self.wo_a, self.groups, self.wo_b)
        return self.wo_b(o) if self.ranks.size == 1 else self.wo_b(o, exact=True)

    def maps(self, step: Step) -> list[Map]:
        """The linear maps of the layer's input."""
        return [Map(self.wq_a), Map(self.wkv)]

    def query_maps(self, step: Step) -> list[Map]:
        """The linear maps of the normalised low-rank queries."""
        return [Map(self.wq_b)]

    def queries(self, x: Input, step: Step) -> tuple[Input, torch.Tensor]:
        """x [N, d] → low-rank queries [N, q_lora_rank], which the indexer shares, and queries [N, H, D], rotated."""
        qr = step.parts.normed(self.op, self.wq_a(x), self.q_norm, self.query_maps, step)
        q = self.wq_b(qr).view(step.N, self.H, self.D)
        return qr, step.parts.query_heads(self.op, q, step.cis(self.base), self.eps)

    def latent(self, x: Input, step: Step) -> torch.Tensor:
        """x [N, d] → each token's key and value [N, D], rotated; through FP8 in simulated numerics."""
        kv, cis = self.wkv(x), step.cis(self.base)
        if fuses(self.op, "latent", self.kv_norm):
            return self.op.latent(kv, self.kv_norm.weight, self.kv_norm.eps, cis, self.simulate_kv)
        kv = self.op.rotate(self.kv_norm(kv), cis)
        return self.op.simulate_fp8_blocks(kv, KV_BLOCK, self.rope) if self.simulate_kv else kv

    def remember(self, x: torch.Tensor, step: Step, cache: LayerCache) -> None:
        """x [N, d] (normalised): write to a window-only cache what `forward` would write, without attention."""
        cache.window.extend(step, self.latent(x, step))

    def path_at(self, end: int) -> dict:
        """What the attention of a row that then holds `end` tokens reads: window tokens, visible entries and selected
        entries."""
        return {"window": min(self.W, end)}

    def _attend(self, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
        """Compress, select, and attend."""
        selection = self.select(x, qr, step, cache)
        step.parts.finish(self.op, step)
        return self.attend(q, window, window_index, selection, step, cache)

    def select(self, x, qr, step: Step, cache: LayerCache) -> torch.Tensor | ChosenRows | None:
        """Write the step's entries, and choose among all that are visible: int64 [B, T, k] or their rows, or None where
        every one is read."""
        return None

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

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__(config, spec, numerics, store, op, ranks)
        self.compressor = MainCompressor(config, spec, numerics, lambda leaf: store(f"compressor.{leaf}"), op)
        self.indexer = LightningIndexer(config, spec, numerics, lambda leaf: store(f"indexer.{leaf}"), op, ranks)
        # wq_a makes the index queries too, which become FP8 and then FP4. Sums of FP8 tensor cores move some over a
        # boundary of both: of the demo's selections 0.13 % were others than of exact sums, and 0.02 % with these.
        self.wq_a.exact_sums = self.wkv.exact_sums = True

    def maps(self, step: Step) -> list[Map]:
        found = [*super().maps(step), Map(self.compressor.wkv_gate, True), Map(self.indexer.compressor.wkv_gate, True)]
        return [*found, Map(self.indexer.weights_proj)] if self.indexer.chooses(step) else found

    def query_maps(self, step: Step) -> list[Map]:
        return super().query_maps(step) + [Map(self.indexer.wq_b)] * self.indexer.chooses(step)

    def path_at(self, end: int) -> dict:
        n = end // self.ratio
        return super().path_at(end) | {"visible": n, "selected": min(n, self.indexer.topk)}

    def select(self, x, qr, step: Step, cache: LayerCache) -> torch.Tensor | ChosenRows:
        self.compressor(x, step, cache.main)
        with torch.no_grad():  # a choice has no derivative, so the indexer has a loss of its own
            return self.indexer(x, qr, step, cache)

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

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__(config, spec, numerics, store, op, ranks)
        self.compressor = MainCompressor(config, spec, numerics, lambda leaf: store(f"compressor.{leaf}"), op)

    def maps(self, step: Step) -> list[Map]:
        return [*super().maps(step), Map(self.compressor.wkv_gate, True)]

    def path_at(self, end: int) -> dict:
        return super().path_at(end) | {"visible": end // self.ratio}

    def select(self, x, qr, step: Step, cache: LayerCache) -> None:
        self.compressor(x, step, cache.main)

    def attend(self, q, window, window_index, selection, step: Step, cache: LayerCache) -> torch.Tensor:
        entries, n = cache.main.entries.visible(step), step.max_visible(self.ratio)
        self.path = self.path_at(step.end)
        q = q.view(step.B, step.T, self.H, self.D)
        complete = step.window_full(self.W) and step.min_visible(self.ratio) == n
        o = self.op.hca_attention(
            q, window, window_index, entries, step.visible(self.ratio), self.attn_sink, self.scale, complete
        )
        return o.view(step.N, self.H, self.D)


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


class LightningIndexer(Module):
    """score(t, e) = Σ_h w[t,h] · relu(qI[t,h] · kI[e]); the best index_topk visible entries win.

    wq_b [H·D, q_lora_rank] makes the index queries from the layer's low-rank query, weights_proj
    [H, d] the head weights, scaled by D^−0.5 · H^−0.5. One key an entry serves all heads. Several ranks divide the
    tokens of a prompt among them, and give each other what they selected.
    """

    worth = 1 << 19  # scores of a step from which ranks share them: so many take as long as an exchange (H100)

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics, store, op, ranks: Ranks = ALONE):
        super().__init__()
        self.H, self.D, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(self.H * self.D, config.q_lora_rank, store("wq_b"), numerics, op)
        self.weights_proj = Linear(self.H, config.hidden_size, store("weights_proj"), numerics, op)
        self.compressor = IndexerKeyCompressor(config, spec, numerics, lambda leaf: store(f"compressor.{leaf}"), op)
        self.scale = self.D**-0.5 * self.H**-0.5
        self.ratio, self.base, self.simulate_index, self.op = spec.ratio, spec.rope, numerics.simulate_index, op
        self.ranks = ranks

    def forward(self, x: Input, qr: Input, step: Step, cache: LayerCache) -> torch.Tensor | ChosenRows:
        """x [N, d], qr [N, q_lora_rank] → selected entries int64 [B, T, k], −1 where fewer are visible; where a kernel
        can make them, and no hook is to see entries, as rows of the pool of `cache.main`.

        k = min(index_topk, entries visible to the last query). The step's keys are written first: a
        query at the last token of a window sees that window's entry.
        """
        self.compressor(x, step, cache.index)
        if not self.chooses(step):
            return cache.index.entries.all_visible(step)
        if self.shares(step):
            return self._shared(*self.scored(x, qr, step, cache))
        if "select_entries" in self.op.fused:
            given = *self.scored(x, qr, step, cache), self.topk, self.simulate_index
            run = None if self.watched else cache.main.entries.run(step)
            if run is not None:
                return ChosenRows(self.op.select_entries(*given, run).flatten(0, 1))
            return self.op.select_entries(*given)
        return self.op.topk_entries(self.scores(x, qr, step, cache), self.topk)

    def shares(self, step: Step) -> bool:
        """Whether each of several ranks selects for a part of the tokens. Few tokens read as many keys as one."""
        return self.ranks.size > 1 and step.T >= MANY and step.N * step.max_visible(self.ratio) >= self.worth

    def _shared(self, q, weights, keys, visible) -> torch.Tensor:
        """As `forward`, of what `scored` gives: this rank selects for its part of the tokens."""
        part = self.ranks.slots(q.shape[1])
        mine = slice(part.start, part.stop)
        given = q[:, mine], weights[:, mine], keys, visible[:, mine], self.topk, self.simulate_index
        own = composed(self.op, "select_entries")(*given)
        by_token = self.ranks.stacked(own.transpose(0, 1).to(torch.int32), q.shape[1])
        return by_token.transpose(0, 1).long().contiguous()

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
        return composed(self.op, "index_queries")(q, step.cis(self.base), self.simulate_index)


class GroupedLinear(Linear):
    """Block-diagonal projection: group g of the input meets rows [g·R, (g+1)·R) of the weight.

    Never simulated: the official code dequantises wo_a to bf16 and multiplies in bf16.
    """

    def __init__(self, *args, cut: Cut | None = None):
        super().__init__(*args, cut=cut)
        self.simulate = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, G, K] → [N, G, R]."""
        return self.op.grouped_linear(x, self.packed())


ATTENTION = {c.kind: c for c in (WindowAttention, CSAAttention, HCAAttention)}
