"""First mHC kernel (`triton_statistics`) of more than a few tokens: products of tiles.

For bf16 streams fn is split into three bf16 numbers, so that tensor cores multiply exactly. Many tokens read the split
numbers again and again, so another kernel makes them; of one tile of tokens each program splits its own columns.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.collectives.unsummed import Unsummed, sum_now
from dsv4.kernels.experts.triton_combine import combined
from dsv4.kernels.hyper_connections.triton_mixing import coefficients, fn_rows, mixed, rows_of
from dsv4.kernels.launch import capability, dependent_launch, next_power, processors
from dsv4.kernels.quantize.triton_codes import INTERPRETED, narrow, rounded, widen

TOKENS, COLUMNS, SPLITS = 64, 32, 128
ONCE_COLUMNS = 64  # most columns of a program that reads its part of fn once
ONCE_CAPABILITIES = 0, 9, 10  # the interpreter's, and those of wgmma and tcgen05; others would spill registers


def many(
    out: torch.Tensor | Unsummed,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    new: torch.Tensor,
    MP: int,
) -> torch.Tensor:
    """Parts [splits, N, MP] of the streams [N, n, d], which are `new` or are merged into it first."""
    (N, n, d), M, device = streams.shape, fn.shape[0], streams.device
    pdl = dependent_launch(device)
    tail, options = (N, d, n, M, MP, new is not streams, pdl, TOKENS), dict(num_warps=8, launch_pdl=pdl)
    tiles, chunks = triton.cdiv(N, TOKENS), triton.cdiv(d, COLUMNS)
    on_tensor_cores = n == 4 and streams.dtype is torch.bfloat16
    columns = max(COLUMNS, next_power(triton.cdiv(d, SPLITS)))
    once = tiles == 1 and columns <= ONCE_COLUMNS and capability(device)[0] in ONCE_CAPABILITIES
    if on_tensor_cores and once:
        data = torch.empty(triton.cdiv(d, columns), N, MP, dtype=torch.float32, device=device)
        rows, each = rows_of(out, streams.dtype)
        _statistics_once[(len(data),)](*rows, streams, post, comb, fn, new, data, *tail, columns, each, **options)
        return data
    out = sum_now(out)
    each = triton.cdiv(chunks, min(chunks, SPLITS, max(1, 4 * processors(device) // tiles)))
    data = torch.empty(triton.cdiv(chunks, each), N, MP, dtype=torch.float32, device=device)
    grid, tail = (len(data), tiles), (each, *tail, COLUMNS)
    if not on_tensor_cores:
        _statistics_many[grid](out, streams, post, comb, fn, new, data, *tail, num_stages=1, **options)
        return data
    pieces = torch.empty(3, MP, 4 * d, dtype=torch.bfloat16, device=device)
    _split_weights[(MP, triton.cdiv(d, 256))](fn, pieces, d, M, MP, pdl, 256, num_warps=4, launch_pdl=pdl)
    if capability(device)[0] == 9:  # two programs fit on a multiprocessor, so one loads while the other multiplies
        options["maxnreg"] = 128
    _statistics_bf16[grid](out, streams, post, comb, pieces, new, data, *tail, num_stages=2, **options)
    return data


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
            products = tl.dot(y, fn_rows(FN, m, k, i[:, None], d, n, M), products, input_precision="ieee")
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
    f = fn_rows(FN, m, j // C, split * C + j % C, d, 4, M)  # side by side in memory; the product has them as c·4 + k
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
    f = fn_rows(FN, i, k, c, d, 4, M)
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
