"""Layouts of adapters around stand-ins: each published function is replaced by a plain torch one that reads its
arguments as that function is documented to, so that a wrong order, place or factor of the adapter is a wrong result."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dsv4.kernels.contract import tensors
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.drawing import Draw
from dsv4.kernels.hadamard.reference import hadamard
from dsv4.kernels.hyper_connections.reference import mhc_post, mhc_pre
from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.kernels.widths import WIDTHS
from dsv4.probes.kernel_audit.acceptance import truth_of
from dsv4.probes.kernel_audit.adapters import adapter, experts, hyper_connections, linear, marlin, router, small

FILES = (hyper_connections, experts, linear, router, small)


def scales_of(permuted: torch.Tensor) -> torch.Tensor:
    """E8M0 [groups, O] in Marlin's order → [O, groups]."""
    raw = permuted.view(torch.uint8)
    back = torch.empty(raw.shape[1], raw.shape[0], dtype=torch.uint8)
    for place in range(raw.shape[1]):
        run, p = divmod(place, 64)
        before = p // 4 * 4 + (0, 2, 1, 3)[p % 4]
        back[64 * run + before // 8 + 8 * (before % 8)] = raw[:, place]
    return back.view(torch.float8_e8m0fnu)


def matrix(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [O, K] of words and scales."""
    codes = words.T.contiguous().view(torch.uint8)
    return to_float(PackedWeight(WeightFormat.MXFP4, codes, scales_of(scales)))


def marlin_gemm(x, c, w, bias, s, a, b, z, free, kind, M, N, K, *rest):
    assert (kind, M, N, K) == (marlin.E2M1, len(x), w.shape[1], x.shape[1])
    return (x.float() @ matrix(w, s).T).to(x.dtype)


class Moe:
    """Alignment and product of sorted pairs; pairs are in the order of tokens here."""

    def moe_align_block_size(self, chosen, E, tile, order, owner, padded, mapping):
        assert len(owner) * tile >= len(order)
        self.chosen = chosen.flatten().long()

    def moe_wna16_marlin_gemm(
        self, a, out, w, bias, s, x1, x2, x3, free, order, owner, padded, routing, tile, k, *more
    ):
        weighted, _, M, N, K, *_ = more
        assert (M, N, K) == (len(a), out.shape[1], a.shape[1])
        each = torch.stack([matrix(*one) for one in zip(w, s)])[self.chosen]
        y = torch.einsum("pk,pok->po", a.repeat_interleave(k, 0).float(), each)
        out.copy_(y * routing.view(-1, 1) if weighted else y)

    def topk_softplus_sqrt(self, weights, chosen, places, logits, renormalize, factor, bias, ids, table, padding):
        assert renormalize and places.dtype is torch.int32
        scores = F.softplus(logits.double()).sqrt()
        if table is None:
            index = (scores.float() + bias).topk(weights.shape[1]).indices
        else:
            assert ids.dtype is table.dtype is torch.int32
            index = table[ids.long()].long()
        found = scores.gather(1, index)
        chosen.copy_(index)
        weights.copy_(found / found.sum(-1, keepdim=True) * factor)


def silu_and_mul_with_clamp(out, both, limit, alpha, beta):
    gate, up = both.float().chunk(2, -1)
    out.copy_(F.silu(alpha * gate.clamp(max=limit)) * (up.clamp(-limit, limit) + beta))


OPS = SimpleNamespace(
    gptq_marlin_repack=lambda words, K, O, bits, wide: words,
    marlin_gemm=marlin_gemm,
    silu_and_mul_with_clamp=silu_and_mul_with_clamp,
    rms_norm=lambda out, x, w, eps: out.copy_(F.rms_norm(x.float(), (x.shape[-1],), w.float(), eps)),
    silu_and_mul=lambda out, both: out.copy_(F.silu(both.float().chunk(2, -1)[0]) * both.chunk(2, -1)[1].float()),
    hadacore_transform=lambda x, inplace: x.copy_(hadamard(x)),
)


class Connections:
    """SGLang's, DeepGEMM's and FlashInfer's functions; DeepGEMM's product keeps fn for FlashInfer's."""

    mhc_post = mhc_post_split_h = staticmethod(mhc_post)

    def hc_mix_stats_sinkhorn(self, x, fn, scale, base, n, iters, rms_eps, eps):
        _, post, comb = mhc_pre(x.view(len(x), n, -1), fn, scale, base, iters, eps, rms_eps)
        m = x.float() @ fn.T / (x.float().square().mean(-1, keepdim=True) + rms_eps).sqrt()
        return torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps, post, comb

    def mhc_combine(self, x, pre, n, dtype):
        return torch.einsum("nj,njd->nd", pre, x.float().view(len(x), n, -1)).to(dtype)

    def tf32_hc_prenorm_gemm(self, x, fn, products, squares, count):
        self.fn = fn
        assert products.shape == (count, len(x), len(fn)) and squares.shape == (count, len(x))

    def mhc_pre_big_fuse(
        self, products, squares, streams, scale, base, k, *, rms_eps, mhc_pre_eps, sinkhorn_repeat, **more
    ):
        assert k == streams[0].numel() and more["mhc_post_mult_value"] == 2 and more["mhc_sinkhorn_eps"] == mhc_pre_eps
        y, post, comb = mhc_pre(streams, self.fn, scale, base, sinkhorn_repeat, mhc_pre_eps, rms_eps)
        return post.unsqueeze(-1), comb, y


def fp8_gemm(a, b, out, disable_ue8m0_cast):
    x = (a[0].float().unflatten(-1, (-1, 128)) * a[1].unsqueeze(-1)).flatten(-2)
    out.copy_(x @ (b[0].float() * b[1].repeat_interleave(128, 0).repeat_interleave(128, 1)).T)


@pytest.fixture
def stand_ins(monkeypatch):
    connections, moe = Connections(), Moe()
    gemm = SimpleNamespace(get_mn_major_tma_aligned_tensor=lambda s: s, fp8_fp4_gemm_nt=fp8_gemm)
    for file in FILES:
        monkeypatch.setattr(file, "at_least", lambda *version: None, raising=False)
        monkeypatch.setattr(file, "hopper", lambda: None, raising=False)
        monkeypatch.setattr(file, "library", lambda name, space: moe if "moe" in name else OPS, raising=False)
    monkeypatch.setattr(linear, "require", lambda module: gemm)
    monkeypatch.setattr(hyper_connections, "require", lambda module: connections)
    for file in (hyper_connections, marlin):
        monkeypatch.setattr(file, "processors", lambda: 4)


ASKED = [
    ("mhc_post", "sglang"),
    ("mhc_post", "flashinfer"),
    ("mhc_pre", "sglang"),
    ("mhc_pre", "deep_gemm-flashinfer"),
    ("mhc_pre_norm", "sglang"),
    ("mhc_post_pre_norm", "sglang"),
    ("experts", "marlin"),
    ("route_scored", "vllm"),
    ("route_hashed", "vllm"),
    ("linear", "marlin"),
    ("linear", "deep_gemm"),
    ("rms_norm", "vllm"),
    ("silu_mul", "vllm"),
    ("hadamard", "vllm"),
]


@pytest.mark.parametrize("operation, name", ASKED, ids=lambda text: text)
def test_results_around_a_stand_in_are_right(operation, name, stand_ins):
    contract, found = contract_of(operation), adapter(name, operation)
    cases = [c for c in contract.cases(WIDTHS["small"], Draw(1, torch.bfloat16)) if not found.takes(c)]
    function, accuracy = found.bind("cpu"), found.accuracy or contract.default(torch.bfloat16)
    assert cases
    for case in cases:
        judgement = truth_of(contract, case, accuracy).judge(list(tensors(function(*case.arguments))))
        assert judgement.ratio <= 1, (case.family, case.label, judgement)


@pytest.mark.parametrize("operation, name", ASKED, ids=lambda text: text)
def test_no_tokens_give_empty_results(operation, name, stand_ins):
    contract, found = contract_of(operation), adapter(name, operation)
    case = next(c for c in contract.cases(WIDTHS["small"], Draw(1, torch.bfloat16)) if not found.takes(c))
    function, cut = found.bind("cpu"), list(case.arguments)
    want = [t.shape[1:] for t in tensors(function(*cut))]
    for argument, axis in contract.batch.items():
        at = contract.number(argument)
        cut[at] = cut[at].narrow(axis, 0, 0)
    assert [t.shape for t in tensors(function(*cut))] == [(0, *shape) for shape in want]
