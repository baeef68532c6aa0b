"""What mHC kernels of few and of many tokens have in common: the merge of a sublayer's output into the streams, and
rows of fn."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.collectives.triton_one_shot import operands
from dsv4.kernels.collectives.unsummed import Unsummed, sum_now
from dsv4.kernels.quantize.triton_codes import widen


def rows_of(out: torch.Tensor | Unsummed, dtype: torch.dtype) -> tuple[tuple, int]:
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
def fn_rows(FN, i, k, c, d: tl.constexpr, n: tl.constexpr, M: tl.constexpr):
    """Row k of fn at columns c, for place i of a part: zero at n, where Σx² is, and beyond the products."""
    row = i - (i > n).to(tl.int32)
    return tl.load(FN + (row * n + k) * d + c, mask=(i != n) & (i <= M) & (c < d), other=0.0)
