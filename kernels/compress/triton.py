"""Gated pooling on a GPU: one pass over the slots with a running softmax per channel."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.compress import reference
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, require_device

CHANNELS = 128  # of a program


def gated_pool(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    require_device("gated_pool", kv, gate)
    if kv.shape != gate.shape or kv.dtype is not torch.float32 or gate.dtype is not torch.float32:
        raise UnsupportedInput(
            f"gated_pool: kv {kv.dtype} {tuple(kv.shape)} and gate {gate.dtype} {tuple(gate.shape)}; "
            "expected fp32 of one shape [M, S, D]"
        )
    M, S, D = kv.shape
    pooled = torch.empty(M, D, dtype=torch.float32, device=kv.device)
    if not pooled.numel():
        return pooled
    if not S:
        return pooled.zero_()
    (slots, warps), pdl = (8, 1) if S <= 8 else (32, 4), dependent_launch(kv.device)
    _gated_pool[(M, triton.cdiv(D, CHANNELS))](
        kv, gate, pooled, *kv.stride(), *gate.stride(), S, D, slots, CHANNELS, pdl, num_warps=warps, launch_pdl=pdl
    )
    return pooled


gated_pool.__doc__ = reference.gated_pool.__doc__


@triton.jit
def pool_slots(top, total, pooled, kv, gate):
    """A tile of slots, kv and gate fp32 [SLOTS, B], into the running softmax (top, total, pooled fp32 [B]).

    A gate of −inf contributes nothing; `top` is −inf until a channel has another gate.
    """
    # (torch.softmax(gate, 1) * kv).sum(1)
    new = tl.maximum(top, tl.max(gate, 0))
    base = tl.where(new == float("-inf"), 0.0, new)  # −inf − −inf is NaN
    weight, scale = tl.exp(gate - base[None, :]), tl.exp(top - base)
    return new, total * scale + tl.sum(weight, 0), pooled * scale + tl.sum(weight * kv, 0)


@triton.jit
def _gated_pool(
    KV,
    GATE,
    Y,
    kv_window,
    kv_slot,
    kv_channel,
    gate_window,
    gate_slot,
    gate_channel,
    S: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    window, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    top = tl.full((B,), float("-inf"), tl.float32)
    total, pooled = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for start in range(0, S, SLOTS):
        s = start + tl.arange(0, SLOTS)
        live = (s[:, None] < S) & (c[None, :] < D)
        kv = tl.load(KV + window * kv_window + s[:, None] * kv_slot + c[None, :] * kv_channel, mask=live, other=0.0)
        gate = tl.load(
            GATE + window * gate_window + s[:, None] * gate_slot + c[None, :] * gate_channel,
            mask=live,
            other=float("-inf"),
        )
        top, total, pooled = pool_slots(top, total, pooled, kv, gate)
    tl.store(Y + window * D + c, pooled / total, mask=c < D)
