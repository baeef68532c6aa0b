"""Write the demo checkpoint: the real architecture in the official on-disk format, with RANDOM weights.

Every part of the model is in play (window, CSA and HCA layers, hash and scored routing, mHC, sinks, YaRN, MTP; FP8
matrices, MXFP4 experts, shards with an index), so that the demo shows the whole path from file to token. The text it
generates is noise: nothing was trained.

    python scripts/write_demo_checkpoint.py DIRECTORY [--seed 0]
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4.chat import ASSISTANT, BOS, END_THINK, EOS, THINK, USER
from dsv4.config import ModelConfig
from kernels.errors import Dsv4Error
from kernels.quantize import quantize_fp8, quantize_mxfp4
from loaders.expected import official_tensors
from loaders.files import DTYPES
from loaders.write import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
CONFIG = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", torch_dtype="bfloat16", vocab_size=2048, hidden_size=256,
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=1, head_dim=128, qk_rope_head_dim=64, q_lora_rank=128,
    o_groups=4, o_lora_rank=64, sliding_window=64, index_n_heads=16, index_head_dim=64, index_topk=64, n_routed_experts=16,
    num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=192, routed_scaling_factor=1.5,
    compress_ratios=[0, 0, 4, 128, 4, 128, 4, 0, 0], num_hash_layers=2, swiglu_limit=10.0, hc_mult=4, hc_sinkhorn_iters=20,
    hc_eps=1e-6, rms_norm_eps=1e-6, scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True, hidden_act="silu",
    rope_theta=10000, compress_rope_theta=160000, max_position_embeddings=131072,
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=8192),
    num_nextn_predict_layers=1, tie_word_embeddings=False, attention_bias=False, bos_token_id=0, eos_token_id=1, expert_dtype="fp4",
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]),
)


def random_tensor(name: str, dtype: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Values of a sensible scale: unit-variance maps, norms near 1, and no parameter left at zero."""
    if name.endswith("tid2eid"):
        return torch.stack([torch.randperm(CONFIG["n_routed_experts"], generator=g)[:shape[1]] for _ in range(shape[0])])
    if name.endswith("norm.weight"):
        return 1 + 0.1 * torch.randn(shape, generator=g)
    return torch.randn(shape, generator=g) * (shape[-1] ** -0.5 if len(shape) > 1 and not name.endswith(".ape") else 0.5)


def value_of(planned: dict, seed: int):
    """Function from tensor name to stored value; the seed of each matrix comes from its name's place in the list."""
    place = {name: i for i, name in enumerate(planned)}

    def value(name: str) -> torch.Tensor:
        base = name.removesuffix(".scale").removesuffix(".weight")
        weight = f"{base}.weight" if f"{base}.scale" in planned else name
        dtype, shape = planned[weight]
        logical = (shape[0], 2 * shape[1]) if dtype == "I8" else shape
        dense = random_tensor(weight, dtype, logical, torch.Generator().manual_seed(seed * 1_000_003 + place[weight]))
        if f"{base}.scale" not in planned:
            return dense.to(DTYPES[dtype])
        codes, scale = quantize_mxfp4(dense) if dtype == "I8" else quantize_fp8(dense)
        return scale if name.endswith(".scale") else codes.view(torch.int8) if dtype == "I8" else codes
    return value


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE over this repository's own text, with DeepSeek's control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [BOS, EOS, USER, ASSISTANT, THINK, END_THINK]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[AddedToken(t, special=True) for t in control],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    files = sorted(f for folder in (".", "dsv4", "kernels", "loaders") for f in (ROOT / folder).glob("*") if f.suffix in (".py", ".md"))
    tokenizer.train_from_iterator((f.read_text(encoding="utf-8") for f in files), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = ModelConfig.from_official(CONFIG)
    planned = official_tensors(config)
    documents = {"config.json": CONFIG, "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
                 "tokenizer.json": json.loads(train_tokenizer(config.vocab_size).to_str())}
    try:
        write_checkpoint(args.directory, planned, value_of(planned, args.seed), documents, max_shard_bytes=4 << 20)
    except Dsv4Error as error:
        sys.exit(f"error: {error}")
    size = sum(f.stat().st_size for f in args.directory.iterdir())
    print(f"wrote {args.directory}: {len(planned)} tensors, {size / 2**20:.1f} MiB. The weights are RANDOM: it generates noise.")


if __name__ == "__main__":
    main()
