"""Products on a GPU (in Triton's interpreter without one) against their definitions."""

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.fusions import compositions
from dsv4.kernels.linear import reference, triton_fused, triton_streams
from dsv4.kernels.linear import triton as gpu
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.rms_norm.reference import rms_norm
from dsv4.kernels.rope.reference import inverse_frequencies, rotate, rotation
from tests.kernels.products import (
    CUDA,
    DEVICE,
    DTYPES,
    FORMATS,
    QUANTISED,
    TOLERANCE,
    distance,
    exact,
    graphed,
    needs_gpu,
    pack,
    randn,
)
from tests.kernels.ptx import compiled

SHAPES = [(1, 416, 20), (11, 672, 18), (17, 160, 40), (40, 96, 70)]  # tokens, columns, rows


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N,K,O", SHAPES + [(1, 128, 16), (3, 256, 50), (11, 1184, 34)] if CUDA else SHAPES, ids=str)
def test_linear(form, dtype, N, K, O):
    x, w = randn(N, K).to(dtype), pack(randn(O, K), form)
    got = gpu.linear(x, w)
    assert got.dtype is dtype
    assert distance(got, exact(x, w)) < TOLERANCE[dtype]
    assert torch.equal(got, gpu.linear(x, w))


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N,K", [(5, 416), (18, 160)], ids=str)
def test_the_activation_is_quantised_first(form, dtype, N, K):
    magnitudes = torch.logspace(-6, 4, N * K // 32, device=DEVICE).repeat_interleave(32).view(N, K)
    x, w = (randn(N, K) * magnitudes).to(dtype), pack(randn(16, K), form)
    x[0, :128] = 0
    wanted = exact(simulate_fp8_blocks(x, 128), w)
    assert distance(gpu.linear(x, w, True), wanted) < TOLERANCE[dtype]
    assert distance(gpu.linear(x, w), wanted) > 1e-2


def test_a_quantised_activation_is_the_reference_s_bit_for_bit():
    """The identity as weight shows the activation itself."""
    K = 128
    w = PackedWeight(
        WeightFormat.FP8, torch.eye(K, device=DEVICE).to(torch.float8_e4m3fn), torch.ones(1, 1, device=DEVICE)
    )
    for dtype in DTYPES:
        x = (randn(8, K) * torch.logspace(-9, 9, 8, device=DEVICE).view(8, 1)).to(dtype)
        x[0, ::3] = torch.tensor([448.0, 1e-4, -(2.0**-9)], device=DEVICE).repeat(15)[:43].to(dtype)
        x[1, 5], x[2, 100] = 449.0, 2.0**-133
        assert torch.equal(gpu.linear(x, w, True), simulate_fp8_blocks(x, 128))


def test_nan_of_a_token_stays_its_own():
    x = randn(3, 256)
    x[1, 7] = float("nan")
    for form in ("fp8", "mxfp4"):
        for simulate in (False, True):
            got = gpu.linear(x, pack(randn(24, 256), form), simulate)
            assert got[1].isnan().all() and not got[[0, 2]].isnan().any()


def test_scales_at_the_ends_of_e8m0():
    codes, _ = quantize_mxfp4(randn(16, 128))
    scale = torch.full((16, 4), 127, dtype=torch.uint8, device=DEVICE)
    scale[0], scale[1], scale[2, 1] = 0, 240, 255
    w = PackedWeight(WeightFormat.MXFP4, codes, scale.view(torch.float8_e8m0fnu))
    x = randn(2, 128)
    got, wanted = gpu.linear(x, w), reference.linear(x, w)
    assert got[:, 2].isnan().all() and wanted[:, 2].isnan().all()
    keep = [i for i in range(16) if i != 2]
    assert torch.allclose(got[:, keep], wanted[:, keep], rtol=1e-4, atol=1e-42)


def test_rows_that_are_not_side_by_side():
    x, w = randn(4, 512)[:, 64:320], pack(randn(32, 256), "fp8")
    assert distance(gpu.linear(x, w, True), exact(simulate_fp8_blocks(x, 128), w)) < 1e-5
    x = randn(256, 4).T
    assert distance(gpu.linear(x, w), exact(x, w)) < 1e-5


def test_what_is_refused():
    x = randn(1, 256)
    with pytest.raises(UnsupportedInput, match="dense"):
        gpu.linear(x, pack(randn(8, 256), "dense fp32"), True)
    with pytest.raises(UnsupportedInput, match="float16"):
        gpu.linear(x.half(), pack(randn(8, 256), "fp8"))
    with pytest.raises(UnsupportedInput, match="256 columns"):
        gpu.linear(x, pack(randn(8, 128), "fp8"))
    with pytest.raises(UnsupportedInput, match="multiples of 16"):
        gpu.linear(x, PackedWeight(WeightFormat.FP8, *quantize_fp8(randn(8, 256), (8, 8)), None, (8, 8)))


@pytest.mark.parametrize("form", FORMATS if CUDA else ["dense bf16", "fp8", "fp8 blocks of 32", "nvfp4 of two"])
@pytest.mark.parametrize("N", [3, 19])
def test_each_group_meets_its_own_rows(form, N):
    G, R, K = 3, 20, 160  # R is no multiple of the FP8 block
    x, w = randn(N, G, K), pack(randn(G * R, K), form)
    got = gpu.grouped_linear(x, w)
    assert distance(got, torch.einsum("ngk,grk->ngr", x.double(), to_float(w).double().view(G, R, K))) < 1e-5
    assert torch.equal(got, gpu.grouped_linear(x.transpose(0, 1).contiguous().transpose(0, 1), w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 10, 18])
@pytest.mark.parametrize("D,d", [(64, 32), (48, 48), (20, 6)])
def test_heads_are_rotated_back_and_projected(dtype, N, D, d):
    H, G, R = 8, 2, 24
    o, w = randn(N, H, D).to(dtype), pack(randn(G * R, H * D // G), "fp8" if D == 64 else "dense bf16")
    cis = rotation(torch.arange(N, device=DEVICE), inverse_frequencies(d, 100.0).to(DEVICE)).conj()
    turned = rotate(o.clone(), cis.resolve_conj().unsqueeze(1)).view(N, G, -1)
    wanted = torch.einsum("ngk,grk->ngr", turned.double(), to_float(w).double().view(G, R, -1)).flatten(1)
    assert distance(triton_fused.project_heads(o.clone(), cis, w, G), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 9, 20])
@pytest.mark.parametrize("normed", [False, True])
def test_several_maps_of_one_input(dtype, N, normed):
    K = 160
    weights = tuple(
        pack(randn(O, K, seed=O), form)
        for O, form in (
            (20, "fp8"),
            (36, "fp8"),
            (17, "dense bf16"),
            (16, "dense bf16"),
            (16, "nvfp4"),
            (12, "mxfp4"),
            (8, "fp8 fp32 scales"),
            (9, "dense fp32"),
        )
    )
    simulate = (True, True, False, False, True, False, True, False)
    dtypes = (None, None, torch.float32, None, None, torch.float32, torch.float32, None)
    x, norm = randn(N, K).to(dtype), randn(K).to(dtype) if normed else None
    got = triton_fused.linears(x, norm, 1e-4, weights, simulate, dtypes)
    y = rms_norm(x, norm, 1e-4) if normed else x
    for out, w, sim, kind in zip(got, weights, simulate, dtypes):
        assert out.dtype is (kind or dtype) and out.is_contiguous()
        tolerance = TOLERANCE[out.dtype if not normed else dtype]
        if normed and sim:  # a value of the norm may fall on either side of the edge between two codes
            tolerance = 2e-2
        assert distance(out, exact(simulate_fp8_blocks(y, 128) if sim else y, w)) < tolerance


def test_the_composition_is_that_of_the_reference():
    op = type("op", (), {"linear": staticmethod(reference.linear), "rms_norm": staticmethod(rms_norm)})
    x, weights = randn(2, 256), (pack(randn(16, 256), "fp8"), pack(randn(24, 256), "mxfp4"))
    args = x, randn(256), 1e-5, weights, (True, False), (None, torch.float32)
    for a, b in zip(triton_fused.linears(*args), compositions.linears(op, *args)):
        assert distance(a, b) < 1e-5


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "fp8 blocks of 32"])
@pytest.mark.parametrize("N", [25, 32])
def test_a_few_tokens_more_have_the_bits_of_few(form, N):
    """A small weight is streamed for groups of tokens: a pass of drafts rounds as the steps that it stands for."""
    x, w = randn(N, 1184), pack(randn(24, 1184), form)
    simulate = w.scale is not None
    assert torch.equal(
        gpu.linear(x, w, simulate), torch.cat([gpu.linear(x[:16], w, simulate), gpu.linear(x[16:], w, simulate)])
    )


