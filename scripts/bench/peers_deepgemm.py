"""DeepGEMM's FP8 products (in vllm 0.33.0): dense, and grouped as its mixture of experts runs them."""

from functools import lru_cache

import torch

from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import quantize_fp8
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import difference, generator, normal
from scripts.bench.peers import hopper, peer, require

D, I, E, K = FLASH.hidden_size, FLASH.moe_intermediate_size, FLASH.n_routed_experts, FLASH.num_experts_per_tok
BLOCK = 128
ROWS = 128  # rows of an expert begin at a multiple of this
TOLERANCE = 1e-2  # results in bf16, sums in another order


def rounded(gemm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of x [M, K] and fp32 scales [M, K / 128] in the order that the kernel reads: no kernel arranges them
    later."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(1e-4) / 448)))
    codes = (blocks / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return codes, gemm.get_mn_major_tma_aligned_tensor(scale)


@peer("DeepGEMM FP8, x rounded before", "linear_fp8", when=lambda f: not (f["width"] % BLOCK or f["out"] % BLOCK))
def dense(row, i):
    """deep_gemm.fp8_gemm_nt((x, scales), (weight, scales [out / 128, width / 128]), result)."""
    hopper()
    gemm, f = require("deep_gemm"), row.facts
    x = normal(2 * i, f["tokens"], f["width"])
    codes, scale = quantize_fp8(normal(2 * i + 1, f["out"], f["width"], dtype=torch.float32) * f["width"] ** -0.5)
    given, weight = rounded(gemm, x), (codes, scale.float())
    out = torch.empty(f["tokens"], f["out"], dtype=torch.bfloat16, device="cuda")

    def run():
        gemm.fp8_gemm_nt(given, weight, out)
        return out

    def check():
        w = codes.float() * scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return difference(run(), simulate_fp8_blocks(x, BLOCK).float() @ w.t()), TOLERANCE

    return run, check


@lru_cache(1)
def experts_weights() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """w13 and w2 of all experts as FP8 codes and fp32 scales: shared by all input sets."""
    made = []
    for seed, (rows, width) in enumerate(((2 * I, D), (D, I))):
        g = generator("cuda", seed)
        codes = torch.randint(0, 120, (E, rows, width), dtype=torch.uint8, device="cuda", generator=g)
        scale = torch.full((E, rows // BLOCK, width // BLOCK), 2.0**-12, device="cuda")
        made.append((codes.view(torch.float8_e4m3fn), scale))
    return made


@peer("DeepGEMM FP8 grouped, products alone", "experts")
def grouped(row, i):
    """deep_gemm.m_grouped_fp8_gemm_nt_contiguous of rounded rows, gate_up and down. Its weights are FP8, twice the
    bytes of FP4. Routing, activation and the sum over a token are left out."""
    hopper()
    gemm, tokens = require("deep_gemm"), row.facts["batch"]
    chosen = torch.rand(tokens, E, device="cuda", generator=generator("cuda", 2 * i + 1)).topk(K, -1).indices
    held = -(-torch.bincount(chosen.flatten(), minlength=E) // ROWS) * ROWS
    owner = torch.repeat_interleave(torch.arange(E, device="cuda"), held).int()
    M, (w13, w2) = owner.numel(), experts_weights()
    first, second = (rounded(gemm, normal(2 * i + s, M, width)) for s, width in enumerate((D, I)))
    outs = [torch.empty(M, rows, dtype=torch.bfloat16, device="cuda") for rows in (2 * I, D)]

    def run():
        gemm.m_grouped_fp8_gemm_nt_contiguous(first, w13, outs[0], owner)
        gemm.m_grouped_fp8_gemm_nt_contiguous(second, w2, outs[1], owner)
        return outs

    def check():
        e = int(owner[0])
        w = w13[0][e].float() * w13[1][e].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        x = first[0][:4].float() * first[1][:4].repeat_interleave(BLOCK, 1)
        return difference(run()[0][:4], x @ w.t()), TOLERANCE

    return run, check
