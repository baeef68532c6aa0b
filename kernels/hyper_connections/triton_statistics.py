"""First mHC kernel on a GPU: it merges the last sublayer's output into the streams, and computes partial products of fn
with the new streams.

fn is 1.57 MB at d = 4096, too much for one processor to read in time, so programs split d. Each computes and stores its
columns of the new streams, and writes its part of the M products and of Σx². The second kernel adds the parts in a
fixed order. A part is MP numbers a token, in the order in which the second kernel needs them: the n products that
collapse the streams, then Σx², then the other products.

From capability 9 on, a kernel starts while the previous one runs, and waits for it on the device (programmatic
dependent launch): fn is loaded meanwhile, and the second kernel's programs are resident when those of the first end.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.collectives.triton_one_shot import BLOCK, memories, operands, send, summed
from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.experts.triton_combine import combined
from dsv4.kernels.hyper_connections.triton_mixing import coefficients, fn_rows, mixed, rows_of
from dsv4.kernels.hyper_connections.triton_statistics_many import many
from dsv4.kernels.launch import dependent_launch, next_power
from dsv4.kernels.quantize.triton_codes import narrow, rounded, widen

FEW_TOKENS = 16  # up to this many, products are fp32 multiplications
FEW_COLUMNS = 32  # of a program, at least
FEW_SPLITS = 64  # programs of the same tokens, at most
FEW_HELD = 2  # tokens of a program
FEW_NUMBERS = 64  # numbers of fn that a thread holds


class Parts(NamedTuple):
    """fp32 parts [splits, N, MP]: of each token n products, Σx² at n, the M − n other products."""

    data: torch.Tensor
    products: int  # M


def statistics(
    streams: torch.Tensor, fn: torch.Tensor, merged: tuple[torch.Tensor | Unsummed, torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, Parts]:
    """Streams [N, n, d] (N ≥ 1, contiguous), after `mhc_post` with merged = (out, post, comb) unless None, and their
    parts. An out that is not summed yet is summed while it is merged: over ranks where `OneShot.joins`, over experts up
    to MERGED tokens; before it otherwise."""
    (N, n, d), M, device = streams.shape, fn.shape[0], streams.device
    out, post, comb = merged or (streams, fn, fn)
    new = streams if merged is None else torch.empty_like(streams)
    MP, pdl = max(16, next_power(M + 1)), dependent_launch(device)
    if N > FEW_TOKENS:
        return new, Parts(many(out, streams, post, comb, fn, new, MP), M)
    columns = max(FEW_COLUMNS, next_power(triton.cdiv(d, FEW_SPLITS)))
    T, splits = min(FEW_HELD, N), triton.cdiv(d, columns)
    data = torch.empty(splits, N, MP, dtype=torch.float32, device=device)
    warps = min(16, max(4, MP * columns * n // (32 * FEW_NUMBERS)))
    grid = splits, triton.cdiv(N, T)
    given, ranks = _given(out, streams.dtype, splits * grid[1], warps, T * columns)
    tail = N, d, n, M, MP, merged is not None, pdl, T, columns, *ranks, BLOCK
    _statistics_few[grid](*given, streams, post, comb, fn, new, data, *tail, num_warps=warps, launch_pdl=pdl)
    return new, Parts(data, M)


def _given(
    out: torch.Tensor | Unsummed, dtype: torch.dtype, programs: int, warps: int, words: int
) -> tuple[tuple, tuple[int, int]]:
    """What `_statistics_few` is given for `out` in so many programs of `words` numbers each: (out, indices, shared,
    buffers, epochs, rank) as `_exchange` is, and (ranks, experts of a token)."""
    joins = isinstance(out, Unsummed) and out.exchange is not None and out.exchange.joins(programs, warps, words)
    if joins and out.dtype is dtype:
        (part, _, each), exchange = operands(out.part), out.exchange
        return (*part, exchange.buffers, exchange.epochs, exchange.rank), (exchange.size, each)
    rows, each = rows_of(out, dtype)
    return (*rows, None, None, 0), (1, each)


@triton.jit(do_not_specialize=["N", "rank"])
def _statistics_few(
    OUT,
    INDICES,
    SHARED,
    BUFFERS,
    EPOCHS,
    rank,
    H,
    POST,
    COMB,
    FN,
    NEW,
    PART,
    N,
    d: tl.constexpr,
    n: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """T tokens one at a time, C columns. All loads come before all stores, so that loads need not wait; those of fn
    come before the wait for the previous kernel (programmatic dependent launch). Of several ranks OUT is this one's
    part, which they exchange as in `triton_one_shot`; the streams are loaded while the others' parts are on their way.
    """
    split, first = tl.program_id(0), tl.program_id(1) * T
    number, c = tl.arange(0, MP), split * C + tl.arange(0, C)[None, :]
    f, h, out, w = (), (), (), ()
    for k in tl.static_range(n):
        f = f + (fn_rows(FN, number[:, None], k, c, d, n, M),)
    if R > 1:
        memory, own = memories(BUFFERS, R), tl.load(BUFFERS + rank).to(tl.pointer_type(tl.int64))
        place, at = tl.program_id(1) * tl.num_programs(0) + split, tl.arange(0, C)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if MERGES:
        for i in tl.static_range(T):
            out = out + (_part(OUT, INDICES, SHARED, first + i, N, c, d, EACH),)
    if R > 1:
        epoch = tl.load(EPOCHS + place) + 1
        for i in tl.static_range(T):
            mine, live = out[i].to(tl.int32, bitcast=True), (first + i < N) & (c < d)
            send(memory, rank, place, epoch, i * C + at, mine, live, R, BLOCK)
    for i in tl.static_range(T):
        t = first + i
        for k in tl.static_range(n):
            h = h + (tl.load(H + (t * n + k) * d + c, mask=(t < N) & (c < d), other=0.0),)
        if MERGES:
            w = w + (coefficients(POST, COMB, t, t < N, n),)
    for i in tl.static_range(T):
        t, x, products, squares = first + i, (), tl.zeros((MP, C), tl.float32), tl.zeros((1, C), tl.float32)
        if MERGES:
            y = out[i]
            if R > 1:
                mine, live = y.to(tl.int32, bitcast=True), (t < N) & (c < d)
                y = rounded(summed(own, rank, place, epoch, i * C + at, mine, live, R, BLOCK), NEW.dtype.element_ty)
            elif INDICES is not None:
                y = rounded(y, NEW.dtype.element_ty)
        for k in tl.static_range(n):
            if MERGES:
                x = x + (narrow(mixed(h, y, w[i], k, n, i * n), NEW.dtype.element_ty),)
            else:
                x = x + (h[i * n + k],)
            wide = widen(x[k])
            products += f[k] * wide
            squares += wide * wide
        part = tl.where(number == n, tl.sum(squares, 1), tl.sum(products, 1))
        tl.store(PART + (split * N + t) * MP + number, part, mask=t < N)
        if MERGES:
            for k in tl.static_range(n):
                tl.store(NEW + (t * n + k) * d + c, x[k], mask=(t < N) & (c < d))
    if R > 1:
        tl.debug_barrier()  # every thread has read the epoch
        tl.store(EPOCHS + place, epoch)


@triton.jit
def _part(OUT, INDICES, SHARED, t, N, c, d: tl.constexpr, EACH: tl.constexpr):
    """This rank's part of token t's result, fp32 at columns c [1, C]; zeros beyond N and d."""
    live = (t < N) & (c < d)
    if INDICES is None:
        part = widen(tl.load(OUT + t * d + c, mask=live, other=0.0))
    else:
        part = combined(OUT, INDICES, SHARED, tl.minimum(t, N - 1).to(tl.int64), c, live, d, EACH)
    return part