@pytest.mark.skipif(CUDA, reason="a GPU runs the assembly itself, above")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("N", [2, 17])
def test_products_of_bf16_as_a_gpu_makes_them(form, N, monkeypatch):
    compiled(monkeypatch, gpu, triton_streams)
    x, w = randn(N, 160).bfloat16(), pack(randn(16, 160), form)
    assert distance(gpu.linear(x, w), exact(x, w)) < 4e-3
    if form in QUANTISED:
        assert distance(gpu.linear(x, w, True), exact(simulate_fp8_blocks(x, 128), w)) < 4e-3


@pytest.mark.skipif(CUDA, reason="a GPU runs the assembly itself, above")
def test_sixteen_tokens_of_bf16_quantised_as_a_gpu_does_it(monkeypatch):
    compiled(monkeypatch, gpu, triton_streams)
    w = PackedWeight(WeightFormat.FP8, torch.eye(128).to(torch.float8_e4m3fn), torch.ones(1, 1))
    x = (randn(16, 128) * torch.logspace(-9, 9, 16).view(16, 1)).bfloat16()
    assert torch.equal(gpu.linear(x, w, True), simulate_fp8_blocks(x, 128))


def test_few_tokens_stream_whole_pieces_of_16_bytes():
    assert hold("", pack(randn(8, 256), "mxfp4")).streams and not hold("", pack(randn(8, 100), "fp8")).streams
    assert not hold("", pack(randn(8, 256), "fp8 blocks of 32")).streams


