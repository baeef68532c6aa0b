"""Hyper-connection peers: SGLang's Triton kernels (0.5.23), and FlashInfer's."""

import torch

from dsv4.kernels.hyper_connections.reference import mhc_post, mhc_pre
from dsv4.kernels.rms_norm.reference import rms_norm
from dsv4.kernels.widths import FLASH
from scripts.bench.inputs import difference, normal
from scripts.bench.peers import hopper, peer, processors, require

D, N, ITERS, EPS = FLASH.hidden_size, FLASH.hc_mult, FLASH.hc_sinkhorn_iters, FLASH.hc_eps
TOLERANCE = 1e-2


class Streams:
    """Inputs of one boundary between two sublayers, T tokens."""

    def __init__(self, T: int, i: int):
        self.streams, self.out = normal(5 * i, T, N, D), normal(5 * i + 1, T, D)
        self.fn = normal(5 * i + 2, 2 * N + N * N, N * D, dtype=torch.float32) * 0.02
        self.base = normal(5 * i + 3, 2 * N + N * N, dtype=torch.float32)
        self.scale = torch.ones(3, device="cuda")
        self.weight = torch.ones(D, device="cuda", dtype=torch.bfloat16)
        self.post = 2 * torch.rand(T, N, device="cuda")
        self.comb = torch.softmax(normal(5 * i + 4, T, N, N, dtype=torch.float32), -1)

    def reference(self, merge: bool):
        h = mhc_post(self.out, self.streams, self.post, self.comb) if merge else self.streams
        x, _, _ = mhc_pre(h, self.fn, self.scale, self.base, ITERS, EPS, EPS)
        return h, rms_norm(x, self.weight, EPS)


def against(inputs: Streams, run, merge: bool):
    def check():
        got, want = run(), inputs.reference(merge)
        return max(difference(g, w) for g, w in zip(got, want)), TOLERANCE

    return check


def sglang_pre(inputs: Streams):
    """hc_mix_stats_sinkhorn(x [T, 4·4096], fn, scale, base, 4, iterations, eps, eps), mhc_combine(x, pre, 4, dtype),
    norm."""
    mhc = require("sglang.kernels.ops.layernorm.mhc")

    def pre(h):
        flat = h.flatten(1)
        weights, _, _ = mhc.hc_mix_stats_sinkhorn(flat, inputs.fn, inputs.scale, inputs.base, N, ITERS, EPS, EPS)
        return torch.nn.functional.rms_norm(mhc.mhc_combine(flat, weights, N, h.dtype), (D,), inputs.weight, EPS)

    return pre


@peer("SGLang Triton", "mhc_pre_norm")
def sglang_pre_norm(row, i):
    inputs = Streams(row.facts["tokens"], i)
    pre = sglang_pre(inputs)
    run = lambda: (inputs.streams, pre(inputs.streams))
    return run, against(inputs, run, merge=False)


@peer("SGLang Triton", "mhc_post_pre_norm")
def sglang_post_pre_norm(row, i):
    """mhc_post_split_h(out, streams, post, comb), then as before a sublayer."""
    inputs = Streams(row.facts["tokens"], i)
    split, pre = require("sglang.kernels.ops.layernorm.mhc_post_split_h"), sglang_pre(inputs)

    def run():
        h = split.mhc_post_split_h(inputs.out, inputs.streams, inputs.post, inputs.comb)
        return h, pre(h)

    return run, against(inputs, run, merge=True)


@peer("SGLang Triton", "mhc_post")
def sglang_post(row, i):
    inputs = Streams(row.facts["tokens"], i)
    split = require("sglang.kernels.ops.layernorm.mhc_post_split_h")
    run = lambda: split.mhc_post_split_h(inputs.out, inputs.streams, inputs.post, inputs.comb)
    return run, lambda: (difference(run(), mhc_post(inputs.out, inputs.streams, inputs.post, inputs.comb)), TOLERANCE)


def splits(T: int) -> int:
    """How many pieces of the 16384 products SGLang asks DeepGEMM for."""
    most = max(1, min(processors() // -(-T // 64), N * D // 64 // 4))
    return max(s for s in (1, 2, 4, 8, 16) if s <= most)


@peer("DeepGEMM + FlashInfer", "mhc_pre_norm", "mhc_post_pre_norm")
def flashinfer_pre_norm(row, i):
    """As SGLang runs it on Hopper: flashinfer's mhc_post; deep_gemm's tf32_hc_prenorm_gemm(x [T, 16384] bf16, fn,
    products [splits, T, 24], squares [splits, T], splits); flashinfer's mhc_pre_big_fuse; then the norm."""
    hopper()
    gemm, module = require("deep_gemm"), require("flashinfer.mhc")
    T, merge = row.facts["tokens"], row.op == "mhc_post_pre_norm"
    inputs, count = Streams(T, i), splits(T)
    products = torch.empty(count, T, 2 * N + N * N, device="cuda")
    squares = torch.empty(count, T, device="cuda")
    parts = (products, squares) if count > 1 else (products[0], squares[0])

    def run():
        h = module.mhc_post(inputs.out, inputs.streams, inputs.post, inputs.comb) if merge else inputs.streams
        gemm.tf32_hc_prenorm_gemm(h.flatten(1), inputs.fn, products, squares, count)
        x = module.mhc_pre_big_fuse(
            *parts,
            h,
            inputs.scale,
            inputs.base,
            N * D,
            rms_eps=EPS,
            mhc_pre_eps=EPS,
            mhc_sinkhorn_eps=EPS,
            mhc_post_mult_value=2.0,
            sinkhorn_repeat=ITERS,
            num_splits=count,
        )[2]
        return h, torch.nn.functional.rms_norm(x, (D,), inputs.weight, EPS)

    return run, against(inputs, run, merge)


@peer("FlashInfer", "mhc_post")
def flashinfer_post(row, i):
    """flashinfer 0.7.2: mhc_post(x, residual, post, comb) as SGLang calls it."""
    module = require("flashinfer.mhc")
    inputs = Streams(row.facts["tokens"], i)
    run = lambda: module.mhc_post(inputs.out, inputs.streams, inputs.post, inputs.comb)
    return run, lambda: (difference(run(), mhc_post(inputs.out, inputs.streams, inputs.post, inputs.comb)), TOLERANCE)
