"""Synthetic checkpoints in which planted faults show: official layout, every tensor random and distinct.

What a fault needs to be visible is listed in section 3 of the known bugs; `tests/probes/test_profile.py` measures that
a profile has it. Numbers that could be taken for one another differ; matrices have scales that differ from block to
block.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.kernels.quantize import quantize_fp8, quantize_mxfp4
from dsv4.loaders.expected import official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.write import write_checkpoint
from dsv4.model.config import ModelConfig
from dsv4.probes.faults.gqa_profiles import GQA_PROFILES, write_gqa

QUANTISED = dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]
)
COMMON = dict(
    model_type="deepseek_v4",
    architectures=["DeepseekV4ForCausalLM"],
    vocab_size=320,
    num_key_value_heads=1,
    n_shared_experts=1,
    hidden_act="silu",
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    swiglu_limit=10.0,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    expert_dtype="fp4",
    quantization_config=QUANTISED,
)
DEFAULT = COMMON | dict(  # CSA with hash layers and without; HCA twice; window only below and in the MTP block
    compress_ratios=[0, 4, 128, 4, 128, 0],
    num_hidden_layers=5,
    num_hash_layers=2,
    hidden_size=160,
    moe_intermediate_size=96,
    num_attention_heads=6,
    head_dim=80,
    qk_rope_head_dim=16,
    q_lora_rank=72,
    o_groups=3,
    o_lora_rank=40,
    sliding_window=8,
    index_n_heads=48,
    index_head_dim=64,
    index_topk=7,
    n_routed_experts=9,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=256),
)
LAYER1 = COMMON | dict(  # no layer is window only, as in Pro; twice as many picks; two picks of more experts
    compress_ratios=[128, 128, 4, 128, 4, 0],
    num_hidden_layers=5,
    num_hash_layers=3,
    hidden_size=160,
    moe_intermediate_size=96,
    num_attention_heads=6,
    head_dim=80,
    qk_rope_head_dim=24,
    q_lora_rank=56,
    o_groups=3,
    o_lora_rank=48,
    sliding_window=8,
    index_n_heads=36,
    index_head_dim=32,
    index_topk=12,
    n_routed_experts=9,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    rope_theta=20000,
    compress_rope_theta=40000,
    rope_scaling=dict(type="yarn", factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=1024),
)
RANKS = COMMON | dict(  # sizes that 2 and 4 ranks can share, each rank with whole blocks of FP8; a last shard not full
    vocab_size=331,
    compress_ratios=[128, 4, 128, 0],
    num_hidden_layers=3,
    num_hash_layers=1,
    hidden_size=160,
    moe_intermediate_size=256,
    num_attention_heads=32,
    head_dim=80,
    qk_rope_head_dim=24,
    q_lora_rank=72,
    o_groups=16,
    o_lora_rank=96,
    sliding_window=8,
    index_n_heads=36,
    index_head_dim=64,
    index_topk=7,
    n_routed_experts=20,
    num_experts_per_tok=3,
    routed_scaling_factor=1.5,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=256),
)
PROFILES = {"default": DEFAULT, "layer1": LAYER1, "ranks": RANKS}
NAMES = (*PROFILES, *GQA_PROFILES)
SHARD_BYTES = 200_000

Draw = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


def normal(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=g)


def spread(shape: tuple[int, int], g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """½, 1 or 2 for each block of rows × columns, so that neighbouring scales differ: [shape]."""
    blocks = 2.0 ** torch.randint(-1, 2, (-(-shape[0] // rows), -(-shape[1] // columns)), generator=g)
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def matrix(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Outputs of size 1 for inputs of size 1; FP8 scales differ."""
    return normal(shape, g) * shape[-1] ** -0.5 * spread(shape, g, 128, 128)


