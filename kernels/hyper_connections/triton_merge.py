"""Second mHC kernel on a GPU: products added up, streams collapsed and normalised, the matrix made doubly stochastic.

Collapsing needs n numbers of a token, Sinkhorn's iteration the others. The two do not wait for each other: some programs
do the one, the others the other.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.hyper_connections.triton_statistics import FEW_SPLITS, MANY_SPLITS, Parts, overlaps
from kernels.launch import next_power
from kernels.quantize.triton_codes import INTERPRETED, narrow, rounded, widen

FEW_BLOCK, MANY_BLOCK = 1, 32  # tokens of one program of Sinkhorn's
HELD = 128      # numbers of the streams that a thread holds while the products are added up


def merge(streams: torch.Tensor, parts: Parts, scale: torch.Tensor, base: torch.Tensor, iters: int, eps: float, norm_eps: float,
          weight: torch.Tensor | None, rms_eps: float, head: bool = False):
    """(y [N, d], post fp32 [N, n], comb fp32 [N, n, n]) of streams [N, n, d] (N ≥ 1) and their parts.

    y is normalised by weight [d] unless that is None. A head has neither post nor comb: they are None.
    """
    (N, n, d), device = streams.shape, streams.device
    y = torch.empty(N, d, dtype=streams.dtype, device=device)
    post = comb = None
    totals = parts.data  # stands for what a head does not need
    blocks, block = 0, FEW_BLOCK if parts.few else MANY_BLOCK
    if not head:
        post, comb, totals = (torch.empty(N, width, dtype=torch.float32, device=device) for width in (n, n * n, parts.padded))
        blocks = triton.cdiv(N, block)
    B = next_power(d)
    warps, overlap = min(16, max(4, n * B // (32 * HELD))), overlaps(device)
    _merge[(blocks + N,)](streams, parts.data, scale, base, streams if weight is None else weight, y, post, comb, totals, N,
                          parts.splits, blocks, iters, eps, norm_eps, rms_eps, d, n, parts.products, parts.padded, parts.few,
                          parts.splits == FEW_SPLITS, FEW_SPLITS if parts.few else MANY_SPLITS, FEW_SPLITS if parts.few else 1,
                          block, B, n * B <= warps * 32 * HELD, not head, weight is not None, overlap, num_warps=warps,
                          **({"launch_pdl": True} if overlap else {}))
    return y, post, comb if head else comb.view(N, n, n)


@triton.jit
def part_of(t, m, s, N, MP: tl.constexpr, FEW: tl.constexpr, SPLITS: tl.constexpr):
    """Offset of the part of token t, product m, split s (see `Parts`)."""
    if FEW:
        at = (t * MP + m) * SPLITS + s
    else:
        at = (s.to(tl.int64) * N + t) * MP + m
    return at


@triton.jit
def reciprocal(x):
    """1/x to an ulp or so; x > 0. Sinkhorn's steps correct one another's rounding, and each waits for the one before it."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit(do_not_specialize=["N", "splits", "blocks", "iters"])
def _merge(H, PART, SCALE, BASE, WEIGHT, Y, POST, COMB, TOTALS, N, splits, blocks, iters, eps, norm_eps, rms_eps,
           d: tl.constexpr, n: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, FEW: tl.constexpr, FULL: tl.constexpr,
           SPLITS: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, B: tl.constexpr, HOLDS: tl.constexpr,
           MIXES: tl.constexpr, NORM: tl.constexpr, OVERLAPS: tl.constexpr):
    """Weights are loaded before the wait for the first kernel (OVERLAPS), everything else after it. FULL: splits are SPLITS."""
    program = tl.program_id(0)
    if program < blocks:
        if MIXES:
            _mix(PART, SCALE, BASE, POST, COMB, TOTALS, program, N, splits, iters, eps, norm_eps, d, n, M, MP, FEW, FULL, GROUP,
                 T, OVERLAPS)
    else:  # the last tokens first: what the first kernel wrote last may still be in the L2
        _collapse(H, PART, SCALE, BASE, WEIGHT, Y, N - 1 - (program - blocks), N, splits, eps, norm_eps, rms_eps, d, n, M, MP,
                  FEW, SPLITS, B, HOLDS, NORM, OVERLAPS)


