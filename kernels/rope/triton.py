"""Rotation on a GPU: in place, reading and writing the rotated columns only."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, turn, widen
from dsv4.kernels.rope import reference

TILE = 512  # elements of a program


def rotate(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    require_device("rotate", x, cis)
    D, half = x.shape[-1], cis.shape[-1]
    if 2 * half > D:
        raise UnsupportedInput(f"rotate: {half} pairs do not fit into {D} columns")
    if not x.is_contiguous():
        raise UnsupportedInput(f"rotate: works in place and needs contiguous rows; found strides {tuple(x.stride())}")
    if not x.numel() or not half:
        return x
    M, turns, B = x.numel() // D, turns_of(cis, x.shape[:-1]), next_power(2 * half)
    R, pdl = max(1, TILE // B), dependent_launch(x.device)
    _rotate[(triton.cdiv(M, R),)](
        x, turns.cis, M, turns.heads, D, half, turns.conjugate, R, B // 2, pdl, num_warps=1, launch_pdl=pdl
    )
    return x


rotate.__doc__ = reference.rotate.__doc__


class Turns(NamedTuple):
    """Rotations in memory: cis fp32 [C, d/2, 2] (cos, sin); row r of the rows to rotate uses cis[r // heads]."""

    cis: torch.Tensor
    heads: int
    conjugate: bool


def turns_of(cis: torch.Tensor, lead: torch.Size) -> Turns:
    """cis complex64 [..., d/2], broadcastable to [*lead, d/2], lazily conjugated or not; copied only if it must be."""
    if cis.dtype is not torch.complex64:
        raise UnsupportedInput(f"rotate: cis is {cis.dtype}; expected torch.complex64")
    own = (1,) * (len(lead) - cis.dim() + 1) + cis.shape[:-1]
    if len(own) > len(lead) or any(a not in (1, b) for a, b in zip(own, lead)):
        raise UnsupportedInput(f"rotate: cis {tuple(cis.shape)} does not broadcast to {(*lead, cis.shape[-1])}")
    conjugate = cis.is_conj()
    cis, heads, outer = cis.conj() if conjugate else cis, 1, len(lead)
    while outer and own[outer - 1] == 1:  # trailing dims that share one rotation
        outer -= 1
        heads *= lead[outer]
    if own[:outer] != tuple(lead[:outer]):
        cis, heads = cis.expand(*lead, cis.shape[-1]), 1
    return Turns(torch.view_as_real(cis).contiguous(), heads, conjugate)


@triton.jit(do_not_specialize=["M"])
def _rotate(
    X,
    CIS,
    M,
    heads,
    D: tl.constexpr,
    HALF: tl.constexpr,
    CONJUGATE: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """P: pairs, padded to a power of two."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, 2 * P)
    live = (row[:, None] < M) & (i[None, :] < 2 * HALF)
    at = X + row[:, None] * D + (D - 2 * HALF) + i[None, :]
    cis = tl.load(CIS + (row // heads)[:, None] * (2 * HALF) + i[None, :], mask=live, other=0.0)
    a, b = tl.split(tl.reshape(widen(tl.load(at, mask=live, other=0.0)), [R, P, 2]))
    c, s = tl.split(tl.reshape(cis, [R, P, 2]))
    if CONJUGATE:
        s = -s
    # tail.copy_(torch.view_as_real(pairs * cis).flatten(-2))
    u, v = turn(a, b, c, s)
    tl.store(at, narrow(tl.reshape(tl.join(u, v), [R, 2 * P]), X.dtype.element_ty), mask=live)
