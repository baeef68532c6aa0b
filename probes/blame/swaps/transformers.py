"""Modules of transformers' model, replaced by the oracle."""

from contextlib import ExitStack

import torch

from dsv4.probes.blame.swaps.reference import Reference
from dsv4.probes.subjects.transformers import TransformersSubject

LEAVES = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.kv_norm": "self_attn.kv_norm",
}


class TransformersSwap:
    """Hooks on one decoder layer; tensors are [1, T, ...] there."""

    MODULES = frozenset(
        {
            *LEAVES,
            "embed",
            "hc_head",
            "norm",
            "head",
            "hc_attn",
            "hc_ffn",
            "attn",
            "attn.wo_a",
            "attn.attn_sink",
            "attn.rope",
            "attn.compressor",
            "attn.indexer",
            "attn.indexer.compressor",
            "ffn",
            "ffn.gate",
            "ffn.experts",
            "ffn.shared_experts",
        }
    )

    def __init__(self, subject: TransformersSubject, i: int, reference: Reference, undo: ExitStack):
        self.model, self.i, self.ref, self.undo = subject.model.model, i, reference, undo
        self.layer, self.head = self.model.layers[i], subject.model.lm_head

    def install(self, name: str) -> None:
        ref, layer = self.ref, self.layer
        attn, mlp = layer.self_attn, layer.mlp
        like = lambda value, out: value.to(out.dtype).reshape(out.shape)
        if name in LEAVES:
            return self._hook(
                layer.get_submodule(LEAVES[name]), lambda args, out: like(ref.leaf(name, args[0][0]), out)
            )
        match name:
            case "embed":
                table = ref.layer.weights("embed.weight")
                self._hook(self.model.embed_tokens, lambda args, out: table[args[0]].to(out.dtype))
            case "hc_head" | "norm":
                self._hook(getattr(self.model, name), lambda args, out: like(ref.head(name, args[0][0]), out))
            case "head":
                self._hook(self.head, lambda args, out: like(ref.head(name, args[0][0]), out))
            case "attn":
                self._hook(attn, lambda args, out: (like(ref.attention(args[0][0]), out[0]), *out[1:]))
            case "attn.wo_a":
                self._hook(attn.o_a_proj, lambda args, out: like(ref.grouped(args[0][0]), out))
            case "attn.attn_sink":
                self.undo.callback(setattr, attn.sinks, "data", attn.sinks.data)
                attn.sinks.data = ref.layer.w(name).to(attn.sinks.dtype)
            case "attn.rope":
                self._rotation(attn)
            case "attn.compressor":
                self._hook(attn.compressor, self._entries)
            case "attn.indexer.compressor":
                self._before(attn.compressor.indexer, self._keys)
            case "attn.indexer":
                self._indexer(attn.compressor.indexer)
            case "ffn":
                self._hook(mlp, lambda args, out: like(ref.ffn(args[0][0]), out))
            case "ffn.gate":
                self._hook(mlp.gate, self._gate)
            case "ffn.experts":
                self._hook(mlp.experts, lambda args, out: like(ref.experts(*args), out))
            case "ffn.shared_experts":
                self._hook(mlp.shared_experts, lambda args, out: like(ref.shared(args[0][0]), out))
            case "hc_attn" | "hc_ffn":
                module = layer.attn_hc if name == "hc_attn" else layer.ffn_hc
                self._hook(module, lambda args, out: self._read(name, args, out))

    def _hook(self, module: torch.nn.Module, change) -> None:
        self.undo.callback(module.register_forward_hook(lambda _, args, out: change(args, out)).remove)

    def _before(self, module: torch.nn.Module, see) -> None:
        self.undo.callback(module.register_forward_pre_hook(lambda _, args: see(args)).remove)

    def _read(self, name: str, args, out) -> tuple:
        """Their connection returns post, comb and the collapsed streams; the writing is in the layer's own forward."""
        x, post, comb = self.ref.before(name, args[0][0])
        return tuple(v[None].to(o.dtype) for v, o in zip((post, comb, x), out))

    def _entries(self, args, out) -> tuple:
        values = self.ref.entries(args[0][0]).to(out[0].dtype)
        args[3].layers[self.i].compressed_kv["compressor"] = values[None]
        return values[None, None], out[1]

    def _keys(self, args) -> None:
        """The cache layer, made for this run alone, stores the oracle's keys instead of those it is given."""
        held = args[3].layers[self.i]
        real, keys = held.update_compressor_states, self.ref.keys(args[0][0])[None]
        held.update_compressor_states = lambda name, new: real(name, keys.to(new.dtype) if name == "indexer" else new)

    def _indexer(self, indexer) -> None:
        seen = {}

        def scores(args, out):
            found = self.ref.scores(seen["x"], seen["qr"], args[1][0])
            seen["scores"] = found
            return found.masked_fill(found == -torch.inf, 0)[None].to(out.dtype)

        self._before(indexer, lambda args: seen.update(x=args[0][0], qr=args[1][0]))
        self._hook(indexer.scorer, scores)
        self._hook(indexer, lambda args, out: self.ref.select(seen["scores"])[None])

    def _rotation(self, attn) -> None:
        """The tables; the rotation itself is a function of their module, shared by all layers."""

        def tables(positions):
            angles = self.ref.angles(positions)
            return angles.cos().float(), angles.sin().float()

        def inject(_, args, kwargs):
            kinds = kwargs["position_embeddings"]
            return args, kwargs | {"position_embeddings": dict.fromkeys(kinds, tables(kwargs["position_ids"]))}

        self.undo.callback(attn.register_forward_pre_hook(inject, with_kwargs=True).remove)
        compressor = attn.compressor
        for owner in (compressor, getattr(compressor, "indexer", None)):
            if owner is not None:
                hook = lambda _, args, kwargs, out: tables(kwargs["position_ids"])
                self.undo.callback(owner.rotary_emb.register_forward_hook(hook, with_kwargs=True).remove)

    def _gate(self, args, out) -> tuple:
        logits, weights, _ = out
        experts, scale = self.ref.gate(args[0].flatten(0, -2))
        return logits, scale.to(weights.dtype), experts
