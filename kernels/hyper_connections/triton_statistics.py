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
from dsv4.kernels.collectives.unsummed import Unsummed, sum_now
from dsv4.kernels.experts.triton_combine import combined
from dsv4.kernels.launch import capability, dependent_launch, next_power, processors
from dsv4.kernels.quantize.triton_codes import INTERPRETED, narrow, rounded, widen

FEW_TOKENS = 16  # up to this many, products are fp32 multiplications
FEW_COLUMNS = 32  # of a program, at least
FEW_SPLITS = 64  # programs of the same tokens, at most
FEW_HELD = 2  # tokens of a program
FEW_NUMBERS = 64  # numbers of fn that a thread holds
MANY_TOKENS, MANY_COLUMNS, MANY_SPLITS = 64, 32, 128
ONCE_COLUMNS = 64  # most columns of a program that reads its part of fn once
ONCE_CAPABILITIES = 0, 9, 10  # the interpreter's, and those of wgmma and tcgen05; others would spill registers


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
    tail = N, d, n, M, MP, merged is not None, pdl
    if N <= FEW_TOKENS:
        columns = max(FEW_COLUMNS, next_power(triton.cdiv(d, FEW_SPLITS)))
        T, splits = min(FEW_HELD, N), triton.cdiv(d, columns)
        data = torch.empty(splits, N, MP, dtype=torch.float32, device=device)
        warps = min(16, max(4, MP * columns * n // (32 * FEW_NUMBERS)))
        grid = splits, triton.cdiv(N, T)
        given, ranks = _given(out, streams.dtype, splits * grid[1], warps, T * columns)
        tail = *tail, T, columns, *ranks, BLOCK
        _statistics_few[grid](*given, streams, post, comb, fn, new, data, *tail, num_warps=warps, launch_pdl=pdl)
        return new, Parts(data, M)
    tiles, chunks = triton.cdiv(N, MANY_TOKENS), triton.cdiv(d, MANY_COLUMNS)
    each = triton.cdiv(chunks, min(chunks, MANY_SPLITS, max(1, 4 * processors(device) // tiles)))
    grid = triton.cdiv(chunks, each), tiles
    data = torch.empty(grid[0], N, MP, dtype=torch.float32, device=device)
    if n != 4 or streams.dtype is not torch.bfloat16:
        out = sum_now(out)
        _statistics_many[grid](
            out,
            streams,
            post,
            comb,
            fn,
            new,
            data,
            each,
            *tail,
            MANY_TOKENS,
            MANY_COLUMNS,
            num_warps=8,
            num_stages=1,
            launch_pdl=pdl,
        )
        return new, Parts(data, M)
    columns = max(MANY_COLUMNS, next_power(triton.cdiv(d, MANY_SPLITS)))
    if tiles == 1 and columns <= ONCE_COLUMNS and capability(device)[0] in ONCE_CAPABILITIES:
        splits = triton.cdiv(d, columns)
        data = torch.empty(splits, N, MP, dtype=torch.float32, device=device)
        rows, expert_count = _rows(out, streams.dtype)
        tail = *tail, MANY_TOKENS, columns, expert_count
        _statistics_once[(splits,)](*rows, streams, post, comb, fn, new, data, *tail, num_warps=8, launch_pdl=pdl)
        return new, Parts(data, M)
    out = sum_now(out)
    pieces = torch.empty(3, MP, 4 * d, dtype=torch.bfloat16, device=device)
    _split_weights[(MP, triton.cdiv(d, 256))](fn, pieces, d, M, MP, pdl, 256, num_warps=4, launch_pdl=pdl)
    # Two programs fit on a multiprocessor, so one loads while the other multiplies.
    registers = {"maxnreg": 128} if capability(device)[0] == 9 else {}
    _statistics_bf16[grid](
        out,
        streams,
        post,
        comb,
        pieces,
        new,
        data,
        each,
        *tail,
        MANY_TOKENS,
        MANY_COLUMNS,
        num_warps=8,
        num_stages=2,
        **registers,
        launch_pdl=pdl,
    )
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
    rows, each = _rows(out, dtype)
    return (*rows, None, None, 0), (1, each)


def _rows(out: torch.Tensor | Unsummed, dtype: torch.dtype) -> tuple[tuple, int]:
    """`out` of one rank as kernels are given it: (numbers or experts' rows, indices or None, shared rows or None), and
    experts of a token. A sum over ranks, or one in another dtype, is taken first."""
    if isinstance(out, Unsummed) and out.exchange is None and out.dtype is dtype:
        given, _, each = operands(out.part)
        return given, each
    return (sum_now(out), None, None), 0


@triton.jit
def coefficients(POST, COMB, t, live, n: tl.constexpr, TILE: tl.constexpr = False):
    """Coefficients of mhc_post for token t: (post[0], comb[0, 0], …, comb[n − 1, 0], post[1], …), n + n² numbers; with
    TILE for tokens t [T], as columns [T, 1], made from vectors, because a thread would load a column [T, 1] again for
    each of its columns of a tile."""
    w = ()
    for k in tl.static_range(n):
        for j in tl.static_range(-1, n):
            if j < 0:
                x = tl.load(POST + t * n + k, mask=live, other=0.0)
            else:
                x = tl.load(COMB + (t * n + j) * n + k, mask=live, other=0.0)
            if TILE:
                w = w + (x[:, None],)
            else:
                w = w + (x,)
    return w


@triton.jit
def mixed(h, out, w, k: tl.constexpr, n: tl.constexpr, at: tl.constexpr = 0):
    """h'[k] = post[k]·out + Σ_j comb[j, k]·h[j] in fp32: h a tuple of tiles, n from `at` on, out a tile, w from
    `coefficients`.

    Written as fma: of a·b + c·d the compiler rounds either product, one in this row and the other in the next, and
    which one depends on what is merged. Then a token's bits would depend on its place in the batch."""
    # torch.baddbmm(post.unsqueeze(-1) * out.unsqueeze(1).float(), comb.transpose(1, 2), streams.float())
    y = w[k * (n + 1)] * widen(out)
    for j in tl.static_range(n):
        y = tl.fma(w[k * (n + 1) + 1 + j], widen(h[at + j]), y)
    return y


@triton.jit
def _weights(FN, i, k, c, d: tl.constexpr, n: tl.constexpr, M: tl.constexpr):
    """Row k of fn at columns c, for place i of a part: zero at n, where Σx² is, and beyond the products."""
    row = i - (i > n).to(tl.int32)
    return tl.load(FN + (row * n + k) * d + c, mask=(i != n) & (i <= M) & (c < d), other=0.0)


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
        f = f + (_weights(FN, number[:, None], k, c, d, n, M),)
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


@triton.jit(do_not_specialize=["N", "each"])
def _statistics_many(
    OUT,
    H,
    POST,
    COMB,
    FN,
    NEW,
    PART,
    each,
    N,
    d: tl.constexpr,
    n: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """T tokens, `each` chunks of C columns, in fp32."""
    split, first, m = tl.program_id(0), tl.program_id(1) * T, tl.arange(0, MP)[None, :]
    t, past = tl.arange(0, T)[:, None], first.to(tl.int64)
    inside = t < N - first
    # Bases are advanced to the tile, so that offsets within it are 32 bits.
    H, NEW, OUT, POST, COMB = H + past * n * d, NEW + past * n * d, OUT + past * d, POST + past * n, COMB + past * n * n
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    products, squares = tl.zeros((T, MP), tl.float32), tl.zeros((T, C), tl.float32)
    for chunk in range(split * each, (split + 1) * each):
        i = chunk * C + tl.arange(0, C)
        c, live, h, out, w = i[None, :], inside & (i[None, :] < d), (), 0.0, ()
        for k in tl.static_range(n):
            h = h + (tl.load(H + (t * n + k) * d + c, mask=live, other=0.0),)
        if MERGES:
            out = tl.load(OUT + t * d + c, mask=live, other=0.0)
            w = coefficients(POST, COMB, tl.arange(0, T), tl.arange(0, T) < N - first, n, True)
        for k in tl.static_range(n):
            x = h[k]
            if MERGES:
                x = narrow(mixed(h, out, w, k, n), NEW.dtype.element_ty)
                tl.store(NEW + (t * n + k) * d + c, x, mask=live)
            y = widen(x)
            squares += y * y
            products = tl.dot(y, _weights(FN, m, k, i[:, None], d, n, M), products, input_precision="ieee")
    part = tl.where(m == n, tl.sum(squares, 1)[:, None], products)
    tl.store(PART + (split.to(tl.int64) * N + past + t) * MP + m, part, mask=inside)


@triton.jit(do_not_specialize=["N"])
def _statistics_once(
    OUT,
    INDICES,
    SHARED,
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
    EACH: tl.constexpr,
):
    """`_statistics_bf16` for at most T tokens. No other program needs its columns of fn, so each splits its own."""
    split, m = tl.program_id(0), tl.arange(0, MP)[None, :]
    t, i, j = tl.arange(0, T)[:, None], split * C + tl.arange(0, C), tl.arange(0, 4 * C)[:, None]
    c, live, out = i[None, :], (t < N) & (i[None, :] < d), 0.0
    h, x, w = (), (), ()
    f = _weights(FN, m, j // C, split * C + j % C, d, 4, M)  # side by side in memory; the product has them as c·4 + k
    f = tl.reshape(tl.permute(tl.reshape(f, [4, C, MP]), (1, 0, 2)), [4 * C, MP])
    high = narrow(f, tl.bfloat16)
    middle = narrow(f - widen(high), tl.bfloat16)
    low = narrow(f - widen(high) - widen(middle), tl.bfloat16)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in tl.static_range(4):
        h = h + (tl.load(H + (t * 4 + k) * d + c, mask=live, other=0.0),)
    if MERGES:
        if INDICES is None:
            out = tl.load(OUT + t * d + c, mask=live, other=0.0)
        else:
            token = tl.minimum(t, N - 1).to(tl.int64)
            out = rounded(combined(OUT, INDICES, SHARED, token, c, live, d, EACH), NEW.dtype.element_ty)
        w = coefficients(POST, COMB, tl.arange(0, T), tl.arange(0, T) < N, 4, True)
    squares = tl.zeros((T, C), tl.float32)
    for k in tl.static_range(4):
        if MERGES:
            x = x + (narrow(mixed(h, out, w, k, 4), tl.bfloat16),)
            tl.store(NEW + (t * 4 + k) * d + c, x[k], mask=live)
        else:
            x = x + (h[k],)
        squares += widen(x[k]) * widen(x[k])
    y = tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), [T, 4 * C])
    products = _summed(y, high, _summed(y, middle, _summed(y, low, tl.zeros((T, MP), tl.float32))))
    part = tl.where(m == n, tl.sum(squares, 1)[:, None], products)
    tl.store(PART + (split * N + t) * MP + m, part, mask=t < N)


@triton.jit
def _summed(y, f, products):
    """products + y · f of bf16 tiles, exact but for the fp32 sums."""
    if INTERPRETED:  # the interpreter's bf16 product returns garbage
        products = tl.dot(widen(y), widen(f), products, input_precision="ieee")
    else:
        products = tl.dot(y, f, products)
    return products


@triton.jit
def _split_weights(FN, PIECES, d: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, PDL: tl.constexpr, B: tl.constexpr):
    """fn fp32 [M, 4, d] → bf16 [3, MP, d, 4]: three numbers whose sum is fn's (24 bits are 3 × 8), with rows in the
    order of parts."""
    i, c, k = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)[None, :], tl.arange(0, 4)[:, None]
    f = _weights(FN, i, k, c, d, 4, M)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for piece in tl.static_range(3):
        part = narrow(f, tl.bfloat16)
        tl.store(PIECES + ((piece * MP + i) * d + c) * 4 + k, part, mask=c < d)
        f -= widen(part)


@triton.jit(do_not_specialize=["N", "each"])
def _statistics_bf16(
    OUT,
    H,
    POST,
    COMB,
    PIECES,
    NEW,
    PART,
    each,
    N,
    d: tl.constexpr,
    n: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """`_statistics_many` for n = 4 bf16 streams, on tensor cores: fn is split into three bf16 numbers, so every product
    is exact, and sums are fp32. Column and stream are one axis of the product, c·4 + k."""
    split, first, m = tl.program_id(0), tl.program_id(1) * T, tl.arange(0, MP)[None, :]
    t, past = tl.arange(0, T)[:, None], first.to(tl.int64)
    inside, w = t < N - first, ()
    H, NEW, OUT, POST, COMB = H + past * 4 * d, NEW + past * 4 * d, OUT + past * d, POST + past * 4, COMB + past * 16
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if MERGES:
        w = coefficients(POST, COMB, tl.arange(0, T), tl.arange(0, T) < N - first, 4, True)
    products, squares = tl.zeros((T, MP), tl.float32), tl.zeros((T, C), tl.float32)
    for chunk in range(split * each, (split + 1) * each):
        c, i = (chunk * C + tl.arange(0, C))[None, :], (chunk * 4 * C + tl.arange(0, 4 * C))[:, None]
        live, f, h, x = inside & (c < d), (), (), ()
        for k in tl.static_range(4):  # read for the last time, so it should not evict the new streams from the L2
            h = h + (
                tl.load(H + (t * 4 + k) * d + c, mask=live, other=0.0, eviction_policy="evict_first" if MERGES else ""),
            )
        if MERGES:
            out = tl.load(OUT + t * d + c, mask=live, other=0.0, eviction_policy="evict_first")
        for piece in tl.static_range(3):
            f = f + (tl.load(PIECES + (piece * MP + m) * 4 * d + i, mask=i < 4 * d, other=0.0),)
        if MERGES:
            for k in tl.static_range(4):
                x = x + (narrow(mixed(h, out, w, k, 4), tl.bfloat16),)
                tl.store(NEW + (t * 4 + k) * d + c, x[k], mask=live)
        else:
            x = h
        for k in tl.static_range(4):
            squares += widen(x[k]) * widen(x[k])
        y = tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), [T, 4 * C])
        for piece in tl.static_range(3):
            products = _summed(y, f[2 - piece], products)
    part = tl.where(m == n, tl.sum(squares, 1)[:, None], products)
    tl.store(PART + (split.to(tl.int64) * N + past + t) * MP + m, part, mask=inside)
