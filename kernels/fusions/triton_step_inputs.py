"""`attention_inputs` on a GPU: everything between a layer's linear maps and its attention in one launch.

Programs have different parts. For each row of the batch and each compressor, one program stores the rows and pools the
windows that they complete. For each token, one program makes the latent and writes it into the window. The others
process a few heads each.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.cache_rows.formats import KV_FORM, PLAIN_FORM
from dsv4.kernels.compress.triton import pool_slots
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions.compositions import IndexHeads, Latents, Windows
from dsv4.kernels.fusions.triton_compress import SIMULATIONS
from dsv4.kernels.fusions.triton_heads import KEY, KV, PLAIN, checked_turns, finished, padded
from dsv4.kernels.fusions.triton_step import wait
from dsv4.kernels.fusions.triton_step_rows import put
from dsv4.kernels.hadamard.triton import check_width
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, rounded, widen

TILE = 2048  # numbers of heads that a program takes, and of slots that it pools, at least one row
WARPS = 4


def attention_inputs(
    batch: int,
    q: torch.Tensor,
    cis: torch.Tensor,
    eps: float,
    latents: Latents,
    index: IndexHeads | None,
    windows: tuple[Windows, ...],
) -> tuple[torch.Tensor, ...]:
    """Computes what the definition does, in one launch; q, index queries and caches are written in place, and
    incomplete windows are not written."""
    _check(batch, q, cis, latents, index, windows)
    N, H, D = q.shape
    data, page, form = _pool(latents.pool)
    near = latents.kv, latents.weight.contiguous(), data, latents.slots
    B = padded(D, KV.value)
    heads = max(1, TILE // B)
    asked, tensors, of_index, index_programs = _asked(index)
    parts, shapes = zip(*(_compressor(batch, w) for w in windows)) if windows else ((), ())
    programs, pdl = batch * len(windows) + N + triton.cdiv(N * H, heads) + index_programs, dependent_launch(q.device)
    if N:
        _inputs[(programs,)](
            q,
            _turns(cis.expand(N, -1)),
            near,
            tensors,
            parts,
            N,
            N // batch,
            eps,
            0.0 if index is None else float(index.scale),
            (D, H, B, heads),
            of_index,
            tuple(n for shape in shapes for n in shape),
            form,
            page,
            (KV if latents.simulate else PLAIN).value,
            2 * cis.shape[-1],
            pdl,
            num_warps=WARPS,
            launch_pdl=pdl,
        )
    return q, *asked, data, *(t for w in windows for t in (w.ring, _pool(w.entries)[0]))


def _asked(index: IndexHeads | None) -> tuple[tuple, tuple, tuple, int]:
    """(results, tensors, D, H, padded D, heads of a program and simulation, programs) of index queries and head
    weights."""
    if index is None:
        return (), (None, None, None), (1, 1, 1, 1, 0), 0
    (N, H, D), B = index.q.shape, next_power(index.q.shape[2])
    scaled, each = torch.empty(N, H, dtype=torch.float32, device=index.q.device), max(1, TILE // B)
    shape = D, H, B, each, (KEY if index.simulate else PLAIN).value
    return (index.q, scaled), (index.q, index.weights.contiguous(), scaled), shape, triton.cdiv(N * H, each)


def _compressor(batch: int, w: Windows) -> tuple[tuple, tuple]:
    """(tensors, shape) of one compressor, in the form of `_window`."""
    D, simulation, (data, stride, form) = w.ring.shape[1] // (2 * w.overlap), SIMULATIONS[w.simulate], _pool(w.entries)
    (M, S), B = w.rows.shape, padded(D, KV.value if form == KV_FORM else simulation)
    tensors = (
        w.raw,
        w.ape,
        w.phase,
        w.ring,
        w.slots,
        w.rows,
        w.live.view(torch.uint8),
        w.weight,
        _turns(w.cis),
        data,
        w.entry_slots,
    )
    return tensors, (D, w.overlap, S, M // batch, simulation, form, stride, B, max(1, min(S, 2 * TILE // B)))


def _turns(cis: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(cis.resolve_conj()).contiguous()


def _pool(rows: torch.Tensor | PackedRows) -> tuple[torch.Tensor, int, int]:
    """(memory, elements from row to row or bytes from page to page, form) of rows that are written."""
    if isinstance(rows, PackedRows):
        return rows.data, rows.data.stride(0), rows.format.form
    return rows, rows.stride(0), PLAIN_FORM


def _check(batch: int, q, cis, latents: Latents, index: IndexHeads | None, windows: tuple[Windows, ...]) -> None:
    """Raises UnsupportedInput for what the kernel does not take."""
    pools = [latents.pool, *(w.entries for w in windows)]
    held = [p.data if isinstance(p, PackedRows) else p for p in pools]
    rows = [latents.kv, *(t for w in windows for t in (w.raw, w.ape, w.ring, w.weight))]
    heads = [q] if index is None else [q, index.q]
    require_device("attention_inputs", *heads, cis, *held, *rows, latents.slots)
    if any(not t.is_contiguous() for t in (*heads, *rows)) or any(t.dim() != 2 or t.stride(1) != 1 for t in held):
        raise UnsupportedInput(
            "attention_inputs takes contiguous queries and rows, and flat pools whose numbers lie side by side"
        )
    if any(t.dtype is not torch.float32 for w in windows for t in (w.raw, w.ape, w.ring)):
        raise UnsupportedInput("attention_inputs takes a compressor's rows, biases and ring in float32")
    for t in heads:
        checked_turns("attention_inputs", cis, len(q), t.shape[2])
    if index is not None:
        if index.simulate:
            check_width(index.q.shape[2])
    if len(q) % batch or any(len(w.rows) % batch for w in windows):
        raise UnsupportedInput(
            f"attention_inputs: {len(q)} tokens and {[len(w.rows) for w in windows]} windows of {batch} rows; "
            "expected multiples"
        )


@triton.jit(do_not_specialize=["N"])
def _inputs(
    Q,
    CIS,
    NEAR,
    INDEX,
    WINDOWS,
    N,
    T: tl.constexpr,
    eps,
    scale,
    HEADS: tl.constexpr,
    ASKED: tl.constexpr,
    SHAPES: tl.constexpr,
    FORM: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    SIMULATION: tl.constexpr,
    TURNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Q [N, H, D], in place. NEAR: KV, weight, pool and slots; INDEX: queries, weights and scaled weights; WINDOWS of
    each compressor: its Windows. HEADS: D, H, padded D, heads of a program; ASKED: these of the index queries, and
    their simulation; SHAPES: see `_window`. Programs: a row of the batch for each compressor, tokens, heads, index
    heads."""
    pid = tl.program_id(0)
    wait(PDL)
    rows = N // T
    for w in tl.static_range(len(WINDOWS)):
        if (pid >= w * rows) & (pid < (w + 1) * rows):
            _window(WINDOWS[w], pid - w * rows, T, eps, TURNED, SHAPES, 9 * w, Q.dtype.element_ty)
    pid -= len(WINDOWS) * rows
    D: tl.constexpr = HEADS[0]
    B: tl.constexpr = HEADS[2]
    DTYPE: tl.constexpr = Q.dtype.element_ty
    if (pid >= 0) & (pid < N):
        n, i = pid.to(tl.int64), tl.arange(0, B)
        y = widen(tl.load(NEAR[0] + n * D + i, mask=i < D, other=0.0))[None, :]
        y = finished(
            y,
            NEAR[1],
            CIS,
            (n + tl.arange(0, 1)) * TURNED,
            tl.arange(0, 1) == 0,
            i,
            eps,
            DTYPE,
            D,
            TURNED,
            False,
            True,
            True,
            SIMULATION,
            0,
            1,
            B,
        )
        put(NEAR[2], tl.load(NEAR[3] + n), y, D, TURNED, PAGE_BYTES, FORM, B)
    pid -= N
    programs = tl.cdiv(N * HEADS[1], HEADS[3])
    if (pid >= 0) & (pid < programs):
        _heads(Q, None, None, CIS, pid * HEADS[3], N, eps, 0.0, D, HEADS[1], B, HEADS[3], 0, TURNED)
    if INDEX[0] is not None:
        if pid >= programs:
            _heads(
                INDEX[0],
                INDEX[1],
                INDEX[2],
                CIS,
                (pid - programs) * ASKED[3],
                N,
                eps,
                scale,
                ASKED[0],
                ASKED[1],
                ASKED[2],
                ASKED[3],
                ASKED[4],
                TURNED,
            )


