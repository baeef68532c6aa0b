"""Compressors on a GPU: windows of rows into entries.

One program makes an entry from a window of few rows. A window of many rows is 0.5 MB, too much for one processor to
read in time: several programs pool its channels, and a second kernel normalises and rotates.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.compress.triton import pool_slots
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions.triton_heads import KEY, KV, PLAIN, checked_turns, finished, head_rows, padded
from dsv4.kernels.hadamard.triton import check_width
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, rounded

FEW = 8  # slots of a window that one program pools
CHANNELS = 32  # channels of one program if a window has more rows
TILE = 128  # slots that such a program loads at a time
SIMULATIONS = {None: PLAIN.value, "kv": KV.value, "key": KEY.value}


def pool_entries(
    pool: torch.Tensor,
    slots: torch.Tensor,
    overlap: int,
    dtype: torch.dtype,
    weight: torch.Tensor,
    eps: float,
    cis: torch.Tensor,
    simulate: str | None,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """Windows of compressor rows → entries: gated pooling, norm, RoPE, and the cache's simulation.

    pool fp32 [R, 2·c·D] (kv ‖ gate, c = overlap pieces of D each); slots int64 [M, S]: rows of each window, −1 absent;
    with c = 2 the first S/2 slots give their pieces 0, the others their pieces 1. Pooled in fp32, cast to `dtype`,
    normalised by weight [D], rotated by cis complex64 [M, d/2]. simulate: None, "kv" (FP8 but for the rotated dims) or
    "key" (Hadamard, then FP4). Returns [M, D] in `dtype`. A slot of −1 contributes nothing, whatever the pool holds; a
    window of such slots only gives zeros (NaN by the definition). live bool or integer [M], or None: entries of windows
    where it is 0 are not computed and hold anything.
    """
    require_device("pool_entries", pool, slots, weight, cis, live)
    (M, S), D, simulation = slots.shape, pool.shape[1] // (2 * overlap), SIMULATIONS[simulate]
    if pool.dtype is not torch.float32 or pool.stride(1) != 1 or S % overlap:
        raise UnsupportedInput(
            f"pool_entries: pool {pool.dtype} with strides {tuple(pool.stride())}, {S} slots "
            f"of {overlap} pieces; expected fp32 rows of adjacent columns and as many "
            "slots of each piece"
        )
    if simulation == KEY.value:
        check_width(D)
    turns = checked_turns("pool_entries", cis, M, D)
    y = torch.empty(M, D, dtype=dtype, device=pool.device)
    if not y.numel():
        return y
    flags = slots if live is None else live.view(torch.uint8) if live.dtype is torch.bool else live
    pdl, strides = dependent_launch(pool.device), (pool.stride(0), *slots.stride(), flags.stride(0))
    if S > FEW:
        pooled, slots_padded = torch.empty_like(y), next_power(S)
        _pool[(M, triton.cdiv(D, CHANNELS))](
            pool,
            slots,
            flags,
            pooled,
            *strides,
            S,
            overlap,
            D,
            live is not None,
            slots_padded,
            min(TILE, slots_padded),
            CHANNELS,
            pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        return head_rows(
            "pool_entries", pooled.unsqueeze(1), y.unsqueeze(1), weight, eps, cis, True, simulation
        ).squeeze(1)
    B = padded(D, simulation)
    _pool_entries[(M,)](
        pool,
        slots,
        flags,
        weight.contiguous(),
        turns.cis,
        y,
        *strides,
        eps,
        turns.heads,
        S,
        overlap,
        D,
        2 * cis.shape[-1],
        turns.conjugate,
        simulation,
        D.bit_length() - 1,
        live is not None,
        FEW,
        B,
        pdl,
        num_warps=min(16, max(1, B // 128)),
        launch_pdl=pdl,
    )
    return y


@triton.jit
def _wanted(
    SLOTS, LIVE, window, slots_window, slots_step, live_step, S: tl.constexpr, SKIPS: tl.constexpr, P: tl.constexpr
):
    """(whether an entry must be written, whether its window has a row): in most steps no window is complete."""
    s, live = tl.arange(0, P), True
    if SKIPS:
        live = tl.load(LIVE + window * live_step) != 0
    row = tl.load(SLOTS + window * slots_window + s * slots_step, mask=s < S, other=-1)
    return live, tl.max(row, 0) >= 0


@triton.jit
def _pooled(
    POOL,
    SLOTS,
    window,
    i,
    pool_row,
    slots_window,
    slots_step,
    S: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Channels i int32 [B] of a window that has rows, pooled TILE slots at a time: fp32 [B], zeros beyond D."""
    top = tl.full(i.shape, float("-inf"), tl.float32)
    total, pooled = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    for start in range(0, S, TILE):
        s = start + tl.arange(0, TILE)
        row = tl.load(SLOTS + window * slots_window + s * slots_step, mask=s < S, other=-1)
        # rows = (slots.clamp(min=0) * (2 * overlap) + piece).flatten(); the gates are `overlap` pieces further
        at = (row * pool_row + s // (S // OVERLAP) * D)[:, None] + i[None, :]
        present = (row >= 0)[:, None] & (i[None, :] < D)
        kv = tl.load(POOL + at, mask=present, other=0.0)
        gate = tl.load(POOL + at + OVERLAP * D, mask=present, other=float("-inf"))
        top, total, pooled = pool_slots(top, total, pooled, kv, gate)
    return pooled / tl.where(top == float("-inf"), 1.0, total)  # pieces without a row are 0, not 0/0


@triton.jit
def _pool_entries(
    POOL,
    SLOTS,
    LIVE,
    WEIGHT,
    CIS,
    Y,
    pool_row,
    slots_window,
    slots_step,
    live_step,
    eps,
    turning,
    S: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    SIMULATION: tl.constexpr,
    STEPS: tl.constexpr,
    SKIPS: tl.constexpr,
    TILE: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """One window of at most TILE slots."""
    window, i = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    live, some = _wanted(SLOTS, LIVE, window, slots_window, slots_step, live_step, S, SKIPS, TILE)
    if live & some:
        y = rounded(
            _pooled(POOL, SLOTS, window, i, pool_row, slots_window, slots_step, S, OVERLAP, D, TILE), Y.dtype.element_ty
        )
        at = (window + tl.arange(0, 1)) // turning * TURNED
        y = finished(
            y[None, :],
            WEIGHT,
            CIS,
            at,
            tl.arange(0, 1) == 0,
            i,
            eps,
            Y.dtype.element_ty,
            D,
            TURNED,
            CONJUGATE,
            True,
            True,
            SIMULATION,
            STEPS,
            1,
            B,
        )
        tl.store(Y + window * D + i[None, :], narrow(y, Y.dtype.element_ty), mask=i[None, :] < D)
    elif live:
        tl.store(Y + window * D + i, tl.zeros((B,), Y.dtype.element_ty), mask=i < D)


@triton.jit
def _pool(
    POOL,
    SLOTS,
    LIVE,
    Y,
    pool_row,
    slots_window,
    slots_step,
    live_step,
    S: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    SKIPS: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """B channels of one window, rounded as the entry is rounded before its norm."""
    window, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    live, some = _wanted(SLOTS, LIVE, window, slots_window, slots_step, live_step, S, SKIPS, P)
    y = tl.zeros((B,), tl.float32)
    if live & some:
        y = _pooled(POOL, SLOTS, window, i, pool_row, slots_window, slots_step, S, OVERLAP, D, TILE)
    tl.store(Y + window * D + i, narrow(y, Y.dtype.element_ty), mask=(i < D) & live)