def expert(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """As `matrix`, with MXFP4 scales that differ: one for 32 numbers of a row."""
    return normal(shape, g) * shape[-1] ** -0.5 * spread(shape, g, 1, 32)


def sinks(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """From −8 to 8, in an order of each layer's own; most of them low, so that most heads attend to something."""
    return (16 * torch.linspace(0, 1, shape[0]) ** 2 - 8)[torch.randperm(shape[0], generator=g)]


def router(shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    """Logits with a part that all experts share: for some tokens every logit is below −17, where log(1 + exp) is 0."""
    return (9 * normal(shape[1:], g) + 3 * normal(shape, g)) * shape[-1] ** -0.5


RULES: tuple[tuple[str, Draw], ...] = (  # first match of the official name
    (r".*attn_sink", sinks),
    (r".*\.ape", lambda shape, g: 0.7 * normal(shape, g)),
    # heavy-tailed channels
    (r".*indexer\.compressor\.norm\.weight", lambda shape, g: torch.exp(0.8 * normal(shape, g))),
    (r".*norm\.weight", lambda shape, g: 1 + 0.3 * normal(shape, g)),
    (r".*gate\.weight", router),
    (r".*hc_\w+_scale", lambda shape, g: 0.7 + torch.rand(shape, generator=g)),
    (r".*(gate\.bias|hc_\w+_base)", normal),
    (r".*hc_\w+_fn", lambda shape, g: normal(shape, g) * shape[-1] ** -0.5),
    (r".*experts\..*w[13]\.weight", lambda shape, g: 4 * expert(shape, g)),  # activations cross ±10
    (r".*experts\..*w2\.weight", lambda shape, g: expert(shape, g) / 8),
    (r".*", matrix),
)


def telling(name: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """The value fp32 of a tensor of a profile."""
    return next(draw for pattern, draw in RULES if re.fullmatch(pattern, name))(shape, g)


def random_values(config: ModelConfig, seed: int, draw: Callable) -> dict[str, torch.Tensor]:
    """Dense values of every official tensor by name: draw(name, shape, generator), tables random int64."""
    g, values = torch.Generator().manual_seed(seed), {}
    for name, (dtype, shape) in official_tensors(config, dense="F32", experts="F32").items():
        if dtype == "I64":
            k = config.num_experts_per_tok
            values[name] = torch.stack(
                [torch.randperm(config.n_routed_experts, generator=g)[:k] for _ in range(shape[0])]
            )
        else:
            values[name] = draw(name, tuple(shape), g)
    return values


def official_value(
    values: Mapping[str, torch.Tensor], config: ModelConfig, experts: str
) -> Callable[[str], torch.Tensor]:
    """value_of for write_checkpoint: `values` quantised as the official layout stores them, experts in MXFP4 or FP8."""
    target = official_tensors(config, experts=experts)

    def value_of(name: str) -> torch.Tensor:
        base = name.removesuffix(".weight").removesuffix(".scale")
        if f"{base}.scale" not in target:
            return values[name].to(DTYPES[target[name][0]])
        fp8 = target[f"{base}.weight"][0] == "F8_E4M3"
        weight, scale = (
            quantize_fp8(values[f"{base}.weight"], config.weight_block_size)
            if fp8
            else quantize_mxfp4(values[f"{base}.weight"])
        )
        return scale if name.endswith(".scale") else weight if fp8 else weight.view(torch.int8)

    return value_of


def write_values(
    root: Path, raw: Mapping, values: Mapping[str, torch.Tensor], experts: str, max_shard_bytes: int
) -> Path:
    """An official checkpoint of `values`, sharded. Raises WriteError."""
    config = ModelConfig.from_official(raw)
    raw = {**raw, "expert_dtype": {"MXFP4": "fp4", "FP8": "fp8"}[experts]}
    write_checkpoint(
        root,
        official_tensors(config, experts=experts),
        official_value(values, config, experts),
        {"config.json": raw},
        max_shard_bytes=max_shard_bytes,
    )
    return root


def write(root: Path, profile: str = "default", seed: int = 0) -> Path:
    """The checkpoint of a profile. Raises InputError for an unknown one, WriteError."""
    if profile not in NAMES:
        raise InputError(f"profile {profile!r} is unknown; expected one of {', '.join(NAMES)}")
    if profile in GQA_PROFILES:
        return write_gqa(root, profile, seed)
    raw = PROFILES[profile]
    values = random_values(ModelConfig.from_official(raw), seed, telling)
    return write_values(root, raw, values, "MXFP4", SHARD_BYTES)