# At production shapes, on a GPU ---------------------------------------------------------------------------------------


def production(form: str, O: int, K: int, seed: int = 0) -> PackedWeight:
    return pack(torch.randn(O, K, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) * K**-0.5, form)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 2, 3, 8, 16, 17, 64, 300])
@pytest.mark.parametrize(
    "form,O,K",
    [
        ("mxfp4", 4096, 4096),
        ("nvfp4", 4096, 4096),
        ("fp8", 1024, 4096),
        ("fp8", 8192, 1024),
        ("fp8", 4096, 8192),
        ("fp8 fp32 scales", 512, 4096),
        ("dense bf16", 2048, 4096),
        ("dense fp32", 512, 4096),
    ],
)
def test_production_shapes(form, O, K, N):
    w = production(form, O, K)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(N, K, device="cuda").to(dtype)
        for simulate in (False, True) if form in QUANTISED else (False,):
            wanted = exact(simulate_fp8_blocks(x, 128) if simulate else x, w)
            got = gpu.linear(x, w, simulate)
            assert distance(got, wanted) < (3e-3 if dtype is torch.bfloat16 else 1e-5)
            assert all(torch.equal(got, gpu.linear(x, w, simulate)) for _ in range(20))
            assert torch.equal(got, graphed(lambda: gpu.linear(x, w, simulate)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 8, 32])
def test_production_compositions(N):
    weights = (
        production("fp8", 1024, 4096),
        production("fp8", 512, 4096, 1),
        production("dense bf16", 2048, 4096, 2),
        production("dense bf16", 512, 4096, 3),
        production("dense bf16", 64, 4096, 4),
    )
    simulate, dtypes = (True, True, False, False, False), (None, None, torch.float32, torch.float32, None)
    x = torch.randn(N, 4096, device="cuda").bfloat16()
    got = graphed(lambda: triton_fused.linears(x, None, 0.0, weights, simulate, dtypes))
    for out, w, sim, dtype in zip(got, weights, simulate, dtypes):
        assert distance(out, exact(simulate_fp8_blocks(x, 128) if sim else x, w)) < (3e-3 if dtype is None else 1e-5)
    qr, norm = torch.randn(N, 1024, device="cuda").bfloat16(), torch.rand(1024, device="cuda").bfloat16()
    queries = production("fp8", 32768, 1024), production("fp8", 8192, 1024)
    for out, w in zip(
        graphed(lambda: triton_fused.linears(qr, norm, 1e-6, queries, (False, False), (None, None))), queries
    ):
        assert distance(out, exact(rms_norm(qr, norm, 1e-6), w)) < 4e-3
    o, w = torch.randn(N, 64, 512, device="cuda").bfloat16(), production("fp8", 8192, 4096)
    cis = rotation(torch.arange(N, device="cuda") + 10**5, inverse_frequencies(64, 10000.0).cuda())
    turned = rotate(o.clone(), cis.unsqueeze(1)).view(N, 8, -1).double()
    wanted = torch.einsum("ngk,grk->ngr", turned, to_float(w).double().view(8, 1024, -1)).flatten(1)
    assert distance(graphed(lambda: triton_fused.project_heads(o.clone(), cis, w, 8)), wanted) < 3e-3


@pytest.mark.gpu
@needs_gpu
def test_a_weight_of_more_than_2_gib():
    w = PackedWeight(WeightFormat.DENSE, torch.randn(280_000, 4096, device="cuda", dtype=torch.bfloat16))
    for N in (1, 20):
        x = torch.randn(N, 4096, device="cuda").bfloat16()
        got = gpu.linear(x, w)
        for rows in (slice(0, 512), slice(-512, None)):
            assert distance(got[:, rows], x.double() @ w.weight[rows].double().T) < 4e-3
