"""The demo model: every part of the architecture, small enough to ship."""

import math

import torch
from torch import nn

from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.expected import official_tensors
from dsv4.model.config import ModelConfig
from dsv4.model.deepseek_v4 import Model
from dsv4.model.linear import Matrix, Storage
from dsv4.model.numerics import Numerics

CONFIG = dict(
    architectures=["DeepseekV4ForCausalLM"],
    model_type="deepseek_v4",
    torch_dtype="bfloat16",
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=128,
    o_groups=4,
    o_lora_rank=64,
    sliding_window=64,
    index_n_heads=8,
    index_head_dim=64,
    index_topk=64,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    moe_intermediate_size=160,
    routed_scaling_factor=1.5,
    compress_ratios=[0, 4, 4, 128, 4, 128, 4, 0, 0],
    num_hash_layers=2,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    hidden_act="silu",
    rope_theta=10000,
    compress_rope_theta=160000,
    max_position_embeddings=131072,
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096),
    num_nextn_predict_layers=1,
    tie_word_embeddings=False,
    attention_bias=False,
    bos_token_id=0,
    eos_token_id=1,
    expert_dtype="fp4",
    quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]
    ),
)
# the ablation: every layer a window; wider experts make up for what compressors and indexers weigh
WINDOW_ONLY = CONFIG | dict(compress_ratios=[0] * len(CONFIG["compress_ratios"]), moe_intermediate_size=168)
BF16 = Numerics("training", torch.bfloat16, torch.bfloat16, simulate=False, dense=True)
QAT = Numerics("training qat", torch.bfloat16, torch.bfloat16, simulate=True, dense=True)
FP32 = Numerics("training fp32", torch.float32, torch.float32, simulate=False, dense=True)


def build(raw: dict, numerics: Numerics, device: str) -> Model:
    """The model on the `training` backend with fp32 parameters that want gradients, not yet initialised."""
    config = ModelConfig.from_official(raw)
    with torch.device("meta"):
        model = Model(config, numerics, "training", lambda name: Storage(), mtp=True)
    model.to_empty(device=device)
    model.device = torch.device(device)
    forms = shipped_forms(model)
    for name, module in model.named_modules():
        if isinstance(module, Matrix):
            module.simulate = numerics.simulate and forms[f"{name}.weight"] is not WeightFormat.DENSE
    for name, parameter in model.named_parameters():
        # balance moves the bias
        parameter.requires_grad_(parameter.is_floating_point() and not name.endswith("gate.bias"))
    return model


def shipped_forms(model: Model) -> dict[str, WeightFormat]:
    """Parameter name → format in which the official layout stores it."""
    official = official_tensors(model.config)
    forms = {}
    for name, _ in model.named_parameters():
        base = name.removesuffix(".weight")
        if base.endswith((".w13", "experts.w2")) and ".experts." in base:
            forms[name] = WeightFormat.MXFP4
        else:
            forms[name] = WeightFormat.FP8 if official.get(name, ("",))[0] == "F8_E4M3" else WeightFormat.DENSE
    return forms


@torch.no_grad()
def initialise(model: Model, seed: int) -> None:
    """Random maps of unit gain; hyper-connections near n separate residual streams, read in turns.

    With equal streams and equal weights the streams would stay equal for ever: each sublayer reads mostly one of them,
    and writes to each with a different weight.
    """
    g = torch.Generator().manual_seed(seed)
    normal = lambda p, std: p.copy_(torch.randn(p.shape, generator=g) * std)
    config, n = model.config, model.config.hc_mult
    depth = (2 * config.num_hidden_layers) ** -0.5
    for name, p in model.named_parameters():
        match name.rsplit(".", 1)[-1]:
            case "tid2eid":
                p.copy_(_hash_table(config, g))
            case "weight" if p.dim() == 1:
                p.fill_(1.0)
            case "weight" if name in ("embed.weight", "head.weight"):
                normal(p, 1.0 if name == "embed.weight" else p.shape[-1] ** -0.5)
            case "weight":
                normal(p, p.shape[-1] ** -0.5 * (depth if name.endswith(("wo_b.weight", "w2.weight")) else 1.0))
            case "ape":
                normal(p, 0.02)
            case "bias" | "attn_sink":
                p.zero_()
            case "fn":
                normal(p, 0.3 * p.shape[-1] ** -0.5)
            case "scale":
                p.fill_(0.3)
            case "base":
                pass
    for index, module in enumerate(m for m in model.modules() if hasattr(m, "fn") and hasattr(m, "base")):
        _base(module.base, n, index, g)


def _base(base: nn.Parameter, n: int, index: int, g: torch.Generator) -> None:
    """Static part of a hyper-connection: read stream `index` mod n most, write to all, keep the streams apart."""
    read = torch.full((n,), -1.5)
    read[index % n] = 1.5
    if base.numel() == n:  # the head reads them all alike
        base.copy_(torch.full((n,), -math.log(n - 1)))
        return
    keep = torch.eye(n) * 4.0
    base.copy_(torch.cat((read, 0.5 * torch.randn(n, generator=g), keep.flatten())))


def _hash_table(config: ModelConfig, g: torch.Generator) -> torch.Tensor:
    """k distinct experts a token, every expert equally often."""
    E, k = config.n_routed_experts, config.num_experts_per_tok
    first = torch.arange(config.vocab_size) % E
    first = first[torch.randperm(config.vocab_size, generator=g)]
    steps = 1 + torch.argsort(torch.rand(config.vocab_size, E - 1, generator=g), 1)[:, : k - 1]
    return torch.cat((first[:, None], (first[:, None] + steps) % E), 1)
