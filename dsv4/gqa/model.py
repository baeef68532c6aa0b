"""A decoder with grouped-query attention: Qwen2, Llama, Mistral. Modules are named after the tensors of the file."""

import torch
from torch import nn

from dsv4.cache import DEFAULT_MAX_REWIND
from dsv4.causal import CausalLM, Embedding, Head
from dsv4.gqa.cache import AttentionKind, GroupedCache, LayerRows
from dsv4.gqa.config import GQAConfig
from dsv4.gqa.rope import frequencies
from dsv4.linear import Linear, Storage, parameter
from dsv4.module import Module, fuses
from dsv4.norms import RMSNorm
from dsv4.numerics import Numerics
from dsv4.step import CapturedStep, Step
from kernels.dispatch import bind
from kernels.fusions import COMPOSITIONS
from kernels.operations import GQA_OPERATIONS
from kernels.quantize import PackedWeight, WeightFormat

GQA_COMPOSITIONS = {"linears": COMPOSITIONS["linears"]}


class Projection(Linear):
    """y = W x, or W x + b."""

    def __init__(self, out_features: int, in_features: int, storage: Storage, bias: torch.dtype | None, numerics: Numerics, op):
        super().__init__(out_features, in_features, storage, numerics, op)
        self.bias = None if bias is None else parameter(out_features, dtype=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] → [N, out] in x.dtype."""
        y, bias = super().forward(x), self._parameters.get("bias")
        return y if bias is None else (y + bias).to(y.dtype)


def maps(op, x: torch.Tensor, norm: RMSNorm, *modules: Projection) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...] | None]:
    """Projections of norm(x), x [N, d], and the biases that are still to be added to them (None: none)."""
    if not fuses(op, "linears", norm, *modules):
        y = norm(x)
        return tuple(m(y) for m in modules), None
    packed = tuple(m.packed() for m in modules)
    found = op.linears(x, norm.weight, norm.eps, packed, (False,) * len(modules), (None,) * len(modules))
    return found, None if modules[0].bias is None else tuple(m.bias for m in modules)


class Attention(Module):
    """softmax(q·kᵀ/√D)·v with H query heads over KV heads of keys and values, rotated by position, causal, perhaps in a window."""

    def __init__(self, config: GQAConfig, window: int | None, numerics: Numerics, store, op):
        super().__init__()
        c, self.op = config, op
        self.H, self.KV, self.D, self.window, self.scale = c.num_attention_heads, c.num_key_value_heads, c.head_dim, window, c.softmax_scale
        self.kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING

        def projection(name: str, rows: int, columns: int, biased: bool) -> Projection:
            return Projection(rows, columns, store(f"{name}.weight"), store(f"{name}.bias").dtype if biased else None, numerics, op)
        self.q_proj = projection("q_proj", self.H * self.D, c.hidden_size, c.qkv_bias)
        self.k_proj = projection("k_proj", self.KV * self.D, c.hidden_size, c.qkv_bias)
        self.v_proj = projection("v_proj", self.KV * self.D, c.hidden_size, c.qkv_bias)
        self.o_proj = projection("o_proj", c.hidden_size, self.H * self.D, c.output_bias)
        self.path: dict = {}

    def forward(self, x: torch.Tensor, norm: RMSNorm, step: Step, cache: LayerRows) -> torch.Tensor:
        """x [N, d], not yet normalised by `norm`, → [N, d]; writes this step's rows to the cache."""
        (q, k, v), biases = maps(self.op, x, norm, self.q_proj, self.k_proj, self.v_proj)
        keys, values = cache.of(step)
        q = self.op.rotary_rows(q, k, v, biases, step.cis("main"), keys, values, step.start)
        self.path = self.path_at(step.end)
        return self.o_proj(self.attend(q, keys, values, step).view(step.N, -1))

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Step) -> torch.Tensor:
        """q [B, T, H, D], rotated; keys, values [B, KV, S, D], which hold the step's own → [B, T, H, D]."""
        return self.op.grouped_attention(q, keys, values, step.start, self.window, self.scale)

    def path_at(self, end: int) -> dict:
        """What the attention of a row that then holds `end` tokens reads."""
        return {"tokens": end if self.window is None else min(self.window, end)}


