"""Second mHC kernel on a GPU: products added up, streams collapsed and normalised, the matrix made doubly stochastic.

Collapsing needs n numbers of a token, Sinkhorn's iteration the others. So some programs collapse and others iterate,
and neither kind waits for the other.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.hyper_connections.triton_statistics import Parts
from dsv4.kernels.launch import capability, dependent_launch, next_power, processors
from dsv4.kernels.quantize.coded import BLOCK, FEWEST, STREAMED, CodedRows, RoundedRows, scales_of
from dsv4.kernels.quantize.triton_codes import INTERPRETED, e4m3_blocks, fp8_blocks, narrow, rounded, widen

MOST = 32  # tokens of one program of Sinkhorn's, at most
ADDED = 4096  # numbers of parts that such a program loads at a time
HELD = 128  # numbers of the streams that a thread holds while the products are added up
WARPS = 4  # programs of Sinkhorn's iteration, whose threads all do the same: more would queue for the reciprocal units


def merge(
    streams: torch.Tensor,
    parts: Parts,
    scale: torch.Tensor,
    base: torch.Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    weight: torch.Tensor | None,
    rms_eps: float,
    head: bool = False,
    coded: bool = False,
    rounds: bool = False,
):
    """(y [N, d], post fp32 [N, n], comb fp32 [N, n, n]) of streams [N, n, d] (N ≥ 1) and their parts.

    y is normalised by weight [d] unless that is None. A head has neither post nor comb: they are None. coded: y is
    `CodedRows` where products take codes; rounds: `RoundedRows` where they do not round it by themselves.
    """
    (N, n, d), device = streams.shape, streams.device
    splits, _, MP = parts.data.shape
    y, post, comb = torch.empty(N, d, dtype=streams.dtype, device=device), None, None
    block = min(MOST, next_power(triton.cdiv(N, processors(device))))
    blocks = 0 if head else triton.cdiv(N, block)
    if not head:
        post, comb = (torch.empty(N, width, dtype=torch.float32, device=device) for width in (n, n * n))
    codes = scales = None
    if coded and N >= FEWEST and d % BLOCK == 0 and capability(device)[0] == 9:
        codes, scales = torch.empty(N, d, dtype=torch.uint8, device=device), scales_of(y)
    elif rounds and N > STREAMED and d % BLOCK == 0:
        codes = torch.empty_like(y)
    B, split_block = next_power(d), next_power(splits)
    warps, pdl = min(16, max(WARPS, n * B // (32 * HELD))), dependent_launch(device)
    _merge[(blocks + N,)](
        streams,
        parts.data,
        scale,
        base,
        streams if weight is None else weight,
        y,
        codes,
        scales,
        0 if scales is None else scales.stride(0),
        post,
        comb,
        N,
        splits,
        blocks,
        iters,
        eps,
        norm_eps,
        rms_eps,
        d,
        n,
        parts.products,
        MP,
        min(split_block, max(1, ADDED // (block * MP))),
        min(split_block, 128),
        block,
        B,
        n * B <= warps * 32 * HELD,
        not head,
        weight is not None,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    x = y if codes is None else RoundedRows(y, codes) if scales is None else CodedRows(y, codes, scales)
    return x, post, comb if head else comb.view(N, n, n)


@triton.jit
def reciprocal(x):
    """1/x to about an ulp; x > 0. Sinkhorn's steps correct each other's rounding, and each waits for the one before it,
    so speed matters."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit(do_not_specialize=["N", "splits", "blocks", "iters", "scales_stride"])
