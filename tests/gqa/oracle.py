"""transformers' GQA models as oracles: nobody here wrote them. fp32, eager attention, every parameter random."""

import copy
import json
from pathlib import Path

import torch

TINY = dict(
    vocab_size=384,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
)

# Original contexts of 64 tokens: texts of 310 lie far beyond them.
CONFIGS = {
    "qwen2, bias and tied head": dict(
        TINY,
        model_type="qwen2",
        tie_word_embeddings=True,
        rope_theta=1e6,
        use_sliding_window=False,
        sliding_window=32,
        max_window_layers=2,
    ),
    "llama, llama3 rope and biases": dict(
        TINY,
        model_type="llama",
        head_dim=16,
        rope_theta=100.0,
        attention_bias=True,
        mlp_bias=True,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "qwen2, yarn and some sliding layers": dict(
        TINY,
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=1,
        max_position_embeddings=64,
        hidden_size=96,
        rope_theta=100.0,
        rope_scaling=dict(type="yarn", factor=8.0, original_max_position_embeddings=64),
    ),
    "mistral, sliding window": dict(
        TINY,
        model_type="mistral",
        head_dim=12,
        num_attention_heads=4,
        num_key_value_heads=1,
        rope_theta=1e4,
        sliding_window=24,
    ),
    "llama, linear rope": dict(
        TINY,
        model_type="llama",
        num_key_value_heads=6,
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=2e4),
    ),
    "qwen3, tied head": dict(
        TINY,
        model_type="qwen3",
        head_dim=16,
        rope_theta=1e6,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=3,
    ),
    "qwen3, biases, yarn and some sliding layers": dict(
        TINY,
        model_type="qwen3",
        head_dim=12,
        rope_theta=100.0,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=1,
        max_position_embeddings=64,
        rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64),
    ),
}


def brief(config: dict) -> dict:
    """`config` with fewer layers, words and hidden units, for Triton's interpreter: heads and their groups, windows and
    rope stay."""
    return config | dict(num_hidden_layers=2, vocab_size=96, intermediate_size=48)


def randomised(config: dict, seed: int = 0):
    """The transformers model of `config`, fp32, eager attention, with every parameter random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    # it changes what it is given
    made = AutoConfig.for_model(**copy.deepcopy(config), attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("norm.weight"):
                p.normal_(1.0, 0.3)
            elif key.endswith("bias"):
                p.normal_(0.0, 0.5)
            else:
                p.normal_(0.0, (1.0 if "embed" in key else 1.6) * p.shape[-1] ** -0.5)
            if "embed" in key:
                p.mul_(p.shape[-1] ** 0.5 * 0.5)
    return model


def save(model, config: dict, folder: Path, dtype: torch.dtype = torch.float32, **save_file_options) -> Path:
    """Write the model as transformers lays it out, with `config` as it was given: `save_pretrained` would rewrite the
    rope keys."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: p.detach().to(dtype).contiguous() for k, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
    return folder


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits
