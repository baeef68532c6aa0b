"""Synthetic checkpoints in the official layout: every tensor random and distinct."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dsv4.loaders.expected import official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.write import write_checkpoint
from dsv4.model.config import ModelConfig
from dsv4.probes.faults import profile

# Widths are multiples of 32 for MXFP4, and differ wherever one could be taken for another.
SMALL = dict(
    model_type="deepseek_v4",
    architectures=["DeepseekV4ForCausalLM"],
    vocab_size=320,
    hidden_size=128,
    moe_intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=8,
    index_n_heads=64,
    index_head_dim=32,
    index_topk=6,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
    routed_scaling_factor=1.5,
    compress_ratios=[0, 4, 128, 4, 128, 0],
    num_hash_layers=2,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    rope_theta=10000,
    compress_rope_theta=160000,
    max_position_embeddings=4096,
    num_nextn_predict_layers=1,
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=64),
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    hidden_act="silu",
    expert_dtype="fp4",
    quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]
    ),
)

# A layer of each kind, one of which chooses experts by a table. Sinkhorn's steps are most operations of a small layer.
BRIEF = SMALL | dict(num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], num_hash_layers=1, hc_sinkhorn_iters=4)


def plain(name: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Normal, of the size that keeps activations near 1; norms around 1."""
    std, mean = (shape[-1] ** -0.5 if len(shape) > 1 else 0.5), float(name.endswith("norm.weight"))
    return torch.randn(shape, generator=g) * std * (0.3 if mean else 1.0) + mean


def random_values(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Dense fp32 values of every official tensor (tables int64), by name."""
    return profile.random_values(config, seed, plain)


def write_official(
    root: Path, raw: dict = SMALL, experts: str = "MXFP4", seed: int = 0, max_shard_bytes: int = 200_000
) -> Path:
    """An official checkpoint (FP8 + `experts`), sharded."""
    return profile.write_values(
        root, raw, random_values(ModelConfig.from_official(raw), seed), experts, max_shard_bytes
    )


def write_dense(root: Path, raw: dict = SMALL, dtype: str = "F32", seed: int = 0) -> Path:
    """Official names, unquantised, one file."""
    config, values = ModelConfig.from_official(raw), random_values(ModelConfig.from_official(raw), seed)
    planned = official_tensors(config, dense=dtype, experts=dtype)
    raw = {k: v for k, v in raw.items() if k not in ("quantization_config", "expert_dtype")}
    write_checkpoint(root, planned, lambda n: values[n].to(DTYPES[planned[n][0]]), {"config.json": raw})
    return root


def write_first_layers(root: Path, source: Path, layers: int, **changes) -> Path:
    """The first layers of an official checkpoint of one file, and its MTP blocks."""
    raw = json.loads((source / "config.json").read_text())
    ratios, dropped = raw["compress_ratios"], range(layers, raw["num_hidden_layers"])
    raw |= dict(num_hidden_layers=layers, compress_ratios=ratios[:layers] + ratios[dropped.stop :]) | changes
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(raw))
    kept = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not name.startswith(tuple(f"layers.{i}." for i in dropped))
    }
    save_file(kept, root / "model.safetensors")
    return root


def edit_config(root: Path, **changes) -> Path:
    """Change keys of config.json (None removes one)."""
    file = root / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return root
