"""First mHC kernel on a GPU: the last sublayer's output into the streams, and partial products of fn with the new streams.

fn is 1.57 MB at d = 4096, too much for one processor to read in time, so programs split d. Each makes its columns of the
new streams, stores them, and leaves its part of the M products and of Σx² behind; the second kernel adds the parts up in
a fixed order. A part is MP numbers a token: M products, then Σx² at M.

Where the GPU can (capability 9), the second kernel is launched while the first runs, and waits for it on the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.launch import capability, next_power, processors
from kernels.quantize.triton_codes import INTERPRETED, narrow, widen

FEW_COLUMNS = 32      # few tokens: columns of a program, at least
FEW_SPLITS = 128      # and programs, at most
FEW_TILE = 16384      # tokens × rows of fn × columns in registers, at most
MANY_TOKENS, MANY_COLUMNS, MANY_SPLITS = 64, 32, 128  # splits: programs of one tile of tokens, at most


class Parts(NamedTuple):
    """fp32 parts of the products: [N, MP, FEW_SPLITS] for few tokens (`few`), [splits, N, MP] for many."""

    data: torch.Tensor
    splits: int
    few: bool
    products: int  # M
    padded: int    # MP


def overlaps(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it waits for has ended."""
    return capability(device)[0] >= 9


