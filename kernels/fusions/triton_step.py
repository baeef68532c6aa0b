"""The parts of a decode step outside of its layers on a GPU: positions, embedded tokens, rows of entries, and the end
of the streams."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions.compositions import Kept
from dsv4.kernels.hyper_connections.triton import checked
from dsv4.kernels.hyper_connections.triton_merge import merge
from dsv4.kernels.hyper_connections.triton_statistics import statistics
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, widen

COLUMNS = 1024  # of one program


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the previous kernel, whose results are read next; the next kernel may start meanwhile."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def place(
    start: torch.Tensor,
    tokens: int,
    frequencies: tuple[torch.Tensor, ...],
    window: tuple[int, int],
    kept: tuple[Kept, ...],
) -> tuple[torch.Tensor, ...]:
    """Computes what the definition does, in one launch: a program for each token and for each window of each ratio."""
    require_device("place", start, *frequencies)
    if start.dtype is not torch.int64 or any(f.dtype is not torch.float32 or f.stride(0) != 1 for f in frequencies):
        raise UnsupportedInput(
            f"place: starts {start.dtype}, frequencies {[f.dtype for f in frequencies]}; expected int64, and "
            "fp32 side by side"
        )
    B, half, (W, R) = len(start), frequencies[0].shape[0], window
    new = lambda *shape, dtype=torch.int64: torch.empty(*shape, dtype=dtype, device=start.device)
    turns = lambda n: new(n, half, 2, dtype=torch.float32)
    N = B * tokens
    common, cis, ratios = (new(N, W), new(N)), tuple((turns(N), turns(N)) for _ in frequencies), ()
    shapes, pools = (), ()
    for k in kept:
        C = (tokens + k.ratio - 1) // k.ratio
        M = B * C
        ratios += (
            (
                new(B, tokens),
                new(N),
                new(N),
                new(B, C),
                new(M, dtype=torch.bool),
                new(M, k.overlap * k.ratio),
                turns(M),
                *(new(M) for _ in k.entries),
            ),
        )
        shapes += k.ratio, k.overlap * k.ratio, k.ring, C
        pools += (k.entries,)
    flat = (
        tuple(t for outs in cis for t in outs),
        tuple(tuple(t.view(torch.uint8) if t.dtype is torch.bool else t for t in outs) for outs in ratios),
    )
    pdl = dependent_launch(start.device)
    if N:
        _place[(B, tokens + sum(shapes[3::4]))](
            start,
            tuple(frequencies),
            common,
            *flat,
            pools,
            tokens,
            shapes,
            W,
            R,
            next_power(W),
            half,
            next_power(half),
            pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return *common, *flat[0], *(t for outs in ratios for t in outs)


@triton.jit
def _turn(F, CIS, INVERSE, row, pos, HALF: tl.constexpr, P: tl.constexpr):
    """Write e^{i·pos·f} to row `row` of CIS, and its conjugate to INVERSE unless None."""
    i = tl.arange(0, P)
    # angle = positions.unsqueeze(-1).float() * frequencies
    angle = pos.to(tl.float32) * tl.load(F + i, mask=i < HALF, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    at, j = row * (2 * HALF), tl.arange(0, 2 * P)
    tl.store(CIS + at + j, tl.reshape(tl.join(cos, sin), [2 * P]), mask=j < 2 * HALF)
    if INVERSE is not None:
        tl.store(INVERSE + at + j, tl.reshape(tl.join(cos, -sin), [2 * P]), mask=j < 2 * HALF)


@triton.jit(do_not_specialize=["T"])
def _place(
    START,
    FREQUENCIES,
    COMMON,
    CIS,
    RATIOS,
    POOLS,
    T,
    SHAPES: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    WP: tl.constexpr,
    HALF: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row `program 0` of the batch; along axis 1 its T tokens, then the windows of each ratio.

    RATIOS: outputs of each ratio in the order of `place`; POOLS: rows of each of its pools, which grow with the context
    that a cache is made for. SHAPES, 4 a ratio: ratio, overlap · ratio, rows of the ring, windows.
    """
    b, role = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    start = tl.load(START + b)
    if role < T:
        n, pos, i = b * T + role, start + role, tl.arange(0, WP)
        near = pos + 1 - W + i
        tl.store(COMMON[0] + n * W + i, tl.where(near < 0, -1, near % R + b * R), mask=i < W)
        tl.store(COMMON[1] + n, pos % R + b * R)
        for f in tl.static_range(len(FREQUENCIES)):
            _turn(FREQUENCIES[f], CIS[2 * f], CIS[2 * f + 1], n, pos, HALF, P)
        for r in tl.static_range(len(RATIOS)):
            tl.store(RATIOS[r][0] + n, (pos + 1) // SHAPES[4 * r])
            tl.store(RATIOS[r][1] + n, pos % SHAPES[4 * r])
            tl.store(RATIOS[r][2] + n, pos % SHAPES[4 * r + 2] + b * SHAPES[4 * r + 2])
    role -= T
    for r in tl.static_range(len(RATIOS)):
        if (role >= 0) & (role < SHAPES[4 * r + 3]):
            _new_window(
                FREQUENCIES[len(FREQUENCIES) - 1], RATIOS[r], POOLS[r], b, role, start, T, SHAPES, 4 * r, HALF, P
            )
        role -= SHAPES[4 * r + 3]


@triton.jit
def _new_window(
    F, OUT, POOLS, b, c, start, T, SHAPES: tl.constexpr, AT: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr
):
    """The c-th window of one ratio that row b of the batch may complete. SHAPES: from AT on, as in `_place`."""
    RATIO: tl.constexpr = SHAPES[AT]
    S: tl.constexpr = SHAPES[AT + 1]
    window, m, i = start // RATIO + c, b * SHAPES[AT + 3] + c, tl.arange(0, S)
    live = (window + 1) * RATIO <= start + T
    for pool in tl.static_range(len(OUT) - 7):
        live = live & (window < POOLS[pool])
    tl.store(OUT[3] + m, window)
    tl.store(OUT[4] + m, live.to(tl.uint8))
    # offset = torch.arange(k.ratio - S, k.ratio); absent before position 0 and in incomplete windows
    at = window * RATIO + RATIO - S + i
    tl.store(OUT[5] + m * S + i, tl.where((at >= 0) & live, at % SHAPES[AT + 2] + b * SHAPES[AT + 2], -1))
    _turn(F, OUT[6], None, m, window * RATIO, HALF, P)
    for pool in tl.static_range(len(OUT) - 7):
        tl.store(OUT[7 + pool] + m, window + b * POOLS[pool])


def embed_streams(ids: torch.Tensor, table: torch.Tensor, streams: int, dtype: torch.dtype) -> torch.Tensor:
    """Computes what the definition does; rows of ids outside the table are NaN."""
    require_device("embed_streams", ids, table)
    if ids.dtype is not torch.int64 or table.stride(1) != 1:
        raise UnsupportedInput(
            f"embed_streams: ids {ids.dtype}, table with strides {tuple(table.stride())}; expected int64, and "
            "columns side by side"
        )
    (N,), (vocab, d) = ids.shape, table.shape
    y = torch.empty(N, streams, d, dtype=dtype, device=ids.device)
    block, pdl = min(COLUMNS, next_power(d)), dependent_launch(ids.device)
    if y.numel():
        _embed[(N, triton.cdiv(d, block))](
            ids, table, y, ids.stride(0), table.stride(0), vocab, d, streams, block, pdl, num_warps=4, launch_pdl=pdl
        )
    return y


@triton.jit
def _embed(
    IDS, TABLE, Y, ids_step, row, vocab, D: tl.constexpr, STREAMS: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr
):
    n, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    wait(PDL)
    token = tl.load(IDS + n * ids_step)
    known = (token >= 0) & (token < vocab)
    x = widen(tl.load(TABLE + token * row + i, mask=(i < D) & known, other=float("nan")))
    for k in tl.static_range(STREAMS):
        tl.store(Y + (n * STREAMS + k) * D + i, narrow(x, Y.dtype.element_ty), mask=i < D)


def chosen_rows(entry: torch.Tensor, run: int) -> torch.Tensor:
    """Computes what the definition does; with one batch row the result is a view of the entries."""
    if entry.shape[0] == 1:
        return entry.flatten(0, 1)
    require_device("chosen_rows", entry)
    (B, T, K), entry = entry.shape, entry.contiguous()
    y = torch.empty(B * T, K, dtype=entry.dtype, device=entry.device)
    block, pdl = min(COLUMNS, next_power(T * K)), dependent_launch(entry.device)
    if y.numel():
        _chosen_rows[(B, triton.cdiv(T * K, block))](entry, y, T * K, run, block, pdl, num_warps=4, launch_pdl=pdl)
    return y


@triton.jit(do_not_specialize=["run"])
def _chosen_rows(ENTRY, Y, each, run, B: tl.constexpr, PDL: tl.constexpr):
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    wait(PDL)
    entry = tl.load(ENTRY + b * each + i, mask=i < each, other=-1)
    tl.store(Y + b * each + i, tl.where(entry < 0, entry, entry + b * run), mask=i < each)


def mhc_post_head_norm(out, streams, post, comb, fn, scale, base, eps: float, norm_eps: float, weight, rms_eps: float):
    """Computes what the definition does, in the two launches of every hyper-connection. out may be `Unsummed` over
    ranks."""
    streams, (out, post, comb, fn, scale, base, weight) = checked(
        "mhc_post_head_norm", streams, (out, post, comb, fn, scale, base, weight)
    )
    if not len(streams):
        return streams, streams.new_empty(0, streams.shape[2])
    streams, parts = statistics(streams, fn, (out, post, comb))
    return streams, merge(streams, parts, scale, base, 0, eps, norm_eps, weight, rms_eps, head=True)[0]
