"""torch's and vLLM's kernels for `rms_norm`, `silu_mul`, `hadamard` and `grouped_attention`."""

import torch
import torch.nn.functional as F

from dsv4.probes.kernel_audit.adapters import Adapter, as_it_is
from dsv4.probes.kernel_audit.adapters.installed import at_least, library

WIDEST = 1 << 15  # of the Hadamard transform


def torch_norm(device: str):
    """torch.nn.functional.rms_norm(x, (D,), weight, eps)."""

    def prepare(x, weight, eps):
        return lambda: F.rms_norm(x, (x.shape[-1],), weight, eps), as_it_is

    return prepare


def vllm_norm(device: str):
    """rms_norm(out, x, weight, eps); ones where there is no weight."""
    at_least(8)
    op = library("_C_stable_libtorch", "_C").rms_norm

    def prepare(x, weight, eps):
        x = x.contiguous()
        weight = x.new_ones(x.shape[-1]) if weight is None else weight.contiguous()

        def run():
            out = torch.empty_like(x)
            if x.numel():
                op(out, x, weight, eps)
            return out

        return run, as_it_is

    return prepare


def no_biases(case) -> str | None:
    """vLLM's takes gates and ups alone."""
    return None if case.arguments[2] is None else "it takes no biases"


def vllm_silu_mul(device: str):
    """silu_and_mul(out [N, I], gate ‖ up [N, 2I])."""
    at_least(8)
    op = library("_C_stable_libtorch", "_C").silu_and_mul

    def prepare(gate, up, biases):
        both = torch.cat((gate, up), -1)

        def run():
            out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
            if gate.numel():
                op(out, both)
            return out

        return run, as_it_is

    return prepare


def halves(case) -> str | None:
    """Hadacore takes bf16 rows of 2 to 32768 numbers, a power of two."""
    x = case.arguments[0]
    if x.dtype is not torch.bfloat16:
        return "it takes bf16"
    D = x.shape[-1]
    return None if 2 <= D <= WIDEST and D & (D - 1) == 0 else f"it takes powers of two up to {WIDEST}, not {D}"


def hadacore(device: str):
    """hadacore_transform(x [rows, D], True) of a copy."""
    at_least(8)
    op = library("_C_stable_libtorch", "_C").hadacore_transform

    def prepare(x):
        rows = x.reshape(-1, x.shape[-1])

        def run():
            copy = rows.clone(memory_format=torch.contiguous_format)
            return op(copy, True) if len(rows) else copy

        return run, lambda out: out.view(x.shape)

    return prepare


def visible_keys(slots: int, start: torch.Tensor, T: int, window: int | None) -> torch.Tensor:
    """bool [B, 1, T, slots]: keys up to the query's own position, of a window if there is one."""
    own = (start.unsqueeze(1) + torch.arange(T, device=start.device)).view(len(start), 1, T, 1)
    slot = torch.arange(slots, device=start.device)
    seen = slot <= own
    return seen if window is None else seen & (slot > own - window)


def sdpa(device: str):
    """scaled_dot_product_attention(q [B, H, T, D], keys, values, mask, enable_gqa=True)."""

    def prepare(q, keys, values, start, window, scale, termination=None):
        longest = int((start + q.shape[1]).amax()) if len(start) else 0  # a server knows it on the host
        more = dict(attn_mask=visible_keys(longest, start, q.shape[1], window), scale=scale, enable_gqa=True)
        fixed = q.transpose(1, 2), keys[:, :, :longest], values[:, :, :longest]
        if not q.numel():
            return lambda: torch.empty_like(q), as_it_is
        run = lambda: F.scaled_dot_product_attention(*fixed, **more)
        return run, lambda out: out.transpose(1, 2).contiguous()

    return prepare


VLLM = "vllm 0.33.0 torch.ops._C."
ADAPTERS = (
    Adapter("torch", "rms_norm", "torch.nn.functional.rms_norm", torch_norm),
    Adapter("vllm", "rms_norm", f"{VLLM}rms_norm", vllm_norm, differs="no rows are answered by the adapter"),
    Adapter(
        *("vllm", "silu_mul", f"{VLLM}silu_and_mul", vllm_silu_mul, no_biases),
        differs="gate and up are one tensor, which is not timed; silu(gate) is rounded before the product",
    ),
    Adapter(
        *("vllm", "hadamard", f"{VLLM}hadacore_transform", hadacore, halves),
        accuracy="bf16-between-factors",
        differs="it writes in place: the copy before it is timed",
    ),
    Adapter(
        *("torch", "grouped_attention", "torch scaled_dot_product_attention", sdpa),
        differs="a mask hides keys, which are read all the same: those behind a row's end must be finite",
    ),
)
