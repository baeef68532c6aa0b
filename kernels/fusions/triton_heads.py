"""Heads on a GPU: norm, rotation and the cache's simulation of a row in one kernel, with the roundings of separate
operations."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions.compositions import INDEX_KEY_BLOCK, KV_BLOCK
from dsv4.kernels.hadamard.triton import check_width
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import fp4_blocks, fp8_blocks, hadamard_rows, narrow, rounded, turn, widen
from dsv4.kernels.rms_norm.triton import MANY, WIDEST, normed
from dsv4.kernels.rope.triton import Turns, turns_of

# Simulations: none, FP8 of main KV, Hadamard and FP4 of index keys.
PLAIN, KV, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KV_COLUMNS, KEY_COLUMNS = tl.constexpr(KV_BLOCK), tl.constexpr(INDEX_KEY_BLOCK)
TILE = 1024  # elements of a program that takes several rows


def query_heads(q: torch.Tensor, cis: torch.Tensor, eps: float) -> torch.Tensor:
    """RoPE(rms(q)) of each head, no weight: q [N, H, D], cis complex64 [N, d/2] → q, overwritten."""
    require_device("query_heads", q, cis)
    return head_rows("query_heads", q, q, None, eps, cis, True, PLAIN.value)


def latent(kv: torch.Tensor, weight: torch.Tensor, eps: float, cis: torch.Tensor, simulate: bool) -> torch.Tensor:
    """RoPE(rms(kv)): kv [N, D], cis complex64 [N, d/2] → [N, D] in kv.dtype; all but rotated dims through FP8 if
    `simulate`."""
    require_device("latent", kv, weight, cis)
    y = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    simulation = (KV if simulate else PLAIN).value
    return head_rows("latent", kv.unsqueeze(1), y.unsqueeze(1), weight, eps, cis, True, simulation).squeeze(1)


def index_queries(q: torch.Tensor, cis: torch.Tensor, simulate: bool) -> torch.Tensor:
    """Index queries [N, H, D], rotated by cis complex64 [N, d/2]; through Hadamard and FP4 if `simulate`. Overwrites
    q."""
    require_device("index_queries", q, cis)
    if simulate:
        check_width(q.shape[-1])
    return head_rows("index_queries", q, q, None, 0.0, cis, False, (KEY if simulate else PLAIN).value)


def checked_turns(name: str, cis: torch.Tensor, rows: int, D: int) -> Turns:
    """Rotations of `rows` rows of D columns, one each or one for all. Raises UnsupportedInput."""
    if 2 * cis.shape[-1] > D or D % 2 or D > WIDEST:
        raise UnsupportedInput(
            f"{name}: rows of {D} columns with {cis.shape[-1]} rotated pairs; expected an even number of "
            f"columns, at most {WIDEST}, and no more pairs than fit"
        )
    return turns_of(cis, torch.Size((rows,)))


def padded(D: int, simulation: int) -> int:
    """Columns of a tile: a power of two that whole blocks of the simulation divide."""
    return max(next_power(D), KV_BLOCK) if simulation == KV.value else next_power(D)


def head_rows(name, x, y, weight, eps, cis, norm: bool, simulation: int) -> torch.Tensor:
    """x, y [N, H, D], the same tensor or not → y."""
    N, H, D = x.shape
    turns = checked_turns(name, cis, N, D)
    if not x.numel():
        return y
    if x.stride(2) != 1 and D > 1:
        raise UnsupportedInput(f"{name}: columns of a row must be adjacent; found strides {tuple(x.stride())}")
    B = padded(D, simulation)
    R = max(1, TILE // B) if N * H >= MANY else 1
    weight, pdl = weight if weight is None else weight.contiguous(), dependent_launch(x.device)
    _rows[(triton.cdiv(N * H, R),)](
        x,
        y,
        x if weight is None else weight,
        turns.cis,
        N * H,
        H,
        H * turns.heads,
        *x.stride()[:2],
        *y.stride()[:2],
        eps,
        D,
        2 * cis.shape[-1],
        turns.conjugate,
        norm,
        weight is not None,
        simulation,
        D.bit_length() - 1,
        R,
        B,
        pdl,
        num_warps=min(16, max(1, R * B // 1024)),
        launch_pdl=pdl,
    )
    return y


@triton.jit
def finished(
    y,
    W,
    CIS,
    at,
    live,
    i,
    eps,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHED: tl.constexpr,
    SIMULATION: tl.constexpr,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Tile [R, B] of rows of D columns, values of DTYPE as fp32, normalised if NORM, rotated, and simulated; each step
    rounds.

    CIS fp32: TURNED numbers (cos, sin interleaved) from offset `at` int64 [R] on; rows that are not `live` read
    nothing; i int32 [B]: columns; STEPS: log2(D). Weights and rotations are loaded before the rows are needed.
    """
    weight, place = 1.0, i[None, :] - (D - TURNED)
    turned = (place >= 0) & (place < TURNED)
    if WEIGHED:
        weight = widen(tl.load(W + i, mask=i < D, other=0.0))[None, :]
    cis = tl.load(CIS + at[:, None] + place, mask=turned & live[:, None], other=0.0)
    if NORM:
        y = rounded(normed(y, eps, D) * weight, DTYPE)
    a, b = tl.split(tl.reshape(y, [R, B // 2, 2]))
    c, s = tl.split(tl.reshape(cis, [R, B // 2, 2]))
    if CONJUGATE:
        s = -s
    u, v = turn(a, b, c, s)
    y = rounded(tl.where(turned, tl.reshape(tl.join(u, v), [R, B]), y), DTYPE)
    if SIMULATION == KV:
        y = fp8_blocks(y, D - TURNED, R, B, KV_COLUMNS)
    if SIMULATION == KEY:
        y = rounded(hadamard_rows(y, R, D, STEPS), DTYPE)
        y = fp4_blocks(y, D, R, B, KEY_COLUMNS if B > KEY_COLUMNS else B)
    return y


@triton.jit(do_not_specialize=["M"])
def _rows(
    X,
    Y,
    W,
    CIS,
    M,
    heads,
    turning,
    x_token,
    x_head,
    y_token,
    y_head,
    eps,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHED: tl.constexpr,
    SIMULATION: tl.constexpr,
    STEPS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """R rows, `heads` of each token; `turning` rows in order share a rotation."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, B)
    token, head, within = row // heads, row % heads, (row[:, None] < M) & (i[None, :] < D)
    x = widen(tl.load(X + (token * x_token + head * x_head)[:, None] + i[None, :], mask=within, other=0.0))
    y = finished(
        x,
        W,
        CIS,
        (row // turning) * TURNED,
        row < M,
        i,
        eps,
        Y.dtype.element_ty,
        D,
        TURNED,
        CONJUGATE,
        NORM,
        WEIGHED,
        SIMULATION,
        STEPS,
        R,
        B,
    )
    tl.store(Y + (token * y_token + head * y_head)[:, None] + i[None, :], narrow(y, Y.dtype.element_ty), mask=within)
