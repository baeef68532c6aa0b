"""Rotary position embedding as in Llama (dims i and i + D/2 are a pair), and the write to the cache."""

import torch


def rotate_halves(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """x [N, heads, D], cis complex64 [N, D/2] → fp32 [N, heads, D]: (x_i, x_{i+D/2}) is rotated by cis_i."""
    cos, sin = cis.real.unsqueeze(1), cis.imag.unsqueeze(1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotary_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    cis: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    """Add biases, rotate queries and keys, and store keys and values at the positions of the step.

    q [N, H·D], k and v [N, KV·D] with N = B·T; biases [H·D], [KV·D], [KV·D] or None; cis complex64 [N, D/2]; keys,
    values [B, KV, S, D], of which rows start[b] … start[b] + T − 1 (start int64 [B]) are written in their own dtype.
    fp32 inside, one cast. Returns the rotated queries [B, T, H, D] in q.dtype.
    """
    B, KV, S, D = keys.shape
    N, T, dtype = q.shape[0], q.shape[0] // B, q.dtype
    if biases is not None:
        q, k, v = (x.float() + bias for x, bias in zip((q, k, v), biases))
    position = start.unsqueeze(1) + torch.arange(T, device=start.device)  # [B, T]
    # of the cache [B·KV·S, D]
    rows = torch.arange(B * KV, device=start.device).view(B, KV, 1) * S + position.unsqueeze(1)
    for cache, fresh in ((keys, rotate_halves(k.view(N, KV, D), cis)), (values, v.view(N, KV, D))):
        fresh = fresh.view(B, T, KV, D).transpose(1, 2).reshape(-1, D)
        cache.view(-1, D).index_copy_(0, rows.flatten(), fresh.to(cache.dtype))
    return rotate_halves(q.view(N, -1, D), cis).to(dtype).view(B, T, -1, D)
