"""Grouped-query attention in fp64, honest kernels of each accuracy class, and the inputs of its contracts."""

import math
from functools import partial

import torch

FAMILIES = ("random", "small rows", "pointed", "cancellation", "below every mask", "coded heads", "large logits")


def seen_by(start, T: int, place, window) -> torch.Tensor:
    """bool [B, T, …]: whether a query at start + t sees the token at `place` int64 [B or 1, T or 1, …]."""
    position = (start.unsqueeze(1) + torch.arange(T)).view(-1, T, *(1,) * (place.dim() - 2))
    seen = (place >= 0) & (place <= position)
    return seen if window is None else seen & (place > position - window)


def attend(q, keys, values, seen, scale: float) -> torch.Tensor:
    """fp64, one KV head after another: q [B, T, H, D]; keys, values [B, T or 1, KV, K, D]; seen [B, T, KV or 1, K]."""
    KV = keys.shape[2]
    heads, seen, out = q.double().unflatten(2, (KV, -1)), seen.expand(-1, -1, KV, -1), []
    for kv in range(KV):
        logits = scale * (heads[:, :, kv] @ keys[:, :, kv].double().mT)
        logits = logits.masked_fill(~seen[:, :, kv].unsqueeze(2), -math.inf)
        e = (logits - logits.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
        out.append((e / e.sum(-1, keepdim=True).clamp(min=1e-300)) @ values[:, :, kv].double())
    return torch.cat(out, 2)


def honest(q, keys, values, seen, scale: float, narrow: bool = False) -> torch.Tensor:
    """fp32 sums over tiles of 64 keys with a running maximum, one rounding. narrow: probabilities are rounded to bf16
    for the product with values."""
    KV = keys.shape[2]
    heads, out = q.float().unflatten(2, (KV, -1)), 0.0
    top, total = torch.full(heads.shape[:-1], -1e30), torch.zeros(heads.shape[:-1])
    for s in range(0, keys.shape[3], 64):
        k, v, live = (t.narrow(3, s, min(64, keys.shape[3] - s)) for t in (keys, values, seen))
        logits = (heads @ k.float().mT * scale).masked_fill(~live.unsqueeze(3), -math.inf)
        new = torch.maximum(top, logits.amax(-1))
        p, keep = (logits - new.unsqueeze(-1)).exp(), (top - new).exp()
        total = total * keep + p.sum(-1)
        out = out * keep.unsqueeze(-1) + (p.bfloat16().float() if narrow else p) @ v.float()
        top = new
    return (out / total.clamp(min=1e-38).unsqueeze(-1)).flatten(2, 3).to(q.dtype)


CLASSES = {"p-bf16": partial(honest, narrow=True), "fp32": honest}


def dense(compute, q, keys, values, start, window, scale, termination=None) -> torch.Tensor:
    """`compute` over every key up to the query's own position, as `grouped_attention`."""
    B, T, S = *q.shape[:2], keys.shape[2]
    seen = seen_by(start, T, torch.arange(S).view(1, 1, S), window)
    written = (torch.arange(S) < (start + T).unsqueeze(1)).view(B, 1, S, 1)  # what lies behind may be anything
    k, v = (torch.where(written, t, 0).unsqueeze(1) for t in (keys, values))
    return compute(q, k, v, seen.unsqueeze(2), scale)


def listed(compute, q, keys, values, blocks, start, window, scale, block, termination=None) -> torch.Tensor:
    """`compute` over the keys of the listed blocks, as `gather_attention`."""
    B, T, KV = blocks.shape[:3]
    place = torch.where(blocks.unsqueeze(-1) < 0, -1, blocks.long().unsqueeze(-1) * block + torch.arange(block))
    place = place.flatten(-2)
    seen = seen_by(start, T, place, window)
    b, kv = torch.arange(B).view(B, 1, 1, 1), torch.arange(KV).view(KV, 1)
    k, v = (torch.where(seen.unsqueeze(-1), t[b, kv, place.clamp(min=0)], 0) for t in (keys, values))
    return compute(q, k, v, seen, scale)


# ---- inputs -----------------------------------------------------------------------------------


def sizes(w) -> tuple[int, int, int]:
    """Query heads, KV heads and dims of a GQA model, or of one that has about these widths."""
    if w.num_key_value_heads:
        return w.num_attention_heads, w.num_key_value_heads, w.head_dim
    return w.num_attention_heads, max(2, w.num_attention_heads // 8), w.index_head_dim


def cache(family: str, B: int, S: int, w, draw) -> tuple[torch.Tensor, torch.Tensor]:
    """keys and values fp32 [B, KV, S, D]."""
    _, KV, D = sizes(w)
    keys, values = draw.rand(B, KV, S, D), draw.rand(B, KV, S, D)
    if family == "small rows":
        keys, values = 0.1 * keys, 0.1 * values
    if family == "coded heads":  # of one sign: sums that cancel would depend on single roundings
        values = draw.coded(B * KV * S, D).float().abs().view(B, KV, S, D)
        values = values * 2.0 ** (torch.arange(KV) * 3 % 7).view(KV, 1, 1)
    if family == "cancellation":  # 64 tokens of +16, then 64 of −16
        values = values + torch.where(torch.arange(S) // 64 % 2 == 0, 16.0, -16.0).view(S, 1)
    if family == "below every mask":
        keys = 1 + 0.02 * keys
    return keys, values


def queries(family: str, keys, start, T: int, window, w, draw) -> torch.Tensor:
    """fp32 [B, T, H, D]. pointed: at the newest key that a query sees, at the one behind it, at the oldest that it sees
    and at the one before that, which a mask that is off by one would bring in or lose."""
    H, KV, D = sizes(w)
    B, S, scale = len(start), keys.shape[2], D**-0.5
    q = draw.rand(B, T, H, D)
    if family == "cancellation":
        return 0 * q
    if family == "below every mask":
        return torch.full_like(q, -1.2e4 / scale / D)
    if family == "large logits":
        return 30 * q
    if family != "pointed":
        return q
    position = start.unsqueeze(1) + torch.arange(T)
    oldest = torch.zeros_like(position) if window is None else (position - window + 1).clamp(min=0)
    edges = torch.stack((position, position + 1, oldest, oldest - 1)).clamp(0, S - 1)
    at = edges[torch.arange(H) % 4].permute(1, 2, 0)  # [B, T, H]
    head = (torch.arange(H) // (H // KV)).view(1, 1, H)
    row = keys[torch.arange(B).view(B, 1, 1), head, at]
    return row * (math.log(S) / scale / row.square().sum(-1, keepdim=True)) + 0.05 * q
