"""Compressors on a GPU: rows into their ring, and windows of rows into entries, one kernel each."""

import torch
import triton
import triton.language as tl

from kernels.compress.triton import pool_slots
from kernels.errors import UnsupportedInput
from kernels.fusions.triton_heads import KEY, KV, PLAIN, checked_turns, finished, padded
from kernels.hadamard.triton import check_width
from kernels.launch import require_device
from kernels.quantize.triton_codes import narrow, rounded

COLUMNS = 1024  # of one program of store_rows
SIMULATIONS = {None: PLAIN.value, "kv": KV.value, "key": KEY.value}


def store_rows(raw: torch.Tensor, ape: torch.Tensor, phase: torch.Tensor, ring: torch.Tensor, slots: torch.Tensor) -> None:
    """Compressor rows into their ring: raw fp32 [N, 2·w] (kv ‖ gate), gate + ape[phase], to ring fp32 [R, 2·w] at slots.

    ape fp32 [ratio, w]; phase, slots int64 [N], slots ≥ 0 and different. Leaves raw alone.
    """
    require_device("store_rows", raw, ape, phase, ring, slots)
    if any(t.dtype is not torch.float32 for t in (raw, ape, ring)) or any(t.stride(1) != 1 for t in (raw, ape, ring)):
        raise UnsupportedInput("store_rows: expected fp32 rows of adjacent columns; found "
                               + ", ".join(f"{t.dtype} with strides {tuple(t.stride())}" for t in (raw, ape, ring)))
    (N, width), block = raw.shape, min(COLUMNS, triton.next_power_of_2(raw.shape[1]))
    if raw.numel():
        strides = [t.stride(0) for t in (raw, ape, phase, ring, slots)]
        _store_rows[(N, triton.cdiv(width, block))](raw, ape, phase, ring, slots, *strides, width // 2, block,
                                                    num_warps=max(1, block // 256))


def pool_entries(pool: torch.Tensor, slots: torch.Tensor, overlap: int, dtype: torch.dtype, weight: torch.Tensor, eps: float,
                 cis: torch.Tensor, simulate: str | None, live: torch.Tensor | None = None) -> torch.Tensor:
    """Windows of compressor rows → entries: gated pooling, norm, RoPE, and the cache's simulation.

    pool fp32 [R, 2·c·D] (kv ‖ gate, c = overlap pieces of D each); slots int64 [M, S]: rows of each window, −1 absent; with
    c = 2 the first S/2 slots give their pieces 0, the others their pieces 1. Pooled in fp32, cast to `dtype`, normalised by
    weight [D], rotated by cis complex64 [M, d/2]. simulate: None, "kv" (FP8 but for the rotated dims) or "key"
    (Hadamard, then FP4). Returns [M, D] in `dtype`. A slot of −1 has no part, whatever the pool holds; a window of nothing
    else gives zeros (NaN by the definition). live bool or integer [M], or None: entries of windows where it is 0 are not
    computed and hold anything.
    """
    require_device("pool_entries", pool, slots, weight, cis, live)
    (M, S), D, simulation = slots.shape, pool.shape[1] // (2 * overlap), SIMULATIONS[simulate]
    if pool.dtype is not torch.float32 or pool.stride(1) != 1 or S % overlap:
        raise UnsupportedInput(f"pool_entries: pool {pool.dtype} with strides {tuple(pool.stride())}, {S} slots "
                               f"of {overlap} pieces; expected fp32 rows of adjacent columns and as many slots of each piece")
    if simulation == KEY.value:
        check_width(D)
    turns = checked_turns("pool_entries", cis, M, D)
    y = torch.empty(M, D, dtype=dtype, device=pool.device)
    if not y.numel():
        return y
    flags = slots if live is None else live.view(torch.uint8) if live.dtype is torch.bool else live
    B = padded(D, simulation)
    tile, warps = (8, max(1, B // 128)) if S <= 8 else (32, max(4, B // 64))
    _pool_entries[(M,)](pool, slots, flags, weight.contiguous(), turns.cis, y, pool.stride(0), *slots.stride(), flags.stride(0),
                        eps, turns.heads, S, overlap, D, 2 * cis.shape[-1], turns.conjugate, simulation, D.bit_length() - 1,
                        live is not None, tile, B, num_warps=min(16, warps))
    return y


@triton.jit
def _store_rows(RAW, APE, PHASE, RING, SLOTS, raw_row, ape_row, phase_step, ring_row, slots_step, W: tl.constexpr,
                B: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    phase, slot = tl.load(PHASE + n * phase_step), tl.load(SLOTS + n * slots_step)
    # raw[:, ape.shape[1]:].add_(ape.index_select(0, phase)); ring.index_copy_(0, slots, raw)
    raw = tl.load(RAW + n * raw_row + c, mask=c < 2 * W, other=0.0)
    ape = tl.load(APE + phase * ape_row + c - W, mask=(c >= W) & (c < 2 * W), other=0.0)
    tl.store(RING + slot * ring_row + c, raw + ape, mask=c < 2 * W)


@triton.jit
def _pool_entries(POOL, SLOTS, LIVE, WEIGHT, CIS, Y, pool_row, slots_window, slots_step, live_step, eps, turning,
                  S: tl.constexpr, OVERLAP: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, CONJUGATE: tl.constexpr,
                  SIMULATION: tl.constexpr, STEPS: tl.constexpr, SKIPS: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """One window, TILE slots at a time."""
    window, i = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    live = True
    if SKIPS:
        live = tl.load(LIVE + window * live_step) != 0
    if live:
        top = tl.full((B,), float("-inf"), tl.float32)
        total, pooled = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
        for start in range(0, S, TILE):
            s = start + tl.arange(0, TILE)
            row = tl.load(SLOTS + window * slots_window + s * slots_step, mask=s < S, other=-1)
            # rows = (slots.clamp(min=0) * (2 * overlap) + piece).flatten(); the gates are `overlap` pieces further
            at = (row * pool_row + s // (S // OVERLAP) * D)[:, None] + i[None, :]
            present = (row >= 0)[:, None] & (i[None, :] < D)
            kv = tl.load(POOL + at, mask=present, other=0.0)
            gate = tl.load(POOL + at + OVERLAP * D, mask=present, other=float("-inf"))
            top, total, pooled = pool_slots(top, total, pooled, kv, gate)
        pooled /= tl.where(top == float("-inf"), 1.0, total)  # a window of nothing is 0, not 0/0
        at, y = (window + tl.arange(0, 1)) // turning * TURNED, rounded(pooled, Y.dtype.element_ty)[None, :]
        y = finished(y, WEIGHT, CIS, at, tl.arange(0, 1) == 0, i, eps, Y.dtype.element_ty, D, TURNED, CONJUGATE, True, True,
                     SIMULATION, STEPS, 1, B)
        tl.store(Y + window * D + i[None, :], narrow(y, Y.dtype.element_ty), mask=i[None, :] < D)
