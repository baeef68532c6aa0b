"""Official tensor names as transformers' in-memory names, for writing: `dsv4.loaders.layouts` has the way back."""

import re

from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.layouts import TRANSFORMERS

_TRANSFORMERS = [  # official → transformers, whole names
    (r"embed\.weight", "model.embed_tokens.weight"),
    (r"head\.weight", "lm_head.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"hc_head_(fn|base|scale)", r"model.hc_head.hc_\1"),
    (r"layers\.(\d+)\.attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (r"layers\.(\d+)\.ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (r"layers\.(\d+)\.hc_(attn|ffn)_(fn|base|scale)", r"model.layers.\1.\2_hc.\3"),
    (r"layers\.(\d+)\.attn\.attn_sink", r"model.layers.\1.self_attn.sinks"),
    (r"layers\.(\d+)\.attn\.wq_(a|b)\.weight", r"model.layers.\1.self_attn.q_\2_proj.weight"),
    (r"layers\.(\d+)\.attn\.wkv\.weight", r"model.layers.\1.self_attn.kv_proj.weight"),
    (r"layers\.(\d+)\.attn\.wo_(a|b)\.weight", r"model.layers.\1.self_attn.o_\2_proj.weight"),
    (r"layers\.(\d+)\.attn\.q_norm\.weight", r"model.layers.\1.self_attn.q_a_norm.weight"),
    (r"layers\.(\d+)\.attn\.kv_norm\.weight", r"model.layers.\1.self_attn.kv_norm.weight"),
    (r"layers\.(\d+)\.attn\.indexer\.wq_b\.weight", r"model.layers.\1.self_attn.compressor.indexer.q_b_proj.weight"),
    (
        r"layers\.(\d+)\.attn\.indexer\.weights_proj\.weight",
        r"model.layers.\1.self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    (r"layers\.(\d+)\.ffn\.gate\.(weight|tid2eid)", r"model.layers.\1.mlp.gate.\2"),
    (r"layers\.(\d+)\.ffn\.gate\.bias", r"model.layers.\1.mlp.gate.e_score_correction_bias"),
    (r"layers\.(\d+)\.ffn\.shared_experts\.w1\.weight", r"model.layers.\1.mlp.shared_experts.gate_proj.weight"),
    (r"layers\.(\d+)\.ffn\.shared_experts\.w2\.weight", r"model.layers.\1.mlp.shared_experts.down_proj.weight"),
    (r"layers\.(\d+)\.ffn\.shared_experts\.w3\.weight", r"model.layers.\1.mlp.shared_experts.up_proj.weight"),
    *[
        (rf"layers\.(\d+)\.attn\.{ours}compressor\.{leaf}", rf"model.layers.\1.self_attn.compressor.{theirs}{name}")
        for ours, theirs in (("", ""), (r"indexer\.", "indexer."))
        for leaf, name in (
            (r"wkv\.weight", "kv_proj.weight"),
            (r"wgate\.weight", "gate_proj.weight"),
            ("ape", "position_bias"),
            (r"norm\.weight", "kv_norm.weight"),
        )
    ],
    (r"(mtp\..*)", r"\1"),  # transformers has no MTP and ignores these; they keep their official names
]


def to_transformers(name: str) -> str:
    """In-memory name of an official one that is no expert's. Raises CheckpointError."""
    for pattern, template in _TRANSFORMERS:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(template)
    raise CheckpointError(f"{name} has no name in transformers' layout")


def from_transformers(key: str) -> str:
    """Official name of an in-memory name that is no stack of experts."""
    return TRANSFORMERS.official(key)  # type: ignore[return-value]  # a key that to_transformers made has a name


def transformers_plan(target: dict, config) -> dict:
    """Official name → (dtype, shape) in transformers' names; the experts of a layer are two stacks."""
    E, I, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    plan = {}
    for name, entry in target.items():
        match = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\..*", name)
        if match:
            plan[f"model.layers.{match[1]}.mlp.experts.gate_up_proj"] = ("BF16", (E, 2 * I, d))
            plan[f"model.layers.{match[1]}.mlp.experts.down_proj"] = ("BF16", (E, d, I))
        else:
            plan[to_transformers(name)] = entry
    return plan
