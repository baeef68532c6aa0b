"""Peers that come with torch and transformers: torch.topk, cuBLAS, SDPA, transformers' own modules."""

import math

import torch
import torch.nn.functional as F

from dsv4.kernels.quantize import quantize_mxfp4, to_float
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import difference, normal
from scripts.bench.peers import NotInstalled, peer


def index_inputs(f: dict, i: int):
    """bf16 index queries, fp32 head weights and bf16 keys."""
    B, H, D = f["batch"], FLASH.index_n_heads, FLASH.index_head_dim
    weights = normal(3 * i + 1, B, 1, H, dtype=torch.float32).abs() / H
    return normal(3 * i, B, 1, H, D), weights, normal(3 * i + 2, B, f["entries"], D)


def same_values(scores: torch.Tensor, picked: torch.Tensor, k: int) -> tuple[float, float]:
    """Largest difference between the scores picked and the k best; ties may be broken either way. −1 counts as −inf."""
    got = scores.gather(-1, picked.long().clamp(min=0)).masked_fill(picked < 0, float("-inf")).sort(-1).values
    want = scores.topk(k, -1).values.sort(-1).values
    return (got - want).abs().nan_to_num(0.0, posinf=math.inf).max().item(), 0.0


@peer("torch.topk", "topk")
def torch_topk(row, i):
    f = row.facts
    scores = normal(i, f["batch"], f["entries"], dtype=torch.float32)
    return lambda: torch.topk(scores, f["k"], -1, sorted=False)


@peer("torch: bmm + topk", "select_entries")
def torch_select(row, i):
    q, weights, keys = index_inputs(row.facts, i)
    k = row.facts["k"]

    def run():
        dots = torch.matmul(q, keys.unsqueeze(1).transpose(2, 3)).relu_()
        return torch.topk((weights.to(q.dtype).unsqueeze(2) @ dots).squeeze(2).float(), k, -1)

    return run


@peer("transformers scorer", "index_scores")
def transformers_scorer(row, i):
    """DeepseekV4IndexerScorer without its projection of the head weights."""
    q, weights, keys = index_inputs(row.facts, i)

    def run():
        scores = F.relu(torch.matmul(q.float(), keys.transpose(-1, -2).float().unsqueeze(1)))
        return (scores * weights.unsqueeze(-1)).sum(dim=2)

    return run


@peer("cuBLAS bf16", "linear_fp4", "linear_fp8", "linear_bf16")
def cublas(row, i):
    f = row.facts
    x, w = normal(2 * i, f["tokens"], f["width"]), normal(2 * i + 1, f["out"], f["width"])
    return lambda: F.linear(x, w)


@peer("SDPA, gathered rows", "csa_decode", "hca_decode", when=lambda facts: facts["cache"] == "bf16")
def sdpa(row, i):
    """Scaled dot-product attention over rows that were gathered beforehand; the sink is one more key, with no value."""
    f, H, D = row.facts, FLASH.num_attention_heads, FLASH.head_dim
    n = f["window"] + f["entries"]
    padded = -(-(n + 1) // 8) * 8
    q, rows = normal(2 * i, f["batch"], 1, H, D), normal(2 * i + 1, f["batch"], 1, padded, D)
    rows[:, :, n:] = 0
    bias = torch.zeros(f["batch"], 1, H, padded, device="cuda", dtype=q.dtype)
    bias[..., n + 1 :] = float("-inf")
    return lambda: F.scaled_dot_product_attention(q, rows, rows, bias, scale=D**-0.5)


def hyper_connection():
    try:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4HyperConnection
    except ImportError as missing:
        raise NotInstalled(f"transformers ({missing})") from missing
    with torch.device("cuda"):
        module = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=FLASH.hidden_size, hc_mult=FLASH.hc_mult))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module.requires_grad_(False)


@peer("transformers", "mhc_pre_norm", "mhc_post_pre_norm")
def transformers_mhc(row, i):
    """DeepseekV4HyperConnection and the norm after it; for post, what its decoder layer does before."""
    module, T, d, n = hyper_connection(), row.facts["tokens"], FLASH.hidden_size, FLASH.hc_mult
    streams, out = normal(2 * i, 1, T, n, d), normal(2 * i + 1, 1, T, d)
    weight = torch.ones(d, device="cuda", dtype=torch.bfloat16)
    post, comb = torch.rand(1, T, n, device="cuda"), torch.softmax(torch.randn(1, T, n, n, device="cuda"), -1)
    merge = row.op == "mhc_post_pre_norm"

    def run():
        h = streams
        if merge:
            h = post.to(h.dtype).unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.to(h.dtype).transpose(-1, -2), h)
        p, c, x = module(h)
        return h, F.rms_norm(x, (d,), weight, 1e-6), p, c

    return run


def fp4_matrix(out: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales of an MXFP4 matrix of normal values."""
    return quantize_mxfp4(normal(seed, out, width, dtype=torch.float32) * width**-0.5)


def against_linear(run, x: torch.Tensor, w, tolerance: float = 1e-2):
    return lambda: (difference(run(), F.linear(x.float(), to_float(w))), tolerance)