def statistics(streams: torch.Tensor, fn: torch.Tensor, merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
               ) -> tuple[torch.Tensor, Parts]:
    """Streams [N, n, d] (N ≥ 1, contiguous), after `mhc_post` with merged = (out, post, comb) unless None, and their parts."""
    (N, n, d), M, device = streams.shape, fn.shape[0], streams.device
    out, post, comb = merged or (streams, fn, fn)
    new = streams if merged is None else torch.empty_like(streams)
    MP, T, overlap = max(16, next_power(M + 1)), next_power(N), overlaps(device)
    columns = max(FEW_COLUMNS, next_power(triton.cdiv(d, FEW_SPLITS)))
    if T * MP * columns <= FEW_TILE:
        splits = triton.cdiv(d, columns)
        data = torch.empty(N, MP, FEW_SPLITS, dtype=torch.float32, device=device)
        _statistics_few[(splits,)](out, streams, post, comb, fn, new, data, N, d, n, M, MP, FEW_SPLITS, merged is not None,
                                   overlap, T, columns, num_warps=8 if T * MP * columns > 4096 else 4)
        return new, Parts(data, splits, True, M, MP)
    tiles, chunks = triton.cdiv(N, MANY_TOKENS), triton.cdiv(d, MANY_COLUMNS)
    each = triton.cdiv(chunks, min(chunks, MANY_SPLITS, max(1, 4 * processors(device) // tiles)))
    splits = triton.cdiv(chunks, each)
    data = torch.empty(splits, N, MP, dtype=torch.float32, device=device)
    if n != 4 or streams.dtype is not torch.bfloat16:
        _statistics_many[(splits, tiles)](out, streams, post, comb, fn, new, data, N, each, d, n, M, MP, merged is not None,
                                          overlap, MANY_TOKENS, MANY_COLUMNS, num_warps=8, num_stages=1)
        return new, Parts(data, splits, False, M, MP)
    pieces = torch.empty(3, MP, 4 * d, dtype=torch.bfloat16, device=device)
    _split_weights[(MP, triton.cdiv(d, 256))](fn, pieces, d, M, MP, 256, num_warps=4)
    # Two programs fit on a processor, so that one loads while the other multiplies.
    registers = {"maxnreg": 128} if capability(device)[0] == 9 else {}
    _statistics_bf16[(splits, tiles)](out, streams, post, comb, pieces, new, data, N, each, d, M, MP, merged is not None,
                                      overlap, MANY_TOKENS, MANY_COLUMNS, num_warps=8, num_stages=2, **registers)
    return new, Parts(data, splits, False, M, MP)


@triton.jit
def coefficients(POST, COMB, t, live, n: tl.constexpr):
    """Of mhc_post for tokens t: (post[0], comb[0, 0], …, comb[n − 1, 0], post[1], …), n + n² tensors."""
    w = ()
    for k in tl.static_range(n):
        w = w + (tl.load(POST + t * n + k, mask=live, other=0.0),)
        for j in tl.static_range(n):
            w = w + (tl.load(COMB + (t * n + j) * n + k, mask=live, other=0.0),)
    return w


@triton.jit
def mixed(h, out, w, k: tl.constexpr, n: tl.constexpr):
    """h'[k] = post[k]·out + Σ_j comb[j, k]·h[j] in fp32: h a tuple of n tiles, out a tile, w from `coefficients`."""
    # torch.baddbmm(post.unsqueeze(-1) * out.unsqueeze(1).float(), comb.transpose(1, 2), streams.float())
    y = w[k * (n + 1)] * widen(out)
    for j in tl.static_range(n):
        y += w[k * (n + 1) + 1 + j] * widen(h[j])
    return y


@triton.jit(do_not_specialize=["N"])
def _statistics_few(OUT, H, POST, COMB, FN, NEW, PART, N, d: tl.constexpr, n: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
                    SPLITS: tl.constexpr, MERGES: tl.constexpr, OVERLAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """All tokens, C columns. Tiles [T, MP, C]; everything is loaded before anything is stored, so that loads need not wait."""
    if OVERLAPS:
        gdc_launch_dependents()
    split = tl.program_id(0)
    t, m, c = tl.arange(0, T)[:, None, None], tl.arange(0, MP)[None, :, None], split * C + tl.arange(0, C)[None, None, :]
    live = (t < N) & (c < d)
    f, h, x = (), (), ()
    for k in tl.static_range(n):
        f = f + (tl.load(FN + (m * n + k) * d + c, mask=(m < M) & (c < d), other=0.0),)
        h = h + (tl.load(H + (t * n + k) * d + c, mask=live, other=0.0),)
    if MERGES:
        out, w = tl.load(OUT + t * d + c, mask=live, other=0.0), coefficients(POST, COMB, t, t < N, n)
        for k in tl.static_range(n):
            x = x + (narrow(mixed(h, out, w, k, n), NEW.dtype.element_ty),)
    else:
        x = h
    products, squares = tl.zeros((T, MP, C), tl.float32), tl.zeros((T, 1, C), tl.float32)
    for k in tl.static_range(n):
        y = widen(x[k])
        products += f[k] * y
        squares += y * y
    part = tl.where(tl.arange(0, MP)[None, :] == M, tl.sum(squares, 2), tl.sum(products, 2))
    token = tl.arange(0, T)[:, None]
    tl.store(PART + (token * MP + tl.arange(0, MP)[None, :]) * SPLITS + split, part, mask=token < N)
    if MERGES:
        for k in tl.static_range(n):
            tl.store(NEW + (t * n + k) * d + c, x[k], mask=live)


@triton.jit(do_not_specialize=["N", "each"])
def _statistics_many(OUT, H, POST, COMB, FN, NEW, PART, N, each, d: tl.constexpr, n: tl.constexpr, M: tl.constexpr,
                     MP: tl.constexpr, MERGES: tl.constexpr, OVERLAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """T tokens, `each` chunks of C columns, in fp32."""
    if OVERLAPS:
        gdc_launch_dependents()
    split, first, m = tl.program_id(0), tl.program_id(1) * T, tl.arange(0, MP)[None, :]
    t, past = tl.arange(0, T)[:, None], first.to(tl.int64)
    inside = t < N - first
    # Bases are advanced to the tile, so that offsets within it are 32 bits.
    H, NEW, OUT, POST, COMB = H + past * n * d, NEW + past * n * d, OUT + past * d, POST + past * n, COMB + past * n * n
    products, squares = tl.zeros((T, MP), tl.float32), tl.zeros((T, C), tl.float32)
    for chunk in range(split * each, (split + 1) * each):
        i = chunk * C + tl.arange(0, C)
        c, live, h, out, w = i[None, :], inside & (i[None, :] < d), (), 0.0, ()
        for k in tl.static_range(n):
            h = h + (tl.load(H + (t * n + k) * d + c, mask=live, other=0.0),)
        if MERGES:
            out, w = tl.load(OUT + t * d + c, mask=live, other=0.0), coefficients(POST, COMB, t, inside, n)
        for k in tl.static_range(n):
            x = h[k]
            if MERGES:
                x = narrow(mixed(h, out, w, k, n), NEW.dtype.element_ty)
                tl.store(NEW + (t * n + k) * d + c, x, mask=live)
            y = widen(x)
            squares += y * y
            f = tl.load(FN + (m * n + k) * d + i[:, None], mask=(m < M) & (i[:, None] < d), other=0.0)
            products = tl.dot(y, f, products, input_precision="ieee")
    part = tl.where(m == M, tl.sum(squares, 1)[:, None], products)
    tl.store(PART + (split.to(tl.int64) * N + past + t) * MP + m, part, mask=inside)


@triton.jit
def _split_weights(FN, PIECES, d: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, B: tl.constexpr):
    """fn fp32 [M, 4, d] → bf16 [3, MP, d, 4]: three numbers with fn's for a sum (24 bits are 3 × 8), zeros from row M on."""
    m, c, k = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)[None, :], tl.arange(0, 4)[:, None]
    f = tl.load(FN + (m * 4 + k) * d + c, mask=(c < d) & (m < M), other=0.0)
    for piece in tl.static_range(3):
        part = narrow(f, tl.bfloat16)
        tl.store(PIECES + ((piece * MP + m) * d + c) * 4 + k, part, mask=c < d)
        f -= widen(part)


@triton.jit(do_not_specialize=["N", "each"])
def _statistics_bf16(OUT, H, POST, COMB, PIECES, NEW, PART, N, each, d: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
                     MERGES: tl.constexpr, OVERLAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """`_statistics_many` for four bf16 streams, on tensor cores: they meet fn as three bf16 numbers, so every product is exact,
    and sums are fp32. Column and stream are one axis of the product, c·4 + k."""
    if OVERLAPS:
        gdc_launch_dependents()
    split, first, m = tl.program_id(0), tl.program_id(1) * T, tl.arange(0, MP)[None, :]
    t, past = tl.arange(0, T)[:, None], first.to(tl.int64)
    inside, w = t < N - first, ()
    H, NEW, OUT, POST, COMB = H + past * 4 * d, NEW + past * 4 * d, OUT + past * d, POST + past * 4, COMB + past * 16
    if MERGES:
        w = coefficients(POST, COMB, t, inside, 4)
    products, squares = tl.zeros((T, MP), tl.float32), tl.zeros((T, C), tl.float32)
    for chunk in range(split * each, (split + 1) * each):
        c, i = (chunk * C + tl.arange(0, C))[None, :], (chunk * 4 * C + tl.arange(0, 4 * C))[:, None]
        live, f, h, x = inside & (c < d), (), (), ()
        for k in tl.static_range(4):  # read for the last time: not to be kept in the L2 at the new streams' cost
            h = h + (tl.load(H + (t * 4 + k) * d + c, mask=live, other=0.0, eviction_policy="evict_first" if MERGES else ""),)
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
            if INTERPRETED:  # its bf16 product returns garbage
                products = tl.dot(widen(y), widen(f[2 - piece]), products, input_precision="ieee")
            else:
                products = tl.dot(y, f[2 - piece], products)
    part = tl.where(m == M, tl.sum(squares, 1)[:, None], products)
    tl.store(PART + (split.to(tl.int64) * N + past + t) * MP + m, part, mask=inside)
