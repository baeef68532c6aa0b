"""A decoder with grouped-query attention. Modules are named after the tensors of the file."""

from collections.abc import Callable

import torch
from torch import nn

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.errors import InputError
from dsv4.kernels.dispatch import bind
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.grouped_attention import traversals
from dsv4.kernels.operations import GQA_OPERATIONS
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.loaders.cuts import Cut
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits, cut, whole
from dsv4.model.gqa.attention import SelfAttention
from dsv4.model.gqa.cache import GroupedCache, LayerRows
from dsv4.model.gqa.choice import Attention
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.heads import Heads, heads_of
from dsv4.model.gqa.layout import GroupedLayout, StagedGroupedLayout
from dsv4.model.gqa.prefill import append_chunks
from dsv4.model.gqa.projection import Projection, maps
from dsv4.model.gqa.rope import frequencies
from dsv4.model.linear import RMSNorm
from dsv4.model.module import Module, fuses
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks
from dsv4.model.step import CapturedStep, Step
from dsv4.model.vocabulary import Embedding, Head

GQA_COMPOSITIONS = {"linears": COMPOSITIONS["linears"]}


class MLP(Module):
    """W_down (silu(W_gate x) · W_up x). Of several ranks each has a part of the width, and adds the others' results."""

    def __init__(self, config: GQAConfig, numerics: Numerics, store, op, ranks: Ranks):
        super().__init__()
        d, mine, self.op = config.hidden_size, ranks.even(config.intermediate_size, "intermediate_size"), op

        def projection(name: str, rows: int, columns: int, cut: Cut) -> Projection:
            bias = store(f"{name}.bias").dtype if config.mlp_bias else None
            return Projection(rows, columns, store(f"{name}.weight"), bias, numerics, op, cut, ranks)

        self.gate_proj, self.up_proj = (projection(name, mine.size, d, mine) for name in ("gate_proj", "up_proj"))
        self.down_proj = projection("down_proj", d, mine.size, mine.columns)

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x [N, d], not yet normalised by `norm`, → [N, d]."""
        (gate, up), biases = maps(self.op, x, norm, self.gate_proj, self.up_proj)
        return self.down_proj(self.op.silu_mul(gate, up, biases))


class Layer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: GQAConfig, heads: Heads, window: int | None, numerics: Numerics, store, op, ranks: Ranks
    ):
        super().__init__()
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, RMSNorm(config.hidden_size, config.rms_norm_eps, store(f"{name}.weight").dtype, op))
        within = lambda part: lambda leaf: store(f"{part}.{leaf}")
        self.self_attn = SelfAttention(config, heads, window, numerics, within("self_attn"), op, ranks)
        self.mlp = MLP(config, numerics, within("mlp"), op, ranks)

    def forward(
        self, x: torch.Tensor, step: Step, cache: LayerRows, beside: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """x [N, d] → [N, d]; writes the step to the layer's cache. beside: is called with the stream after
        attention."""
        x = x + self.self_attn(x, self.input_layernorm, step, cache)
        if beside is not None:
            beside(x)
        return x + self.mlp(x, self.post_attention_layernorm)


class Decoder(Module):
    """The modules under `model.` in the file."""

    def __init__(self, config: GQAConfig, heads: Heads, numerics: Numerics, store, op, ranks: Ranks):
        super().__init__()
        self.embed_tokens = Embedding(config, store("embed_tokens.weight").dtype, ranks)
        self.layers = nn.ModuleList(
            Layer(config, heads, window, numerics, lambda leaf, i=i: store(f"layers.{i}.{leaf}"), op, ranks)
            for i, window in enumerate(config.windows)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("norm.weight").dtype, op)


class TiedHead(Module):
    """Output projection by the embedding's own matrix, which stays the embedding's parameter: of several ranks each has
    a part of the vocabulary."""

    def __init__(self, embedding: Embedding, op):
        super().__init__()
        self.__dict__["embedding"], self.op = embedding, op  # not a submodule, so that its parameter is counted once
        self.ranks, self.vocab = embedding.ranks, embedding.part.whole

    def packed(self) -> PackedWeight:
        return PackedWeight(WeightFormat.DENSE, self.embedding.weight)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """y [N, d] → fp32 [N, vocab], on every rank."""
        return whole(self.own(y))

    def own(self, y: torch.Tensor) -> Logits:
        """`forward`, of which each of several ranks keeps its part: to choose a token from."""
        found = self.op.linears(y, None, 0.0, (self.packed(),), (False,), (torch.float32,))[0]
        return cut(found, self.ranks, self.vocab)


class GQAModel(CausalLM):
    """A model of `GQAConfig`. Build it with `dsv4.load_model`. store(tensor name) → dsv4.model.linear.Storage says how
    it is held."""

    def __init__(
        self, config: GQAConfig, numerics: Numerics, backend: str, store, replacements=None, ranks: Ranks = ALONE
    ):
        super().__init__(config, numerics, backend, replacements, ranks)
        self.heads = heads_of(config, ranks)
        op = self.op = bind(GQA_OPERATIONS, backend, self.dispatch, GQA_COMPOSITIONS, self.replacements)
        op.bound = op  # see dsv4.model.module.fuses
        self.model = Decoder(config, self.heads, numerics, lambda leaf: store(f"model.{leaf}"), op, ranks)
        self.lm_head = (
            TiedHead(self.model.embed_tokens, op)
            if config.tie_word_embeddings
            else Head(config, store("lm_head.weight"), numerics, op, ranks)
        )
        self.frequencies = {"main": frequencies(config.rope, config.head_dim)}
        self.attention = Attention()

    cache_class = GroupedCache
    embed = property(lambda self: self.model.embed_tokens)
    layers = property(lambda self: self.model.layers)
    head = property(lambda self: self.lm_head)
    mtp = ()

    def __setattr__(self, name: str, value) -> None:
        if name == "attention" and value is not None:
            self._choose(value)
        super().__setattr__(name, value)

    def _choose(self, attention: Attention) -> None:
        """`model.attention = …`: what steps read from now on, and what `new_cache` keeps. Steps captured before must be
        captured again. Raises InputError for a choice that this model cannot serve."""
        if not isinstance(attention, Attention):
            raise InputError(
                f"model.attention is a {type(attention).__name__}; expected a dsv4.model.gqa.choice.Attention"
            )
        if self.backend == "training" and not attention.plain:
            raise InputError(
                "another attention than dense was asked for on the training backend, which is differentiable: blocks "
                "are chosen, not weighed; train densely and decode with a policy"
            )
        for layer in self.layers:
            layer.self_attn.reading = attention  # a layer with a window reads only that

    @property
    def chunk(self) -> int:
        """Tokens of a row in one step, unless `append` sets it: whole chunks if prefill has chunks."""
        size, cut = super().chunk, self.attention.prefill
        return size if cut is None else -(-size // cut.chunk) * cut.chunk

    @property
    def closing(self) -> tuple[Module, ...]:
        return (self.model.norm,) if self.config.tie_word_embeddings else (self.model.norm, self.lm_head)

    @property
    def stream_shape(self) -> tuple[int, ...]:
        """(d,): one residual stream."""
        return (self.config.hidden_size,)

    def cache_layout(self, memory: HostMemory | None = None) -> GroupedLayout:
        policy, memory = self.attention.policy, self.host_memory(memory)
        given = self.config, self.heads, self.numerics, policy, self.op.summarise_blocks
        if memory is None:
            return GroupedLayout(*given)
        return StagedGroupedLayout(*given, memory, self.backend == "triton")

    def page_layout(self) -> GroupedLayout:
        """Raises InputError for a policy that chooses by a prompt's queries."""
        if self.attention.policy.once:
            raise InputError(
                f"{self.attention.policy.name} chooses by the queries of a prompt's last tokens; requests over pages "
                "share prefixes of 128 tokens, whose queries do not run again: choose another --attention, or run "
                "single requests with dsv4 generate"
            )
        return self.cache_layout()

    def layer_paths(self) -> list[dict]:
        """What each layer really read in the last step, for the longest row. Waits for the device if tiles were
        counted."""
        found = []
        for i, (layer, tiles) in enumerate(zip(self.layers, self.tiles or [None] * len(self.layers))):
            attn = layer.self_attn
            path = attn.path_at(self.replayed) if attn.path and self.replayed is not None else attn.path
            text = attn.described(path) if path else "not run yet"
            if tiles is not None:
                size = attn.reading.termination.tile
                read, of = float(tiles.float().mean()), -(-path["tokens"] // size)
                splits = min(of, self._traversals(attn, tiles))
                each = -(-of // splits)
                path = path | {
                    "tiles_read": read,
                    "of_tiles": of,
                    "tile": size,
                    "batch": len(tiles),
                    "traversals": splits,
                    "tiles_each": each,
                }
                text += f"; read {read:.1f} of {of} tiles of {size}, mean"
                text += " of this rank's heads" if self.ranks.size > 1 else ""
                text += f", {splits} traversals of {each}" if splits > 1 else ""
                text += "; so few cannot stop" if each < attn.reading.termination.useful else ""
            found.append({"layer": f"layer {i}", "kind": attn.kind.value, "experts": "–", **path, "path": text})
        return found

    def _traversals(self, attn, tiles: torch.Tensor) -> int:
        return traversals(self.backend, tiles, attn.reach, attn.D, self.numerics.activation, attn.reading.termination)

    def _run_pieces(
        self, ids: torch.Tensor, cache: GroupedCache, counts: list[int], chunk: int, out, prompt: bool
    ) -> None:
        if prompt and self.attention.prefill is not None:
            append_chunks(self, ids, cache, counts, chunk, out, self.attention.prefill)
        else:
            super()._run_pieces(ids, cache, counts, chunk, out, prompt)

    def run(self, step: Step, cache: GroupedCache) -> torch.Tensor:
        x = self.embed(step.ids).to(self.numerics.activation)
        for i, (layer, rows) in enumerate(zip(self.layers, cache.layers)):
            here, x = self.entering(i, step, x)
            x = layer(x, here, rows, cache.guess(self.layers, i, here))
        self.tiles = [layer.self_attn.tiles for layer in self.layers]
        return x.to(self.device)

    def captured(self, step: CapturedStep, cache: GroupedCache) -> tuple[torch.Tensor, Logits]:
        """A captured step: the residual stream before the head [N, d], and logits fp32 [N, vocab], of several ranks
        each its own."""
        x = self.run(step, cache)
        norm, head = self.model.norm, self.lm_head
        if fuses(self.op, "linears", norm, head):
            found = self.op.linears(x, norm.weight, norm.eps, (head.packed(),), (False,), (torch.float32,))[0]
            return x, cut(found, self.ranks, self.config.vocab_size)
        return x, head.own(norm(x))

    def features(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [N, d] → normalised head input [N, d]."""
        return self.model.norm(streams)
