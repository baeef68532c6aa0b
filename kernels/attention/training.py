"""Attention over whole sequences, differentiable.

Queries of a tile of tokens share their keys (one latent for all heads), so a tile is tokens × heads rows against one
block of window rows or entries at a time, in the manner of flash attention: only the selection mask has size T × n. The
sink starts the running maximum with denominator 1. On a host processor the same function is computed with plain masks:
that form is the definition of the kernels.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.errors import UnsupportedInput

TOKENS, KEYS = 16, 64  # queries, heads included, of a tile


def sparse_attention(
    q, window, band, entries, mask, sink, scale: float, complete: bool = False, together: int = 1
) -> torch.Tensor:
    """Window ∪ entries. q [B·T, H, D]; window [B·T, D]; band: B, T, window, ratio (`dsv4.cache.sequence.Band`); entries
    [B, n, D] or None; mask uint8 [B, T, n] of the selected ones, None for all visible; sink fp32 [H].
    Returns [B·T, H, D] in q.dtype.
    """
    B, T, (_, H, D) = band.B, band.T, q.shape
    if entries is None or entries.shape[1] == 0:
        entries, mask = q.new_zeros(B, 0, D), None
    attend = _Attention.apply if q.is_cuda else masked_attention
    return attend(
        q.view(B, T, H, D),
        window.view(B, T, D),
        entries.to(q.dtype),
        mask,
        sink,
        scale,
        band.window,
        max(1, band.ratio),
    ).view(B * T, H, D)


def hca_attention(q, window, band, entries, visible, sink, scale: float, complete: bool = False) -> torch.Tensor:
    """Window ∪ every visible entry: `sparse_attention` without a mask. q [B, T, H, D]; same shape returned."""
    return sparse_attention(q.flatten(0, 1), window, band, entries, None, sink, scale).view(q.shape)


def masked_attention(q, kv, entries, mask, sink, scale: float, window: int, ratio: int) -> torch.Tensor:
    """The definition, with masks of size T × (T + n). q [B, T, H, D], kv [B, T, D], entries [B, n, D] → [B, T, H,
    D]."""
    B, T, H, _ = q.shape
    keys = torch.cat((kv, entries), 1).float()
    t, n = torch.arange(T, device=q.device), entries.shape[1]
    near = (t <= t[:, None]) & (t > t[:, None] - window)
    far = torch.arange(n, device=q.device) < (t[:, None] + 1) // ratio
    seen = torch.cat((near.expand(B, T, T), far.expand(B, T, n) if mask is None else far & mask.bool()), -1)
    logits = torch.einsum("bthd,bkd->bthk", q.float(), keys) * scale
    logits = logits.masked_fill(~seen.unsqueeze(2), float("-inf"))
    logits = torch.cat((logits, sink.view(1, 1, H, 1).expand(B, T, H, 1)), -1)
    return torch.einsum("bthk,bkd->bthd", torch.softmax(logits, -1)[..., :-1], keys).to(q.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, entries, mask, sink, scale, window, ratio):
        B, T, H, D = q.shape
        if TOKENS * H < 16 or H & (H - 1) or D & (D - 1) or D < 16:
            raise UnsupportedInput(
                f"training attention takes powers of two of heads and dims (at least 16); found {H} and {D}"
            )
        q, kv, entries = q.contiguous(), kv.contiguous(), entries.contiguous()
        out, lse = torch.empty_like(q), torch.empty(B, T, H, dtype=torch.float32, device=q.device)
        n = entries.shape[1]
        ratio = ratio if n else 1 << 30  # no query sees an entry
        _forward[(triton.cdiv(T, TOKENS), B)](
            q,
            kv,
            entries,
            q if mask is None else mask,
            sink,
            out,
            lse,
            T,
            n,
            scale,
            window,
            ratio,
            H,
            D,
            TOKENS,
            KEYS,
            mask is not None,
            num_warps=4,
            num_stages=2,
        )
        ctx.save_for_backward(q, kv, entries, mask, sink, out, lse)
        ctx.args = scale, window, ratio
        return out

    @staticmethod
    def backward(ctx, grad):
        q, kv, entries, mask, sink, out, lse = ctx.saved_tensors
        scale, window, ratio = ctx.args
        (B, T, H, D), n = q.shape, entries.shape[1]
        grad = grad.contiguous()
        delta, dq = torch.empty_like(lse), torch.empty_like(q)
        dkv = torch.empty_like(kv)
        dentries = torch.zeros(entries.shape, dtype=torch.float32, device=q.device)
        common = (scale, window, ratio, H, D, TOKENS, KEYS)
        _backward_queries[(triton.cdiv(T, TOKENS), B)](
            q,
            kv,
            entries,
            q if mask is None else mask,
            out,
            lse,
            grad,
            delta,
            dq,
            T,
            n,
            *common,
            mask is not None,
            num_warps=4,
            num_stages=2,
        )
        _backward_window[(triton.cdiv(T, KEYS), B)](q, kv, lse, grad, delta, dkv, T, *common, num_warps=4, num_stages=2)
        if n:
            tiles = triton.cdiv(n, KEYS)
            splits = max(1, min(triton.cdiv(T, TOKENS), 1024 // (B * tiles)))
            _backward_entries[(tiles, splits, B)](
                q,
                entries,
                q if mask is None else mask,
                lse,
                grad,
                delta,
                dentries,
                T,
                n,
                splits,
                *common,
                mask is not None,
                num_warps=4,
                num_stages=2,
            )
        dsink = -(torch.exp(sink - lse) * delta).sum((0, 1))
        return dq, dkv, dentries.to(entries.dtype), None, dsink, None, None, None


@triton.jit
def _forward(
    Q,
    KV,
    E,
    MASK,
    SINK,
    OUT,
    LSE,
    T,
    n,
    scale,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
):
    t0, b = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    row, d, col = tl.arange(0, BT * H), tl.arange(0, D), tl.arange(0, BN)
    t, h = t0 + row // H, row % H
    rows = (b * T + t0) * H + row
    q = tl.load(Q + rows[:, None] * D + d[None, :], mask=t[:, None] < T, other=0.0)
    m = tl.load(SINK + h).to(tl.float32)  # the sink is a key without a value: exp(sink − m) = 1
    l = tl.full((BT * H,), 1.0, tl.float32)
    acc = tl.zeros((BT * H, D), tl.float32)
    for j0 in range(tl.maximum(t0 - W + 1, 0) // BN * BN, tl.minimum(t0 + BT, T), BN):
        j = j0 + col
        k = tl.load(KV + (b * T + j)[:, None] * D + d[None, :], mask=j[:, None] < T, other=0.0)
        seen = (j[None, :] <= t[:, None]) & (j[None, :] > t[:, None] - W)
        s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        p, keep = tl.exp(s - top[:, None]), tl.exp(m - top)
        l = l * keep + tl.sum(p, 1)
        acc = acc * keep[:, None] + tl.dot(p.to(k.dtype), k)
        m = top
    for e0 in range(0, (tl.minimum(t0 + BT, T)) // RATIO, BN):
        e = e0 + col
        k = tl.load(E + (b * n + e)[:, None] * D + d[None, :], mask=e[:, None] < n, other=0.0)
        seen = e[None, :] < ((t + 1) // RATIO)[:, None]
        if MASKED:
            seen = seen & _selected(MASK, b, t0, e, T, n, H, BT, BN)
        s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        p, keep = tl.exp(s - top[:, None]), tl.exp(m - top)
        l = l * keep + tl.sum(p, 1)
        acc = acc * keep[:, None] + tl.dot(p.to(k.dtype), k)
        m = top
    tl.store(OUT + rows[:, None] * D + d[None, :], (acc / l[:, None]).to(OUT.dtype.element_ty), mask=t[:, None] < T)
    tl.store(LSE + rows, m + tl.log(l), mask=t < T)


@triton.jit
def _selected(MASK, b, t0, e, T, n, H: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr):
    """Mask of a tile, [BT·H, BN]: one byte a token and entry, for all heads."""
    token = t0 + tl.arange(0, BT)
    chosen = tl.load(
        MASK + (b * T + token)[:, None] * n + e[None, :], mask=(token[:, None] < T) & (e[None, :] < n), other=0
    )
    return tl.reshape(tl.broadcast_to((chosen != 0)[:, None, :], (BT, H, BN)), (BT * H, BN))


@triton.jit
def _backward_queries(
    Q,
    KV,
    E,
    MASK,
    OUT,
    LSE,
    GRAD,
    DELTA,
    DQ,
    T,
    n,
    scale,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
):
    t0, b = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    row, d, col = tl.arange(0, BT * H), tl.arange(0, D), tl.arange(0, BN)
    t = t0 + row // H
    rows = (b * T + t0) * H + row
    at, live = rows[:, None] * D + d[None, :], t[:, None] < T
    q = tl.load(Q + at, mask=live, other=0.0)
    grad = tl.load(GRAD + at, mask=live, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * tl.load(OUT + at, mask=live, other=0.0).to(tl.float32), 1)
    tl.store(DELTA + rows, delta, mask=t < T)
    lse = tl.load(LSE + rows, mask=t < T, other=float("inf"))
    dq = tl.zeros((BT * H, D), tl.float32)
    for j0 in range(tl.maximum(t0 - W + 1, 0) // BN * BN, tl.minimum(t0 + BT, T), BN):
        j = j0 + col
        k = tl.load(KV + (b * T + j)[:, None] * D + d[None, :], mask=j[:, None] < T, other=0.0)
        seen = (j[None, :] <= t[:, None]) & (j[None, :] > t[:, None] - W)
        p = tl.exp(tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf")) - lse[:, None])
        ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None]) * scale
        dq += tl.dot(ds.to(k.dtype), k)
    for e0 in range(0, (tl.minimum(t0 + BT, T)) // RATIO, BN):
        e = e0 + col
        k = tl.load(E + (b * n + e)[:, None] * D + d[None, :], mask=e[:, None] < n, other=0.0)
        seen = e[None, :] < ((t + 1) // RATIO)[:, None]
        if MASKED:
            seen = seen & _selected(MASK, b, t0, e, T, n, H, BT, BN)
        p = tl.exp(tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf")) - lse[:, None])
        ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None]) * scale
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(DQ + at, dq.to(DQ.dtype.element_ty), mask=live)


@triton.jit
def _key_gradient(Q, GRAD, LSE, DELTA, k, seen, b, t0, T, scale, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr):
    """The contribution of one tile of queries to the gradient of keys k [BN, D]; keys are values too. seen [BT·H,
    BN]."""
    row, d = tl.arange(0, BT * H), tl.arange(0, D)
    t = t0 + row // H
    rows = (b * T + t0) * H + row
    at, live = rows[:, None] * D + d[None, :], t[:, None] < T
    q = tl.load(Q + at, mask=live, other=0.0)
    grad = tl.load(GRAD + at, mask=live, other=0.0)
    lse = tl.load(LSE + rows, mask=t < T, other=float("inf"))
    delta = tl.load(DELTA + rows, mask=t < T, other=0.0)
    p = tl.exp(tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf")) - lse[:, None])
    ds = p * (tl.dot(grad, tl.trans(k)) - delta[:, None]) * scale
    return tl.dot(tl.trans(p.to(k.dtype)), grad) + tl.dot(tl.trans(ds.to(k.dtype)), q)


@triton.jit
def _backward_window(
    Q,
    KV,
    LSE,
    GRAD,
    DELTA,
    DKV,
    T,
    scale,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    j0, b = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    j, d = j0 + tl.arange(0, BN), tl.arange(0, D)
    at, live = (b * T + j)[:, None] * D + d[None, :], j[:, None] < T
    k = tl.load(KV + at, mask=live, other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    for t0 in range(j0 // BT * BT, tl.minimum(j0 + BN + W - 1, T), BT):
        t = t0 + tl.arange(0, BT * H) // H
        seen = (j[None, :] <= t[:, None]) & (j[None, :] > t[:, None] - W)
        dk += _key_gradient(Q, GRAD, LSE, DELTA, k, seen, b, t0, T, scale, H, D, BT)
    tl.store(DKV + at, dk.to(DKV.dtype.element_ty), mask=live)


@triton.jit
def _backward_entries(
    Q,
    E,
    MASK,
    LSE,
    GRAD,
    DELTA,
    DE,
    T,
    n,
    splits,
    scale,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
):
    e0, split, b = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2).to(tl.int64)
    e, d = e0 + tl.arange(0, BN), tl.arange(0, D)
    at, live = (b * n + e)[:, None] * D + d[None, :], e[:, None] < n
    k = tl.load(E + at, mask=live, other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    first = (RATIO * (e0 + 1) - 1) // BT + split  # no earlier query sees any of these entries
    for tile in range(first, tl.cdiv(T, BT), splits):
        t0 = tile * BT
        t = t0 + tl.arange(0, BT * H) // H
        seen = (e[None, :] < ((t + 1) // RATIO)[:, None]) & (t[:, None] < T)
        if MASKED:
            seen = seen & _selected(MASK, b, t0, e, T, n, H, BT, BN)
        dk += _key_gradient(Q, GRAD, LSE, DELTA, k, seen, b, t0, T, scale, H, D, BT)
    tl.atomic_add(DE + at, dk, mask=live)