@triton.jit
def _collapse(H, PART, SCALE, BASE, WEIGHT, Y, token, N, splits, eps, norm_eps, rms_eps, d: tl.constexpr, n: tl.constexpr,
              M: tl.constexpr, MP: tl.constexpr, FEW: tl.constexpr, SPLITS: tl.constexpr, B: tl.constexpr, HOLDS: tl.constexpr,
              NORM: tl.constexpr, OVERLAPS: tl.constexpr):
    """y = Σ_j (σ(m[j]·scale₀ + base[j]) + eps)·h[j] of one token, normalised if NORM."""
    token, i, h, bases, scale, weight = token.to(tl.int64), tl.arange(0, B), (), (), tl.load(SCALE), 0.0
    for j in tl.static_range(n):
        bases = bases + (tl.load(BASE + j),)
    if NORM:
        weight = tl.load(WEIGHT + i, mask=i < d, other=0.0)
    if OVERLAPS:
        gdc_wait()
    if HOLDS:
        for j in tl.static_range(n):
            h = h + (tl.load(H + (token * n + j) * d + i, mask=i < d, other=0.0),)
    # F.linear(x, fn).mul_(x.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_())
    r = tl.rsqrt(_total(PART, token, M, N, splits, MP, FEW, SPLITS) / (n * d) + norm_eps)
    y = tl.zeros((B,), tl.float32)
    for j in tl.static_range(n):
        if HOLDS:
            x = h[j]
        else:
            x = tl.load(H + (token * n + j) * d + i, mask=i < d, other=0.0)
        # pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        logit = _total(PART, token, j, N, splits, MP, FEW, SPLITS) * r * scale + bases[j]
        y += (tl.sigmoid(logit) + eps) * widen(x)
    if NORM:
        y = rounded(y, Y.dtype.element_ty)  # the collapse and the norm are two operations
        y *= tl.rsqrt(tl.sum(y * y, 0) / d + rms_eps)
        y *= widen(weight)
    tl.store(Y + token * d + i, narrow(y, Y.dtype.element_ty), mask=i < d)


@triton.jit
def _total(PART, token, m, N, splits, MP: tl.constexpr, FEW: tl.constexpr, SPLITS: tl.constexpr):
    """Sum of all parts of product m of one token. Every warp takes all of them, 32 at a time, and waits for no other."""
    total = tl.zeros((32,), tl.float32)
    for group in tl.static_range(SPLITS // 32):
        s = group * 32 + tl.arange(0, 32)
        total += tl.load(PART + part_of(token, m, s, N, MP, FEW, SPLITS), mask=s < splits, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _mix(PART, SCALE, BASE, POST, COMB, TOTALS, block, N, splits, iters, eps, norm_eps, d: tl.constexpr, n: tl.constexpr,
         M: tl.constexpr, MP: tl.constexpr, FEW: tl.constexpr, FULL: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr,
         OVERLAPS: tl.constexpr):
    """post and comb of T tokens. Each number of a token becomes a variable of its own, so no step needs another thread."""
    t, m = block.to(tl.int64) * T + tl.arange(0, T), tl.arange(0, MP)
    bases, scale1, scale2 = (), tl.load(SCALE + 1), tl.load(SCALE + 2)
    for i in tl.static_range(n, M):
        bases = bases + (tl.load(BASE + i),)
    if OVERLAPS:
        gdc_wait()
    total = tl.zeros((T, MP, GROUP), tl.float32)
    for start in range(0, splits, GROUP):
        s = start + tl.arange(0, GROUP)[None, None, :]
        at = part_of(t[:, None, None], m[None, :, None], s, N, MP, FEW, GROUP)
        live = (t[:, None, None] < N) & (m[None, :, None] <= M)
        if not FULL:
            live = live & (s < splits)
        total += tl.load(PART + at, mask=live, other=0.0)
    tl.store(TOTALS + t[:, None] * MP + m[None, :], tl.sum(total, 2), mask=t[:, None] < N)
    tl.debug_barrier()  # what other threads of this program have stored is read back number by number
    live, row = t < N, TOTALS + t * MP
    r = tl.rsqrt(tl.load(row + M, mask=live, other=0.0) / (n * d) + norm_eps)
    # post = 2 * torch.sigmoid(m[:, n:2 * n] * scale[1] + base[n:2 * n])
    for k in tl.static_range(n):
        logit = tl.load(row + n + k, mask=live, other=0.0) * r * scale1 + bases[k]
        tl.store(POST + t * n + k, 2 * tl.sigmoid(logit), mask=live)
    K = ()
    for i in tl.static_range(n * n):
        K = K + (tl.load(row + 2 * n + i, mask=live, other=0.0) * r * scale2 + bases[n + i],)
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
        for k in tl.static_range(n):
            C = C + (row[k] / total + eps,)
    return C


@triton.jit
def _sinkhorn(K, iters, eps, n: tl.constexpr):
    """u, v such that C[j, k] = K[j, k]·u[j]·v[k] is what Sinkhorn's iteration makes of K, starting and ending on a column step.

    With C = K/(a·b), a row step C ← C/(rowsum + eps) is a[j] ← Σ_k K[j, k]/b[k] + eps·a[j], a column step the same with
    roles exchanged: only 2n numbers move.
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
