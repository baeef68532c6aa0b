"""Widths of models by name, for contracts: what a kernel sees of a config. Fields are named as in `dsv4.config`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Widths:
    """Widths of one DeepSeek-V4 model, in numbers of heads, dims, experts."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    swiglu_limit: float = 10.0


SMALL = Widths(256, 4, 128, 64, 128, 2, 64, 32, 4, 64, 32, 8, 2, 128, 1.5)
FLASH = Widths(4096, 64, 512, 64, 1024, 8, 1024, 128, 64, 128, 512, 256, 6, 2048, 1.5)
PRO = Widths(7168, 128, 512, 64, 1536, 16, 1024, 128, 64, 128, 1024, 384, 6, 3072, 2.5)
WIDTHS = {"small": SMALL, "flash": FLASH, "pro": PRO}
