"""FP4 peers: vLLM's Marlin mixture of experts, humming's products."""

from functools import lru_cache

import torch

from dsv4.kernels.experts.reference import experts
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import difference, generator, normal
from scripts.bench.peers import library, peer, processors, require
from scripts.bench.peers_torch import against_linear, fp4_matrix

D, I, E, K = FLASH.hidden_size, FLASH.moe_intermediate_size, FLASH.n_routed_experts, FLASH.num_experts_per_tok
LIMIT = FLASH.swiglu_limit
# vLLM's scalar_types.float4_e2m1f.id: 2 exponent bits, 1 mantissa bit, signed, finite only
E2M1 = 562949953487106
BLOCKS_PER_SM = 4  # MARLIN_MAX_BLOCKS_PER_SM: locks in the workspace
TOLERANCE = 2e-2  # hidden activations are bf16 there, as in the reference; sums in another order


def stack(rows: int, width: int, seed: int) -> PackedWeight:
    """Random MXFP4 matrices [256, rows, width] with values of the size that keeps a product of normal inputs near 1."""
    g = generator("cuda", seed)
    codes = torch.randint(0, 256, (E, rows, width // 2), dtype=torch.uint8, device="cuda", generator=g)
    exponent = -round(0.5 * (width.bit_length() - 1)) - 1
    low = 126 + exponent
    scales = torch.randint(low, low + 3, (E, rows, width // 32), dtype=torch.uint8, device="cuda", generator=g)
    return PackedWeight(WeightFormat.MXFP4, codes, scales.view(torch.float8_e8m0fnu))


@lru_cache(1)
def weights() -> tuple[PackedWeight, PackedWeight]:
    """w13 (gate rows, then up rows) and w2: shared by all input sets, which route to different experts."""
    return stack(2 * I, D, 0), stack(D, I, 1)


def tokens(batch: int, i: int):
    """x [B, 4096], six different experts each, routing weights that sum to 1.5."""
    x = normal(2 * i, batch, D)
    indices = torch.rand(batch, E, device="cuda", generator=generator("cuda", 2 * i + 1)).topk(K, -1).indices
    routing = torch.softmax(normal(2 * i + 1, batch, K, dtype=torch.float32), -1) * 1.5
    return x, indices, routing


def against_experts(run, x, indices, routing):
    return lambda: (difference(run(), experts(x, indices, routing, *weights(), LIMIT, False)), TOLERANCE)


def locks() -> torch.Tensor:
    """The zeroed locks that Marlin works with, and leaves zeroed."""
    return torch.zeros(processors() * BLOCKS_PER_SM, dtype=torch.int32, device="cuda")


def marlin_scales(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 [E, rows, groups] in the order that Marlin reads: [E, groups, rows], permuted in runs of 64 and again of
    4."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    s = scales.view(torch.uint8).transpose(1, 2).contiguous()
    s = s.view(*s.shape[:2], -1, 64)[..., order].reshape(s.shape)
    return s.view(*s.shape[:2], -1, 4)[..., [0, 2, 1, 3]].reshape(s.shape).view(torch.float8_e8m0fnu)


@lru_cache(1)
def marlin_weights():
    """Both stacks in Marlin's layout: gptq_marlin_repack(int32 [width/8, rows], width, rows, 4 bits, False) of each
    expert."""
    repack = library("_C_stable_libtorch", "_C").gptq_marlin_repack
    packed = []
    for w in weights():
        rows, width = w.weight.shape[1], 2 * w.weight.shape[2]
        one = lambda e: repack(w.weight[e].view(torch.int32).T.contiguous(), width, rows, 4, False)
        out = torch.empty(E, *one(0).shape, dtype=torch.int32, device="cuda")
        for e in range(E):
            out[e] = one(e)
        packed += [out, marlin_scales(w.scale)]
    return packed


@peer("Marlin MoE FP4 (vLLM)", "experts")
def marlin(row, i):
    """vllm 0.33.0, as its fused_marlin_moe: align, product, clamped SwiGLU, product with routing weights, sum over a
    token."""
    moe, ops = library("_moe_C_stable_libtorch", "_moe_C"), library("_C_stable_libtorch", "_C")
    B = row.facts["batch"]
    x, indices, routing = tokens(B, i)
    w13, s13, w2, s2 = marlin_weights()
    chosen = indices.int()
    block = next((b for b in (8, 16, 32, 48) if B * K / E / b < 0.9), 64)
    slots = B * K + E * (block - 1)
    if B * K < E:
        slots = min(B * K * block, slots)
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="cuda")
    order, owner, padded = (empty(n, dtype=torch.int32) for n in (slots, -(-slots // block), 1))
    gate_up, hidden, down, out = empty(B * K, 2 * I), empty(B * K, I), empty(B * K, D), empty(B, D)
    free = locks()

    def product(a, c, w, s, top_k, weighted, size_m, size_n, size_k):
        moe.moe_wna16_marlin_gemm(
            a,
            c,
            w,
            None,
            s,
            None,
            None,
            None,
            free,
            order,
            owner,
            padded,
            routing,
            block,
            top_k,
            weighted,
            E2M1,
            size_m,
            size_n,
            size_k,
            False,
            True,
            False,
            -1,
            -1,
            -1,
        )

    def run():
        moe.moe_align_block_size(chosen, E, block, order, owner, padded, None)
        product(x, gate_up, w13, s13, K, False, B, 2 * I, D)
        ops.silu_and_mul_with_clamp(hidden, gate_up, LIMIT, 1.0, 0.0)
        product(hidden, down, w2, s2, 1, True, B * K, D, I)
        return torch.sum(down.view(B, K, D), 1, out=out)

    return run, against_experts(run, x, indices, routing)


@peer("humming FP4", "linear_fp4", when=lambda f: f["width"] % 128 == 0 and f["out"] % 128 == 0)
def humming_linear(row, i):
    """humming-kernels 0.1.19: HummingLayer(rows, width, {"quant_method": "mxfp4"}) with the same bytes. It compiles
    itself."""
    layers, f = require("humming.layer"), row.facts
    w = PackedWeight(WeightFormat.MXFP4, *fp4_matrix(f["out"], f["width"], i))
    layer = layers.HummingLayer(
        shape_n=f["out"], shape_k=f["width"], weight_config={"quant_method": "mxfp4"}, torch_dtype=torch.bfloat16
    )
    layer.load_from_tensors({"weight": w.weight.cpu(), "weight_scale": w.scale.view(torch.uint8).cpu()})
    layer = layer.cuda()
    layer.transform()
    x = normal(1000 + i, f["tokens"], f["width"])
    run = lambda: layer(x)
    return run, against_linear(run, x, w)


@peer("Marlin FP4 (vLLM)", "linear_fp4", when=lambda f: f["width"] % 128 == 0 and f["out"] % 64 == 0)
def marlin_linear(row, i):
    """vllm 0.33.0: marlin_gemm(x, None, weight, None, scales, None, None, None, locks, type, rows of x, out, width,
    ...)."""
    ops, f = library("_C_stable_libtorch", "_C"), row.facts
    w = PackedWeight(WeightFormat.MXFP4, *fp4_matrix(f["out"], f["width"], i))
    weight = ops.gptq_marlin_repack(w.weight.view(torch.int32).T.contiguous(), f["width"], f["out"], 4, False)
    scales = marlin_scales(w.scale.view(torch.uint8).unsqueeze(0))[0]
    free = locks()
    x = normal(1000 + i, f["tokens"], f["width"])

    def run():
        return ops.marlin_gemm(
            x,
            None,
            weight,
            None,
            scales,
            None,
            None,
            None,
            free,
            E2M1,
            f["tokens"],
            f["out"],
            f["width"],
            False,
            True,
            False,
        )

    return run, against_linear(run, x, w)
