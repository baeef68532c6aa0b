"""Grouped-query attention on the GPU: a few queries a row use splits of the keys (decode), many queries use tiles of
queries (prefill)."""

import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.grouped_attention import reference
from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.kernels.grouped_attention.triton_decode import FEW, attend_queries, check
from dsv4.kernels.grouped_attention.triton_prefill import prefill
from dsv4.kernels.grouped_attention.triton_tiles import LOG2E
from dsv4.kernels.launch import capability, dependent_launch, dot_in_fp32, next_power


def grouped_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: torch.Tensor,
    window: int | None,
    scale: float,
    termination: Termination | None = None,
):
    """Computes what the reference does, for contiguous keys and values of bf16 or fp32, head_dim ≤ 256, up to 64 query
    heads a KV head.

    Up to 16 tokens a row are decoded: their number changes no token's bits, and termination is available. More tokens
    with termination, and other inputs, raise UnsupportedInput.
    """
    T = q.shape[1]
    if T <= FEW:
        return attend_queries("grouped_attention", q, keys, values, None, start, window, scale, 1, termination)
    if termination is not None:
        raise UnsupportedInput(
            f"grouped_attention terminates for up to {FEW} tokens a row, not {T}; prefill is dense and exact"
        )
    check("grouped_attention", q, keys, values, start, None, window)
    q = q if q.stride(-1) == 1 else q.contiguous()
    (B, T, H, D), (KV, S) = q.shape, keys.shape[1:3]
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    fp32, width, dependent = any(dot_in_fp32(t) for t in (q, keys)), max(16, next_power(D)), dependent_launch(q.device)
    queries, held, warps, stages = prefill_shape(width, fp32, capability(q.device))
    prefill[(H, -(-T // queries), B)](
        q,
        keys,
        values,
        start,
        out,
        scale * LOG2E,
        window or 0,
        T,
        S,
        H,
        *q.stride()[:3],
        H // KV,
        D,
        width,
        queries,
        held,
        window is not None,
        fp32,
        stages,
        dependent,
        num_warps=warps,
        launch_pdl=dependent,
    )
    return out


grouped_attention.__doc__ = f"{reference.grouped_attention.__doc__}\n\n    On a GPU: {grouped_attention.__doc__}"


def prefill_shape(width: int, fp32: bool, capability: tuple[int, int]) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a tile."""
    if fp32:
        return 32, 32, 8, 1
    if capability[0] in (9, 10):
        return (128, 128, 8, 2) if width <= 128 else (128, 64, 8, 2)
    return (64, 64 if width <= 128 else 32, 4, 2)
