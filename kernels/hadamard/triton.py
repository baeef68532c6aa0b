"""Hadamard transform on a GPU: log2(D) steps of sums and differences in registers, in fp32."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.hadamard import reference
from dsv4.kernels.launch import dependent_launch, require_device
from dsv4.kernels.quantize.triton_codes import hadamard_rows, narrow, widen
from dsv4.kernels.rms_norm.triton import rows_of

WIDEST = 16384
TILE = 512  # elements of a program of one warp, which exchanges them without barriers of shared memory


def hadamard(x: torch.Tensor) -> torch.Tensor:
    require_device("hadamard", x)
    D = x.shape[-1]
    check_width(D)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    rows, R, pdl = rows_of(x), max(1, TILE // D), dependent_launch(x.device)
    _hadamard[(triton.cdiv(rows.shape[0], R),)](
        rows,
        y,
        rows.shape[0],
        rows.stride(0),
        D,
        D.bit_length() - 1,
        R,
        pdl,
        num_warps=min(16, max(1, D // 1024)),
        launch_pdl=pdl,
    )
    return y


hadamard.__doc__ = reference.hadamard.__doc__


def check_width(D: int) -> None:
    if D < 1 or D & (D - 1):
        raise UnsupportedInput(f"the Hadamard transform needs a power of two; found {D} dims")
    if D > WIDEST:
        raise UnsupportedInput(f"hadamard: {D} dims; the triton backend takes at most {WIDEST}")


@triton.jit(do_not_specialize=["M"])
def _hadamard(X, Y, M, stride, D: tl.constexpr, STEPS: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, D)
    x = widen(tl.load(X + row[:, None] * stride + i[None, :], mask=row[:, None] < M, other=0.0))
    # (x.float() @ H).to(x.dtype)
    y = narrow(hadamard_rows(x, R, D, STEPS), Y.dtype.element_ty)
    tl.store(Y + row[:, None] * D + i[None, :], y, mask=row[:, None] < M)
