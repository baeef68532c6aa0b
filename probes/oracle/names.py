"""The official name of every key that a checkpoint may hold (§2.1, §2.3), from tables here and none of the loader's
rules."""

import re

GLOBAL = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
MODULES = {  # of a layer in transformers → official, longest first
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer": "attn.indexer.compressor",
    "self_attn.compressor": "attn.compressor",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.sinks": "attn.attn_sink",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "ffn",
}
IN_COMPRESSOR = {"kv_proj": "wkv", "gate_proj": "wgate", "position_bias": "ape", "kv_norm": "norm"}
IN_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
Place = tuple[str, int]  # a file key and the first element there


def places(key: str, shape: tuple[int, ...]) -> dict[str, Place]:
    """Official name → where it lies, of everything in one tensor of the file. A stack of experts holds many."""
    stack = STACK.fullmatch(key)
    if not stack or len(shape) != 3:
        return {official(key): (key, 0)}
    layer, which = stack.groups()
    names = ("w1", "w3") if which == "gate_up_proj" else ("w2",)
    size = shape[1] * shape[2] // len(names)
    return {
        f"layers.{layer}.ffn.experts.{e}.{w}.weight": (key, (e * len(names) + part) * size)
        for e in range(shape[0])
        for part, w in enumerate(names)
    }


def official(key: str) -> str:
    """The official name of a key in any of the namings; a key that is none of them is returned without `model.`."""
    name = key.removeprefix("model.")
    if name in GLOBAL or name.startswith("hc_head."):
        return GLOBAL.get(name, name.replace("hc_head.hc_", "hc_head_"))
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if not match:
        return name
    layer, rest = match.groups()
    if rest == "attn.norm.weight":  # what transformers' save_pretrained makes of kv_norm
        return f"layers.{layer}.attn.kv_norm.weight"
    hyper = re.fullmatch(r"(attn|ffn)_hc\.(fn|base|scale)", rest)
    return f"layers.{layer}." + (f"hc_{hyper[1]}_{hyper[2]}" if hyper else _in_layer(rest))


def _in_layer(rest: str) -> str:
    module = next((m for m in MODULES if rest == m or rest.startswith(f"{m}.")), None)
    if module is None:
        return rest
    leaves = rest[len(module) :].lstrip(".").split(".")
    table = IN_COMPRESSOR if MODULES[module].endswith("compressor") else IN_EXPERT if module == "mlp" else {}
    leaves = ["bias" if leaf == "e_score_correction_bias" else table.get(leaf, leaf) for leaf in leaves if leaf]
    return ".".join([MODULES[module], *leaves])
