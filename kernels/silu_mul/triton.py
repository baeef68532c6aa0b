"""silu(gate) · up on a GPU."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, widen
from dsv4.kernels.silu_mul import reference

BLOCK = 1024  # columns of a program


def silu_mul(gate: torch.Tensor, up: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    require_device("silu_mul", gate, up)
    if gate.shape != up.shape or gate.dim() != 2:
        raise UnsupportedInput(f"silu_mul: gate {tuple(gate.shape)} and up {tuple(up.shape)}; expected two of [N, I]")
    gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    (N, width), block, pdl = gate.shape, min(BLOCK, next_power(gate.shape[1])), dependent_launch(gate.device)
    _silu_mul[(N, triton.cdiv(width, block))](
        gate,
        up,
        *((gate, up) if biases is None else biases),
        out,
        gate.stride(0),
        up.stride(0),
        width,
        biases is not None,
        block,
        pdl,
        num_warps=max(1, min(4, block // 256)),
        launch_pdl=pdl,
    )
    return out


silu_mul.__doc__ = reference.silu_mul.__doc__


@triton.jit
def _silu_mul(
    GATE,
    UP,
    BG,
    BU,
    OUT,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    n, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    g = widen(tl.load(GATE + n * gate_stride + i, mask=i < WIDTH, other=0.0))
    u = widen(tl.load(UP + n * up_stride + i, mask=i < WIDTH, other=0.0))
    if BIASED:
        g += widen(tl.load(BG + i, mask=i < WIDTH, other=0.0))
        u += widen(tl.load(BU + i, mask=i < WIDTH, other=0.0))
    # F.silu(g) * u
    tl.store(OUT + n * WIDTH + i, narrow(g / (1 + tl.exp(-g)) * u, OUT.dtype.element_ty), mask=i < WIDTH)
