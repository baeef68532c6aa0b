"""transformers' DeepseekV4ForCausalLM as an oracle: nobody here wrote it.

Every parameter and buffer is randomised: its own initialisation zeroes sinks, position biases,
hash tables and the gate bias, which hides bugs. fp32 throughout.
"""

import copy
import json
from pathlib import Path

import torch

from dsv4.loaders.config_files import to_transformers

TINY = dict(
    vocab_size=512,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    sliding_window=16,
    index_n_heads=64,
    index_head_dim=16,
    index_topk=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    routed_scaling_factor=1.5,
    rms_norm_eps=1e-6,
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    num_hash_layers=2,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    max_position_embeddings=1024,
    num_nextn_predict_layers=0,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    hidden_act="silu",
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=64),
    compress_ratios=[0, 128, 4, 128, 4, 0],
)

# Widths differ from one another wherever they could be mistaken for one another.
CONFIGS = {
    "Flash-like start": {**TINY, "compress_ratios": [0, 0, 4, 128, 4, 0], "num_hash_layers": 3},
    "Pro-like start": {
        **TINY,
        "compress_ratios": [128, 128, 4, 128, 4, 4],
        "num_hash_layers": 3,
        "num_attention_heads": 8,
        "o_groups": 4,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
    },
    "no hash layers": {**TINY, "num_hash_layers": 0, "index_topk": 16, "sliding_window": 8, "rope_theta": 5000.0},
    "every entry selected": {**TINY, "index_topk": 256, "index_n_heads": 4, "compress_ratios": [4, 4, 128, 0, 4, 128]},
}


YARN = TINY["rope_scaling"]
SMALLEST = {**TINY, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
# What a config may also ask for, each tried once: the smallest model that has every layer kind.
FORMS = {
    "linear RoPE": {**SMALLEST, "rope_scaling": dict(type="linear", factor=3.0)},
    "llama3 RoPE": {
        **SMALLEST,
        "rope_scaling": dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    },
    "YaRN without betas": {
        **SMALLEST,
        "rope_scaling": {k: v for k, v in YARN.items() if not k.startswith("beta")},
    },
    "YaRN whose ramp begins beyond the last pair": {
        **SMALLEST,
        "rope_scaling": YARN | dict(original_max_position_embeddings=10**7),
        "max_position_embeddings": 10**8,
    },
    "no rope_scaling": {**SMALLEST, "rope_scaling": None},
    "hash layers in the middle and at the end": {
        **SMALLEST,
        "num_hash_layers": None,
        "mlp_layer_types": ["moe", "hash_moe", "hash_moe"],
    },
    "tied embeddings": {**SMALLEST, "tie_word_embeddings": True},
    "a window of one token": {**SMALLEST, "sliding_window": 1},
}


def randomised(config: dict, seed: int = 0):
    """DeepseekV4ForCausalLM of `config` (official names), fp32, with every parameter and buffer random."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(config))).eval()  # which writes into it
    spread = {
        "sinks": (0.0, 4.0),
        "position_bias": (0.0, 0.7),
        "e_score_correction_bias": (0.0, 0.3),
        "layernorm.weight": (1.0, 0.2),
        "norm.weight": (1.0, 0.2),
        "hc.base": (0.0, 1.0),
        "hc.scale": (1.0, 0.5),
        "hc_base": (0.0, 1.0),
        "hc_scale": (1.0, 0.5),
    }
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue  # derived from the config
            if name.endswith("tid2eid"):
                for row in tensor:
                    row.copy_(torch.randperm(config["n_routed_experts"])[: config["num_experts_per_tok"]])
                continue
            mean, std = next((s for suffix, s in spread.items() if name.endswith(suffix)), (0.0, None))
            std = std if std is not None else 1.4 * tensor.shape[-1] ** -0.5
            tensor.normal_(mean, std)
    return model


def save_in_memory_names(model, config: dict, folder: Path) -> Path:
    """Write the model under transformers' own module names (what tools that walk the module tree write)."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()  # one tensor under two names
    save_file({k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}, folder / "model.safetensors")
    raw = {**config, "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    if "mlp_layer_types" in config:
        raw = to_transformers(raw)  # the official form has no word for it
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits
