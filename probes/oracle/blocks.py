"""Hyper-connections, the router, the experts and a whole block (§3), in float64. S streams of d dims."""

import torch

from dsv4.probes.oracle.attention import Layer, attention_layer, rms
from dsv4.probes.oracle.config import OracleConfig


def mixes(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """streams [B, T, S, d] flattened to x, fn [M, S·d] → (fn · x) · rsqrt(mean(x²) + eps) [B, T, M] (§3, mHC 1)."""
    x = streams.flatten(2)
    return x @ fn.T / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def sinkhorn(C: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """C [..., S, S] → nearly doubly stochastic (§3, mHC 3). Rows: sums over the last axis; ends on a column step."""
    C = torch.softmax(C, -1) + eps
    C = C / (C.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(-1, keepdim=True) + eps)
        C = C / (C.sum(-2, keepdim=True) + eps)
    return C


def hyper_pre(layer: Layer, streams: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams [B, T, S, d] → sublayer input [B, T, d], post [B, T, S], C [B, T, S, S] (§3, mHC 1–4). name: hc_attn,
    hc_ffn."""
    c, S = layer.config, layer.config.hc_mult
    m = mixes(streams, layer.w(f"{name}_fn"), c.rms_norm_eps)
    scale, base = layer.w(f"{name}_scale"), layer.w(f"{name}_base")
    pre = torch.sigmoid(m[..., :S] * scale[0] + base[:S]) + c.hc_eps
    post = 2 * torch.sigmoid(m[..., S : 2 * S] * scale[1] + base[S : 2 * S])
    C = (m[..., 2 * S :] * scale[2] + base[2 * S :]).unflatten(-1, (S, S))
    y = (pre.unsqueeze(-1) * streams).sum(2)
    return y, post, sinkhorn(C, c.hc_sinkhorn_iters, c.hc_eps)


def hyper_post(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """h'[k] = post[k] · out + Σ_j C[j, k] · h[j] (§3, mHC 5): out [B, T, d] → streams [B, T, S, d]."""
    return torch.stack(
        [post[..., k, None] * out + (C[..., :, k, None] * streams).sum(2) for k in range(post.shape[-1])], 2
    )


def router(layer: Layer, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, d], ids int64 [B, T] → experts int64 [B, T, k] and their weights [B, T, k] (§3, MoE).

    The bias takes part in the choice only; hash layers choose by token id. Equal scores: the lowest expert first.
    """
    c = layer.config
    z = layer.linear("ffn.gate", x, quantise=False)
    scores = torch.sqrt(torch.log1p(torch.exp(-z.abs())) + z.clamp(min=0))  # √softplus, without overflow
    if layer.hashed:
        experts = layer.w("ffn.gate.tid2eid")[ids]
    else:
        order = torch.sort(scores + layer.w("ffn.gate.bias"), dim=-1, descending=True, stable=True).indices
        experts = order[..., : c.num_experts_per_tok]
    picked = scores.gather(-1, experts)
    return experts, picked / picked.sum(-1, keepdim=True) * c.routed_scaling_factor


def expert(layer: Layer, base: str, x: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    """x [N, d], weight [N, 1] or 1 → w2 (weight · silu(min(w1 x, L)) · clamp(w3 x, ±L)) [N, d] (§3, MoE)."""
    limit = layer.config.swiglu_limit
    g = layer.linear(f"{base}.w1", x).clamp(max=limit)
    u = layer.linear(f"{base}.w3", x).clamp(-limit, limit)
    return layer.linear(f"{base}.w2", g * torch.sigmoid(g) * u * weight)


def moe(layer: Layer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x [B, T, d] → the shared expert and each token's routed experts, summed [B, T, d] (§3, MoE)."""
    experts, weights = router(layer, x, ids)
    out = expert(layer, "ffn.shared_experts", x, 1.0)
    for e in experts.unique().tolist():
        row, token, slot = torch.nonzero(experts == e, as_tuple=True)
        out[row, token] += expert(layer, f"ffn.experts.{e}", x[row, token], weights[row, token, slot].unsqueeze(-1))
    return out


def block(layer: Layer, streams: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """streams [B, T, S, d], ids int64 [B, T] → every point of the layer; 'streams' are those after it."""
    c = layer.config
    y, post, C = hyper_pre(layer, streams, "hc_attn")
    found = attention_layer(layer, rms(y, layer.w("attn_norm.weight"), c.rms_norm_eps))
    streams = hyper_post(found["attn_out"], streams, post, C)
    y, post, C = hyper_pre(layer, streams, "hc_ffn")
    found["ffn_out"] = moe(layer, rms(y, layer.w("ffn_norm.weight"), c.rms_norm_eps), ids)
    return found | {"streams": hyper_post(found["ffn_out"], streams, post, C)}


def collapse(config: OracleConfig, streams: torch.Tensor, fn, base, scale) -> torch.Tensor:
    """hc_head (§3, Head): streams [B, T, S, d] → Σ_j pre[j] · h[j] [B, T, d]; neither post nor Sinkhorn."""
    pre = torch.sigmoid(mixes(streams, fn, config.rms_norm_eps) * scale + base) + config.hc_eps
    return (pre.unsqueeze(-1) * streams).sum(2)
