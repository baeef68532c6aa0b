"""Marlin's, humming's, DeepGEMM's and cuBLAS' products for `linear` and `grouped_linear`."""

from functools import partial

import torch
import torch.nn.functional as F

from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.quantize.weights import scale_to_float
from dsv4.probes.kernel_audit.adapters import Adapter, as_it_is
from dsv4.probes.kernel_audit.adapters.installed import at_least, hopper, library, require
from dsv4.probes.kernel_audit.adapters.marlin import E2M1, locks, padded_rows, permuted_scales, repacked

BLOCK, ROWS = 128, 128  # activations a scale; rows of W are padded to multiples of this
E4M3_MAX, FLOOR = 448.0, 1e-4


def columns_of(case, multiple: int = BLOCK) -> str | None:
    """Whether x is bf16 and its width a multiple."""
    x = case.arguments[0]
    if x.dtype is not torch.bfloat16:
        return "it takes bf16 activations"
    return None if x.shape[-1] % multiple == 0 else f"it takes multiples of {multiple} columns, not {x.shape[-1]}"


def mxfp4_plain(case) -> str | None:
    """MXFP4 weights and bf16 activations as they are."""
    if case.arguments[1].format is not WeightFormat.MXFP4:
        return "it takes MXFP4 weights"
    return "it does not round activations to FP8" if case.arguments[2] else columns_of(case)


def fp8_blocks(case) -> str | None:
    """FP8 weights in blocks of 128 × 128."""
    w = case.arguments[1]
    if w.format is not WeightFormat.FP8 or tuple(w.block) != (BLOCK, BLOCK):
        return "it takes FP8 weights in blocks of 128 × 128"
    return columns_of(case) if case.arguments[2] else "it rounds activations to FP8"


def dense_alike(case) -> str | None:
    """Dense weights in the dtype of activations."""
    x, w = case.arguments[:2]
    if w.format is not WeightFormat.DENSE:
        return "it takes dense weights"
    return None if w.weight.dtype is x.dtype else "it takes weights in the activations' dtype"


def marlin(device: str):
    """marlin_gemm(x, None, weight, None, scales, None, None, None, locks, type, tokens, rows, columns, False, True,
    False)."""
    at_least(8)
    ops = library("_C_stable_libtorch", "_C")

    def prepare(x, w, simulate=False):
        O = w.out_features
        if not len(x):
            return lambda: x.new_empty(0, O), as_it_is
        codes, scale = padded_rows(w, ROWS)
        before = x.contiguous(), None, repacked(ops.gptq_marlin_repack, codes), None, permuted_scales(scale)
        fixed = *before, None, None, None, locks(x.device), E2M1, len(x), codes.shape[0], x.shape[1]
        return lambda: ops.marlin_gemm(*fixed, False, True, False), lambda y: y[:, :O].contiguous()

    return prepare


def humming(device: str):
    """HummingLayer(rows, columns, MXFP4)(x); it compiles itself at the first call."""
    at_least(8)
    layers = require("humming.layer")

    def prepare(x, w, simulate=False):
        O = w.out_features
        if not len(x):
            return lambda: x.new_empty(0, O), as_it_is
        codes, scale = (t.contiguous().cpu() for t in padded_rows(w, ROWS))
        layer = layers.HummingLayer(
            shape_n=codes.shape[0],
            shape_k=x.shape[1],
            weight_config={"quant_method": "mxfp4"},
            torch_dtype=torch.bfloat16,
        )
        layer.load_from_tensors({"weight": codes, "weight_scale": scale})
        layer = layer.to(x.device)
        layer.transform()
        x = x.contiguous()
        return lambda: layer(x), lambda y: y[:, :O].contiguous()

    return prepare


def in_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] as E4M3 and its power-of-two scales fp32 [N, K/128], as a server quantises activations."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(-1).clamp(min=FLOOR) / E4M3_MAX
    mantissa, exponent = torch.frexp(top)
    scale = torch.ldexp(torch.ones_like(top), exponent - (mantissa == 0.5).int())
    return (blocks / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), scale


def rows_of_blocks(w: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 [O', K], scales fp32 [O'/128, K/128]): rows of zeros up to whole blocks."""
    codes = F.pad(w.weight.view(torch.uint8), (0, 0, 0, -w.out_features % BLOCK)).view(torch.float8_e4m3fn)
    return codes, scale_to_float(w.scale).contiguous()


def deep_gemm(device: str):
    """fp8_fp4_gemm_nt((x E4M3, scales [N, K/128]), (W E4M3, scales [O/128, K/128]), out). Scales of x are transposed
    beforehand."""
    hopper()
    gemm = require("deep_gemm")

    def prepare(x, w, simulate=False):
        O = w.out_features
        if not len(x):
            return lambda: x.new_empty(0, O), as_it_is
        codes, scale = in_blocks(x)
        a, b = (codes, gemm.get_mn_major_tma_aligned_tensor(scale)), rows_of_blocks(w)
        out = x.new_empty(len(x), b[0].shape[0])

        def run():
            gemm.fp8_fp4_gemm_nt(a, b, out, disable_ue8m0_cast=True)
            return out

        return run, lambda y: y[:, :O].contiguous()

    return prepare


def torch_linear(device: str):
    """torch.nn.functional.linear(x, W)."""

    def prepare(x, w, simulate=False):
        return lambda: F.linear(x, w.weight), as_it_is

    return prepare


def torch_grouped(device: str):
    """torch.bmm(x [G, N, K], W [G, K, R])."""

    def prepare(x, w):
        each, groups = w.weight.unflatten(0, (x.shape[1], -1)).transpose(1, 2), x.transpose(0, 1)
        return lambda: torch.bmm(groups, each), lambda y: y.transpose(0, 1).contiguous()

    return prepare


PADDED = "rows of W are padded to a multiple of 128; no tokens are answered by the adapter"
adapter_of_mxfp4 = partial(Adapter, operation="linear", takes=mxfp4_plain, differs=PADDED, prepared=("w",))
ADAPTERS = (
    adapter_of_mxfp4(name="marlin", about="vllm 0.33.0 torch.ops._C.marlin_gemm", make=marlin),
    adapter_of_mxfp4(name="humming", about="humming-kernels 0.1.19 HummingLayer", make=humming),
    Adapter(
        *("deep_gemm", "linear", "deep_gemm (in vllm 0.33.0) fp8_fp4_gemm_nt", deep_gemm),
        takes=fp8_blocks,
        differs=f"activations come as E4M3 with scales of 128 columns, which is not timed; {PADDED}",
        prepared=("x", "w"),
    ),
    Adapter("torch", "linear", "torch.nn.functional.linear", torch_linear, dense_alike),
    Adapter("torch", "grouped_linear", "torch.bmm", torch_grouped, dense_alike),
)
