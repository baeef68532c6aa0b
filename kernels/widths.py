"""Widths of models by name, for contracts: what a kernel sees of a config. Fields are named as in
`dsv4.model.config`."""

from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Widths:
    """Widths of one model, in numbers of heads, dims, experts.

    num_key_value_heads: of a GQA model, which has none of the widths that are 0. Of a DeepSeek-V4 model it is 0, and
    operations of GQA models have as many heads as it, KV heads for an eighth of them, and heads of its index keys.
    """

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int = 0
    q_lora_rank: int = 0
    o_groups: int = 0
    o_lora_rank: int = 0
    sliding_window: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    routed_scaling_factor: float = 1.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    swiglu_limit: float = 10.0
    num_key_value_heads: int = 0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Those of a `ModelConfig` or a `GQAConfig`, whose MLP counts as an expert."""
        found = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        return cls(**{"moe_intermediate_size": getattr(config, "intermediate_size", 0), **found})


SMALL = Widths(256, 4, 128, 64, 128, 2, 64, 32, 4, 64, 32, 8, 2, 128, 1.5)
FLASH = Widths(4096, 64, 512, 64, 1024, 8, 1024, 128, 64, 128, 512, 256, 6, 2048, 1.5)
PRO = Widths(7168, 128, 512, 64, 1536, 16, 1024, 128, 64, 128, 1024, 384, 6, 3072, 2.5)
QWEN = Widths(3584, 28, 128, moe_intermediate_size=18944, num_key_value_heads=4)  # Qwen2.5-7B
LLAMA = Widths(4096, 32, 128, moe_intermediate_size=14336, num_key_value_heads=8)  # Llama-3.1-8B
VOCABULARY = 129280  # of Flash and Pro
WIDTHS = {"small": SMALL, "flash": FLASH, "pro": PRO}
