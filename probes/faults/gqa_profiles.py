"""Synthetic GQA checkpoints in which planted faults show: every tensor random and distinct, in the names of
transformers.

Sizes that could be taken for one another differ; heads are as wide as every kernel takes them (powers of two);
rms_norm_eps is as large as it must be for its absence to show; rotary scaling bends within the tested range.
"""

from pathlib import Path

import torch

from dsv4.loaders.files import DTYPES
from dsv4.loaders.write import write_checkpoint
from dsv4.probes.oracle.gqa import tensor_shapes

TINY = dict(
    vocab_size=320,
    num_hidden_layers=3,
    rms_norm_eps=3e-3,
    hidden_act="silu",
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=1,
    torch_dtype="bfloat16",
)
GQA_PROFILES = {  # name → config.json
    "qwen2": TINY
    | dict(
        model_type="qwen2",
        architectures=["Qwen2ForCausalLM"],
        hidden_size=88,
        intermediate_size=152,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1e5,
        use_sliding_window=False,
        tie_word_embeddings=True,
    ),
    "llama3": TINY
    | dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=80,
        intermediate_size=136,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=1e4,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "mistral": TINY
    | dict(
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        hidden_size=72,
        intermediate_size=120,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        rope_theta=1e4,
        sliding_window=24,
        tie_word_embeddings=False,
    ),
    "yarn": TINY
    | dict(
        model_type="qwen2",
        architectures=["Qwen2ForCausalLM"],
        hidden_size=112,
        intermediate_size=104,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        rope_theta=1e4,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    ),
    "qwen3": TINY
    | dict(
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        hidden_size=104,
        intermediate_size=168,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=1e5,
        use_sliding_window=False,
        tie_word_embeddings=False,
        attention_bias=False,
    ),
}


def telling(name: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Norms around 1 with channels of their own, biases of the size of what they are added to, maps of gains near 1.
    Norms of heads are around 1.5: scores then differ as without them, where gains make q and k larger than 1."""
    x = torch.randn(shape, generator=g)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.5 + 0.45 * x
    if name.endswith("norm.weight"):
        return 1 + 0.3 * x
    if name.endswith("bias"):
        return 0.7 * x
    return x * (0.4 if "embed" in name else 1.4 * shape[-1] ** -0.5)


def write_gqa(root: Path, profile: str, seed: int = 0) -> Path:
    """The checkpoint of a profile, in bf16. Raises WriteError."""
    raw, g = GQA_PROFILES[profile], torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(raw)
    values = {name: telling(name, shape, g) for name, shape in shapes.items()}
    write_checkpoint(
        root,
        {name: ("BF16", shape) for name, shape in shapes.items()},
        lambda name: values[name].to(DTYPES["BF16"]),
        {"config.json": raw},
        max_shard_bytes=100_000,
    )
    return root
