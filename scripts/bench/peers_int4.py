"""A peer with INT4 weights and FP8 activations: SGLang's CUTLASS mixture of experts for Hopper."""

import ctypes
from functools import lru_cache

import torch

from dsv4.probes.kernel_audit.adapters.installed import folders
from scripts.bench.inputs import difference, generator
from scripts.bench.peers import hopper, library, peer, require
from scripts.bench.peers_experts import TOLERANCE, D, E, I, K, tokens

GROUP = 128  # weights of one scale
E4M3 = 448.0  # its largest number
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
    return torch.nn.functional.silu(gate) * up


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
    offsets = torch.nn.functional.pad(held.cumsum(0), (1, 0)).int()
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
