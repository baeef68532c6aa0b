"""Peers with weights of four bits and FP8 activations: SGLang's CUTLASS mixture of experts, humming's products."""

import ctypes
from functools import lru_cache

import torch
import torch.nn.functional as F

from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.probes.kernel_audit.adapters.installed import folders
from scripts.bench.inputs import difference, generator, normal
from scripts.bench.peers import hopper, library, peer, require
from scripts.bench.peers_experts import TOLERANCE, D, E, I, K, tokens
from scripts.bench.peers_experts import weights as mxfp4_weights

GROUP = 128  # weights of one scale
E4M3 = 448.0  # its largest number
E4M3_TOLERANCE = 4e-2  # of products of inputs with three bits after the leading one, beside exact ones
CHECKED = 4  # tokens that are held against the reference


def stack(rows: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights int8 [E, rows, width / 2], the even one in the low nibble, and scales bf16 [E, rows, width / 128]
    that keep a product of normal inputs near 1."""
    g = generator("cuda", seed)
    codes = torch.randint(0, 256, (E, rows, width // 2), dtype=torch.uint8, device="cuda", generator=g).view(torch.int8)
    scales = torch.rand(E, rows, width // GROUP, device="cuda", generator=g) + 0.5
    return codes, (scales * (0.2 * width**-0.5)).bfloat16()


def interleaved(scales: torch.Tensor) -> torch.Tensor:
    """[E, rows, groups] as the kernel reads them: [E, groups / 4, 4 · rows], four groups of a row together."""
    experts, rows, groups = scales.shape
    return scales.view(experts, rows, groups // 4, 4).transpose(1, 2).reshape(experts, groups // 4, 4 * rows)


@lru_cache(1)
def weights():
    """(weights, scales, scales as the kernel reads them) of w13, gate rows and then up rows, and of w2."""
    made = stack(2 * I, D, 0), stack(D, I, 1)
    return [(codes, scales, interleaved(scales)) for codes, scales in made]


def product(matrix, e: int, x: torch.Tensor) -> torch.Tensor:
    """x fp32 [width] times the weights of an expert: [rows]."""
    codes, scales, _ = matrix
    low, high = codes[e] << 4 >> 4, codes[e] >> 4
    values = torch.stack([low, high], -1).flatten(1).float()
    return (values * scales[e].float().repeat_interleave(GROUP, 1)) @ x


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x as E4M3 holds it under a scale: fp32."""
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def activated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of fp32 [..., 2·I], without limits."""
    gate, up = gate_up.float().chunk(2, -1)
    return F.silu(gate) * up


def wanted(x, indices, routing, in_scale, hidden_scale) -> torch.Tensor:
    """fp32 [tokens, D] from rounded inputs and rounded hidden activations."""
    out = torch.zeros(len(x), D, device="cuda")
    for t in range(len(x)):
        for e, share in zip(indices[t].tolist(), routing[t], strict=True):
            gate_up = product(weights()[0], e, rounded(x[t], in_scale)).bfloat16()
            out[t] += share * product(weights()[1], e, rounded(activated(gate_up), hidden_scale))
    return out


def kernels():
    """(torch.ops.sgl_kernel, SGLang's Triton kernels around the products)."""
    hopper()
    for found in (path for folder in folders() for path in folder.rglob("libnuma.so.1")):
        ctypes.CDLL(str(found), ctypes.RTLD_GLOBAL)  # the library names it among those that it needs
    return library("common_ops", "sgl_kernel"), require("sglang.kernels.ops.moe.ep_moe_kernels")


@peer("SGLang CUTLASS W4A8 INT4, without sorting", "experts")
def cutlass(row, i):
    """sglang-kernel 0.4.3 cutlass_w4a8_moe_mm and the kernels of sglang 0.5.23 around it. Weights are INT4 with a bf16
    scale of 128, inputs and hidden activations E4M3 with one scale of all, known beforehand. Tokens are sorted by
    experts beforehand, and SwiGLU has no limits."""
    ops, around = kernels()
    B = row.facts["batch"]
    x, indices, routing = tokens(B, i)
    (w13, _, s13), (w2, _, s2) = weights()
    chosen, slots = indices.int(), B * K
    order = chosen.flatten().argsort(stable=True)
    slot_of = torch.empty(slots, dtype=torch.int32, device="cuda")
    slot_of[order] = torch.arange(slots, dtype=torch.int32, device="cuda")
    held = torch.bincount(chosen.flatten(), minlength=E)
    offsets = F.pad(held.cumsum(0), (1, 0)).int()
    sizes = lambda rows, width: torch.stack([torch.full_like(held, rows), held, torch.full_like(held, width)], 1).int()
    sizes13, sizes2 = sizes(2 * I, D), sizes(D, I)
    strides = {n: torch.full((E, 3), n, dtype=torch.int64, device="cuda") for n in (D, I, 2 * I)}
    e4m3 = lambda width: torch.empty(slots, width, dtype=torch.float8_e4m3fn, device="cuda")
    gate_up, down = (torch.empty(slots, n, dtype=torch.bfloat16, device="cuda") for n in (2 * I, D))
    inputs, hidden, out = e4m3(D), e4m3(I), torch.empty_like(x)
    in_scale = (x.abs().amax().float() / E4M3).view(1)

    def first():
        around.pre_reorder_for_cutlass_moe(x, inputs, slot_of, chosen, in_scale, E, K, B, D)
        a, c = strides[D], strides[2 * I]
        ops.cutlass_w4a8_moe_mm(gate_up, inputs, w13, in_scale, s13, offsets[:-1], sizes13, a, a, c, c, GROUP, K)
        return gate_up

    hidden_scale = (activated(first()).abs().amax() / E4M3).view(1)

    def run():
        first()
        around.silu_mul_static_tensorwise_quant_for_cutlass_moe(gate_up, hidden, hidden_scale, offsets[-1:], slots, I)
        a, c = strides[I], strides[D]
        ops.cutlass_w4a8_moe_mm(down, hidden, w2, hidden_scale, s2, offsets[:-1], sizes2, a, a, c, c, GROUP, K)
        around.post_reorder_for_cutlass_moe(down, out, slot_of, chosen, routing, E, K, B, D, 1.0)
        return out

    few = [part[:CHECKED] for part in (x, indices, routing)]
    return run, lambda: (difference(run()[:CHECKED], wanted(*few, in_scale, hidden_scale)), TOLERANCE)


@lru_cache(1)
def humming_layers():
    """Both stacks as humming holds them, for inputs in E4M3."""
    layers, made = require("humming.layer"), []
    for w in mxfp4_weights():
        rows, half = w.weight.shape[1:]
        layer = layers.HummingLayer(
            shape_n=rows,
            shape_k=2 * half,
            weight_config={"quant_method": "mxfp4"},
            input_config={"dtype": "float8e4m3"},
            num_experts=E,
            torch_dtype=torch.bfloat16,
        )
        layer.load_from_tensors({"weight": w.weight.cpu(), "weight_scale": w.scale.view(torch.uint8).cpu()})
        layer = layer.cuda()
        layer.transform()
        made.append(layer)
    return made


@peer("humming W4A8 MXFP4, products alone", "experts")
def humming_grouped(row, i):
    """humming-kernels 0.1.19, grouped products with the same bytes of weights. Inputs are rounded to E4M3 with a scale
    a token, which is timed. It compiles itself. Sorting, activation and the sum over a token are left out."""
    gate_up, down = humming_layers()
    _, indices, _ = tokens(row.facts["batch"], i)
    held = torch.bincount(indices.flatten(), minlength=E)
    layout = F.pad(held.cumsum(0), (1, 0))
    first, second = (normal(2 * i + s, indices.numel(), width) for s, width in enumerate((D, I)))
    how = dict(expert_layout=layout, compute_config={"gemm_type": "grouped_contiguous"})

    def run():
        return gate_up(first, **how), down(second, **how)

    def check():
        e = int(held.nonzero()[0])
        one = PackedWeight(WeightFormat.MXFP4, mxfp4_weights()[0].weight[e], mxfp4_weights()[0].scale[e])
        rows = int(held[e])
        return difference(run()[0][:rows], F.linear(first[:rows].float(), to_float(one))), E4M3_TOLERANCE

    return run, check