class MLP(Module):
    """W_down (silu(W_gate x) · W_up x)."""

    def __init__(self, config: GQAConfig, numerics: Numerics, store, op):
        super().__init__()
        d, width, self.op = config.hidden_size, config.intermediate_size, op

        def projection(name: str, rows: int, columns: int) -> Projection:
            bias = store(f"{name}.bias").dtype if config.mlp_bias else None
            return Projection(rows, columns, store(f"{name}.weight"), bias, numerics, op)
        self.gate_proj, self.up_proj = projection("gate_proj", width, d), projection("up_proj", width, d)
        self.down_proj = projection("down_proj", d, width)

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x [N, d], not yet normalised by `norm`, → [N, d]."""
        (gate, up), biases = maps(self.op, x, norm, self.gate_proj, self.up_proj)
        return self.down_proj(self.op.silu_mul(gate, up, biases))


class Layer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GQAConfig, window: int | None, numerics: Numerics, store, op):
        super().__init__()
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, RMSNorm(config.hidden_size, config.rms_norm_eps, store(f"{name}.weight").dtype, op))
        self.self_attn = Attention(config, window, numerics, lambda leaf: store(f"self_attn.{leaf}"), op)
        self.mlp = MLP(config, numerics, lambda leaf: store(f"mlp.{leaf}"), op)

    def forward(self, x: torch.Tensor, step: Step, cache: LayerRows) -> torch.Tensor:
        """x [N, d] → [N, d]; writes the step to the layer's cache."""
        x = x + self.self_attn(x, self.input_layernorm, step, cache)
        return x + self.mlp(x, self.post_attention_layernorm)


class Decoder(Module):
    """What stands under `model.` in the file."""

    def __init__(self, config: GQAConfig, numerics: Numerics, store, op):
        super().__init__()
        self.embed_tokens = Embedding(config, store("embed_tokens.weight").dtype)
        self.layers = nn.ModuleList(Layer(config, window, numerics, lambda leaf, i=i: store(f"layers.{i}.{leaf}"), op)
                                    for i, window in enumerate(config.windows))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, store("norm.weight").dtype, op)


class TiedHead(Module):
    """Output projection by the embedding's own matrix, which stays the embedding's parameter."""

    def __init__(self, embedding: Embedding, op):
        super().__init__()
        self.__dict__["embedding"], self.op = embedding, op  # not a submodule: its parameter is counted once

    def packed(self) -> PackedWeight:
        return PackedWeight(WeightFormat.DENSE, self.embedding.weight)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """y [N, d] → fp32 [N, vocab]."""
        return self.op.linears(y, None, 0.0, (self.packed(),), (False,), (torch.float32,))[0]


class GQAModel(CausalLM):
    """A model of `GQAConfig`. Build it with `dsv4.load_model`. store(tensor name) → dsv4.linear.Storage says how it is held."""

    def __init__(self, config: GQAConfig, numerics: Numerics, backend: str, store):
        super().__init__(config, numerics, backend)
        op = self.op = bind(GQA_OPERATIONS, backend, self.dispatch, GQA_COMPOSITIONS)
        op.bound = op  # see dsv4.module.fuses
        self.model = Decoder(config, numerics, lambda leaf: store(f"model.{leaf}"), op)
        tied, shape = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        self.lm_head = TiedHead(self.model.embed_tokens, op) if tied else Head(*shape, store("lm_head.weight"), numerics, op)
        self.frequencies = {"main": frequencies(config.rope, config.head_dim)}

    embed = property(lambda self: self.model.embed_tokens)
    layers = property(lambda self: self.model.layers)
    head = property(lambda self: self.lm_head)
    mtp = ()

    @property
    def stream_shape(self) -> tuple[int, ...]:
        """(d,): one residual stream."""
        return (self.config.hidden_size,)

    def new_cache(self, batch: int = 1, max_context: int | None = None, max_rewind: int = DEFAULT_MAX_REWIND) -> GroupedCache:
        """A preallocated cache for `batch` rows of up to `max_context` tokens, which may be rewound to anywhere: max_rewind is what
        the caller needs at least.

        Default max_context: what the model was loaded with, else the checkpoint's max_position_embeddings.
        Raises InputError beyond the latter, CapacityError with the bytes when it does not fit.
        """
        if max_context is None:
            max_context = self.max_context or self.config.max_position_embeddings
        return GroupedCache(self.config, self.numerics, batch, max_context, [self.device] * len(self.layers))

    def layer_paths(self) -> list[dict]:
        """What each layer really read in the last step."""
        found = []
        for i, layer in enumerate(self.layers):
            attn = layer.self_attn
            path = attn.path_at(self.replayed) if attn.path and self.replayed is not None else attn.path
            text = f"{'the last' if attn.window else 'all'} {path['tokens']} tokens" if path else "not run yet"
            found.append({"layer": f"layer {i}", "kind": attn.kind.value, "experts": "–", **path, "path": text})
        return found

    def run(self, step: Step, cache: GroupedCache) -> torch.Tensor:
        x = self.embed(step.ids).to(self.numerics.activation)
        for layer, rows in zip(self.layers, cache.layers):
            x = layer(x, step, rows)
        return x

    def captured(self, step: CapturedStep, cache: GroupedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """A captured step: the residual stream before the head [N, d], and logits fp32 [N, vocab]."""
        x = self.run(step, cache)
        norm, head = self.model.norm, self.lm_head
        if fuses(self.op, "linears", norm, head):
            return x, self.op.linears(x, norm.weight, norm.eps, (head.packed(),), (False,), (torch.float32,))[0]
        return x, head(norm(x))

    def features(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [N, d] → normalised head input [N, d]."""
        return self.model.norm(streams)
