"""Biases, rotation by halves, and the write of rows into the cache on a GPU: one kernel for queries, keys and
values."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, turn, widen
from dsv4.kernels.rotary_rows import reference

MANY, ROWS = 1024, 16  # tokens from which on a program takes several tokens of one head, and how many


def rotary_rows(q, k, v, biases, cis, keys, values, start) -> torch.Tensor:
    require_device("rotary_rows", q, k, v, cis, keys, values, start)
    (B, KV, S, D), N = keys.shape, q.shape[0]
    H = q.shape[1] // D
    if (
        D % 2
        or N % B
        or q.shape[1] != H * D
        or k.shape != (N, KV * D)
        or v.shape != k.shape
        or cis.shape != (N, D // 2)
    ):
        raise UnsupportedInput(
            f"rotary_rows: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and cis {tuple(cis.shape)} do "
            f"not fit caches {tuple(keys.shape)}"
        )
    if not (
        keys.is_contiguous() and values.is_contiguous() and keys.dtype is values.dtype and values.shape == keys.shape
    ):
        raise UnsupportedInput(
            f"rotary_rows: keys and values must be contiguous and alike; found strides {keys.stride()} {keys.dtype} "
            f"and {values.stride()} {values.dtype}"
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(B, N // B, H, D, dtype=q.dtype, device=q.device)
    if not N:
        return out
    turns, R, pdl = (
        torch.view_as_real(cis.resolve_conj()).contiguous(),
        ROWS if N >= MANY else 1,
        dependent_launch(q.device),
    )
    P = next_power(D // 2)
    strides = (x.stride(0) for x in (q, k, v))
    _rotary_rows[(triton.cdiv(N, R), H + 2 * KV)](
        q,
        k,
        v,
        *((q, k, v) if biases is None else biases),
        turns,
        keys,
        values,
        start,
        out,
        N,
        N // B,
        *strides,
        S,
        H,
        KV,
        D,
        biases is not None,
        R,
        P,
        pdl,
        num_warps=max(1, min(4, R * P // 64)),
        launch_pdl=pdl,
    )
    return out


rotary_rows.__doc__ = reference.rotary_rows.__doc__


@triton.jit
def halves(X, BIAS, n, i, live, stride, head, D: tl.constexpr, BIASED: tl.constexpr):
    """Both halves [R, P] of a head of rows n, biases added."""
    at = head * D + i
    a = widen(tl.load(X + n[:, None] * stride + at[None, :], mask=live, other=0.0))
    b = widen(tl.load(X + n[:, None] * stride + (at + D // 2)[None, :], mask=live, other=0.0))
    if BIASED:
        a += widen(tl.load(BIAS + at, mask=i < D // 2, other=0.0))[None, :]
        b += widen(tl.load(BIAS + at + D // 2, mask=i < D // 2, other=0.0))[None, :]
    return a, b


@triton.jit
def turned(a, b, CIS, n, i, live, D: tl.constexpr):
    """x_i + i·x_{i+D/2} times cis_i."""
    at = CIS + n[:, None] * D + 2 * i[None, :]
    # torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return turn(a, b, tl.load(at, mask=live, other=0.0), tl.load(at + 1, mask=live, other=0.0))


@triton.jit
def put(Y, row, a, b, i, live, D: tl.constexpr):
    at = Y + row[:, None] * D + i[None, :]
    tl.store(at, narrow(a, Y.dtype.element_ty), mask=live)
    tl.store(at + D // 2, narrow(b, Y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["N", "tokens"])
def _rotary_rows(
    Q,
    K,
    V,
    BQ,
    BK,
    BV,
    CIS,
    KEYS,
    VALUES,
    START,
    OUT,
    N,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    slots,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BIASED: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, h): R tokens of query head h, or of key or value head h − H. P: D/2 padded to a power of two."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    n, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, P)
    live = (n[:, None] < N) & (i[None, :] < D // 2)
    if head < H:
        a, b = halves(Q, BQ, n, i, live, q_stride, head, D, BIASED)
        a, b = turned(a, b, CIS, n, i, live, D)
        put(OUT, n * H + head, a, b, i, live, D)
    else:
        row = n // tokens
        position = tl.load(START + row, mask=n < N, other=0) + n % tokens
        if head < H + KV:
            a, b = halves(K, BK, n, i, live, k_stride, head - H, D, BIASED)
            a, b = turned(a, b, CIS, n, i, live, D)
            put(KEYS, (row * KV + head - H) * slots + position, a, b, i, live, D)
        else:
            a, b = halves(V, BV, n, i, live, v_stride, head - H - KV, D, BIASED)
            put(VALUES, (row * KV + head - H - KV) * slots + position, a, b, i, live, D)