def _merge(
    H,
    PART,
    SCALE,
    BASE,
    WEIGHT,
    Y,
    CODES,
    SCALES,
    scales_stride,
    POST,
    COMB,
    N,
    splits,
    blocks,
    iters,
    eps,
    norm_eps,
    rms_eps,
    d: tl.constexpr,
    n: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    MIXED: tl.constexpr,
    COLLAPSED: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    HOLDS: tl.constexpr,
    MIXES: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights are loaded before the wait for the first kernel (programmatic dependent launch), everything else after
    it. MIXED, COLLAPSED: splits that a program of either kind loads at a time."""
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    if program < blocks:
        if MIXES:
            _mix(PART, SCALE, BASE, POST, COMB, program, N, splits, iters, eps, norm_eps, d, n, M, MP, MIXED, T, PDL)
    else:  # the last tokens first: the last results of the first kernel may still be in the L2
        _collapse(
            H,
            PART,
            SCALE,
            BASE,
            WEIGHT,
            Y,
            CODES,
            SCALES,
            scales_stride,
            N - 1 - (program - blocks),
            N,
            splits,
            eps,
            norm_eps,
            rms_eps,
            d,
            n,
            MP,
            COLLAPSED,
            B,
            HOLDS,
            NORM,
            PDL,
        )


@triton.jit
def _collapse(
    H,
    PART,
    SCALE,
    BASE,
    WEIGHT,
    Y,
    CODES,
    SCALES,
    scales_stride,
    token,
    N,
    splits,
    eps,
    norm_eps,
    rms_eps,
    d: tl.constexpr,
    n: tl.constexpr,
    MP: tl.constexpr,
    GROUP: tl.constexpr,
    B: tl.constexpr,
    HOLDS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = Σ_j (σ(m[j]·scale₀ + base[j]) + eps)·h[j] of one token, normalised if NORM; with CODES [N, d] also
    rounded to FP8: numbers, or codes uint8 with SCALES fp32 [d / 128, N]."""
    token, i, h, bases, scale, weight = token.to(tl.int64), tl.arange(0, B), (), (), tl.load(SCALE), 0.0
    for j in tl.static_range(n):
        bases = bases + (tl.load(BASE + j),)
    if NORM:
        weight = tl.load(WEIGHT + i, mask=i < d, other=0.0)
    if PDL:
        gdc_wait()
    if HOLDS:
        for j in tl.static_range(n):
            h = h + (tl.load(H + (token * n + j) * d + i, mask=i < d, other=0.0),)
    total = _totals(PART, token + tl.arange(0, 1), N, splits, MP, GROUP, 16 if n >= 8 else 8)
    # F.linear(x, fn).mul_(x.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_())
    r = tl.rsqrt(tl.sum(_number(total, n), 0) / (n * d) + norm_eps)
    y = tl.zeros((B,), tl.float32)
    for j in tl.static_range(n):
        if HOLDS:
            x = h[j]
        else:
            x = tl.load(H + (token * n + j) * d + i, mask=i < d, other=0.0)
        # pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        y += (tl.sigmoid(tl.sum(_number(total, j), 0) * r * scale + bases[j]) + eps) * widen(x)
    if NORM:
        y = rounded(y, Y.dtype.element_ty)  # the collapse and the norm are two operations
        y *= tl.rsqrt(tl.sum(y * y, 0) / d + rms_eps)
        y *= widen(weight)
    y = narrow(y, Y.dtype.element_ty)
    tl.store(Y + token * d + i, y, mask=i < d)
    if CODES is not None and SCALES is None:
        numbers = tl.reshape(fp8_blocks(widen(y)[None, :], d, 1, B, 128), [B])
        tl.store(CODES + token * d + i, narrow(numbers, y.dtype), mask=i < d)
    if SCALES is not None:
        codes, factors = e4m3_blocks(tl.reshape(widen(y), [B // 128, 128]))
        block = tl.arange(0, B // 128)
        tl.store(CODES + token * d + i, tl.reshape(codes, [B]), mask=i < d)
        tl.store(SCALES + block * scales_stride + token, factors, mask=block < d // 128)


@triton.jit
def _totals(PART, t, N, splits, MP: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """The first WIDTH numbers of tokens t int64 [T], all parts added up: fp32 [T, WIDTH]."""
    i, total = tl.arange(0, WIDTH)[None, None, :], tl.zeros((t.shape[0], WIDTH), tl.float32)
    for start in range(0, splits, GROUP):
        s = start + tl.arange(0, GROUP)[:, None, None]
        live = (s < splits) & (t[None, :, None] < N)
        part = tl.load(PART + (s * N + t[None, :, None]) * MP + i, mask=live, other=0.0)
        total += tl.sum(part, 0)
    return total


@triton.jit
def _number(total, i: tl.constexpr):
    """Column i of a tile [T, W]: fp32 [T]. From here on every thread has its own copy of what it needs."""
    return tl.sum(tl.where(tl.arange(0, total.shape[1])[None, :] == i, total, 0.0), 1)


@triton.jit
def _mix(
    PART,
    SCALE,
    BASE,
    POST,
    COMB,
    block,
    N,
    splits,
    iters,
    eps,
    norm_eps,
    d: tl.constexpr,
    n: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    """post and comb of T tokens. Each number of a token becomes a variable of its own, so no step needs another
    thread."""
    t, bases, scale1, scale2 = block.to(tl.int64) * T + tl.arange(0, T), (), tl.load(SCALE + 1), tl.load(SCALE + 2)
    for i in tl.static_range(n, M):
        bases = bases + (tl.load(BASE + i),)
    if PDL:
        gdc_wait()
    total, live, K = _totals(PART, t, N, splits, MP, GROUP, MP), t < N, ()
    r = tl.rsqrt(_number(total, n) / (n * d) + norm_eps)
    for i in tl.static_range(n * n):
        K = K + (_number(total, 2 * n + 1 + i) * r * scale2 + bases[n + i],)
    # post = 2 * torch.sigmoid(m[:, n:2 * n] * scale[1] + base[n:2 * n])
    for k in tl.static_range(n):
        tl.store(POST + t * n + k, 2 * tl.sigmoid(_number(total, n + 1 + k) * r * scale1 + bases[k]), mask=live)
    K = _softmax(K, eps, n)
    u, v = _sinkhorn(K, iters, eps, n)
    for j in tl.static_range(n):
        for k in tl.static_range(n):
            tl.store(COMB + (t * n + j) * n + k, K[j * n + k] * (u[j] * v[k]), mask=live)


@triton.jit
def _softmax(logits, eps, n: tl.constexpr):
    """C = torch.softmax(logits, -1) + eps of an n × n matrix as a tuple."""
    C = ()
    for j in tl.static_range(n):
        top = logits[j * n]
        for k in tl.static_range(1, n):
            top = tl.maximum(top, logits[j * n + k])
        total = tl.zeros_like(top)
        row = ()
        for k in tl.static_range(n):
            row = row + (tl.exp(logits[j * n + k] - top),)
            total += row[k]
        scale = reciprocal(total)
        for k in tl.static_range(n):
            C = C + (row[k] * scale + eps,)
    return C


@triton.jit
def _sinkhorn(K, iters, eps, n: tl.constexpr):
    """u, v such that C[j, k] = K[j, k]·u[j]·v[k] is the result of Sinkhorn's iteration on K, starting and ending on a
    column step.

    With C = K/(a·b), a row step C ← C/(rowsum + eps) is a[j] ← Σ_k K[j, k]/b[k] + eps·a[j], a column step has the roles
    exchanged: only 2n numbers change.
    """
    a, b = (), ()
    for k in tl.static_range(n):
        # C = C / (C.sum(-2, keepdim=True) + eps)
        s = K[k]
        for j in tl.static_range(1, n):
            s += K[j * n + k]
        a, b = a + (tl.full(s.shape, 1.0, tl.float32),), b + (s + eps,)
    for _ in range(1, iters):
        # C = C / (C.sum(-1, keepdim=True) + eps); C = C / (C.sum(-2, keepdim=True) + eps)
        v = _inverted(b, n)
        a = _scaled_sums(K, v, a, eps, n, n, 1)
        u = _inverted(a, n)
        b = _scaled_sums(K, u, b, eps, n, 1, n)
    return _inverted(a, n), _inverted(b, n)


@triton.jit
def _inverted(x, n: tl.constexpr):
    y = ()
    for i in tl.static_range(n):
        y = y + (reciprocal(x[i]),)
    return y


@triton.jit
def _scaled_sums(K, v, old, eps, n: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Σ_i K[o·OUTER + i·INNER]·v[i] + eps·old[o] for o of n: over columns (OUTER = n, INNER = 1) or rows (1, n)."""
    sums = ()
    for o in tl.static_range(n):
        s = eps * old[o]
        for i in tl.static_range(n):
            s += K[o * OUTER + i * INNER] * v[i]
        sums = sums + (s,)
    return sums