@triton.jit
def _heads(
    Q,
    WEIGHTS,
    SCALED,
    CIS,
    first,
    N,
    eps,
    scale,
    D: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    SIMULATION: tl.constexpr,
    TURNED: tl.constexpr,
):
    """R rows of heads from `first` on. With WEIGHTS they are index queries: no norm, but weights to be scaled."""
    row, i = first.to(tl.int64) + tl.arange(0, R), tl.arange(0, B)
    live = row < N * H
    at, inside = Q + row[:, None] * D + i[None, :], live[:, None] & (i[None, :] < D)
    y = widen(tl.load(at, mask=inside, other=0.0))
    y = finished(
        y,
        Q,
        CIS,
        row // H * TURNED,
        live,
        i,
        eps,
        Q.dtype.element_ty,
        D,
        TURNED,
        False,
        WEIGHTS is None,
        False,
        SIMULATION,
        D.bit_length() - 1,
        R,
        B,
    )
    tl.store(at, narrow(y, Q.dtype.element_ty), mask=inside)
    if WEIGHTS is not None:
        # weights.float() * scale
        tl.store(SCALED + row, widen(tl.load(WEIGHTS + row, mask=live, other=0.0)) * scale, mask=live)


@triton.jit
def _window(
    W, b, T: tl.constexpr, eps, TURNED: tl.constexpr, SHAPES: tl.constexpr, AT: tl.constexpr, DTYPE: tl.constexpr
):
    """Rows and windows of row b of the batch. SHAPES, from AT on: width, overlap, slots of a window, windows of a row,
    simulation, form and stride of the entries' pool, padded width, slots at a time."""
    D: tl.constexpr = SHAPES[AT]
    OVERLAP: tl.constexpr = SHAPES[AT + 1]
    S: tl.constexpr = SHAPES[AT + 2]
    C: tl.constexpr = SHAPES[AT + 3]
    SIMULATION: tl.constexpr = SHAPES[AT + 4]
    FORM: tl.constexpr = SHAPES[AT + 5]
    STRIDE: tl.constexpr = SHAPES[AT + 6]
    B: tl.constexpr = SHAPES[AT + 7]
    TILE: tl.constexpr = SHAPES[AT + 8]
    ROW: tl.constexpr = 2 * OVERLAP * D
    i, b = tl.arange(0, B), b.to(tl.int64)
    for t in range(T):
        n = b * T + t
        phase, slot = tl.load(W[2] + n), tl.load(W[4] + n)
        for piece in tl.static_range(2 * OVERLAP):
            # raw[:, ape.shape[1]:].add_(ape.index_select(0, phase)); ring.index_copy_(0, slots, raw)
            x = tl.load(W[0] + n * ROW + piece * D + i, mask=i < D, other=0.0)
            if piece >= OVERLAP:
                x += tl.load(W[1] + phase * (OVERLAP * D) + (piece - OVERLAP) * D + i, mask=i < D, other=0.0)
            tl.store(W[3] + slot * ROW + piece * D + i, x, mask=i < D)
    tl.debug_barrier()  # other threads pool the rows than stored them
    for c in range(C):
        m = b * C + c
        if tl.load(W[6] + m) != 0:
            top = tl.full((B,), float("-inf"), tl.float32)
            total, pooled = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
            for start in range(0, S, TILE):
                s = start + tl.arange(0, TILE)
                row = tl.load(W[5] + m * S + s, mask=s < S, other=-1)
                at = (row * ROW + s // (S // OVERLAP) * D)[:, None] + i[None, :]
                present = (row >= 0)[:, None] & (i[None, :] < D)
                kv = tl.load(W[3] + at, mask=present, other=0.0)
                gate = tl.load(W[3] + at + OVERLAP * D, mask=present, other=float("-inf"))
                top, total, pooled = pool_slots(top, total, pooled, kv, gate)
            pooled /= tl.where(top == float("-inf"), 1.0, total)
            y = rounded(pooled, DTYPE)[None, :]
            y = finished(
                y,
                W[7],
                W[8],
                (m + tl.arange(0, 1)) * TURNED,
                tl.arange(0, 1) == 0,
                i,
                eps,
                DTYPE,
                D,
                TURNED,
                False,
                True,
                True,
                SIMULATION,
                D.bit_length() - 1,
                1,
                B,
            )
            put(W[9], tl.load(W[10] + m), y, D, TURNED, STRIDE, FORM, B)
