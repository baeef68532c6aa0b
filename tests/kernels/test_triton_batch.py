"""Products of 17 to 64 tokens with several weights in one launch: norm, rotation and order of columns in the kernel."""

import pytest
import torch

from dsv4.kernels.fusions.exact import DEFINED
from dsv4.kernels.linear import triton as gpu
from dsv4.kernels.linear import triton_batch, triton_fp8, triton_fused, triton_streams
from dsv4.kernels.quantize import simulate_fp8_blocks
from dsv4.kernels.quantize.coded import CodedRows, RoundedRows
from dsv4.kernels.rms_norm.reference import rms_norm
from dsv4.kernels.rope.reference import inverse_frequencies, rotation
from tests.kernels.products import (
    CUDA,
    DEVICE,
    DTYPES,
    FORMATS,
    TOLERANCE,
    distance,
    exact,
    pack,
    poison,  # noqa: F401 (a fixture: fresh buffers hold NaN)
    randn,
)
from tests.kernels.ptx import compiled

STREAMED = [form for form in FORMATS if form != "fp8 blocks of 32"]
MAPS = ((20, "fp8"), (70, "fp8"), (17, "dense bf16"), (16, "nvfp4"), (12, "mxfp4"), (9, "dense fp32"), (65, "fp8"))
EXACT = (None, None, torch.float32, None, torch.float32, None, torch.float32)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """bf16 is multiplied as bf16, with the assembly of a GPU."""
    if not CUDA:
        compiled(monkeypatch, gpu, triton_streams, triton_batch)


def maps(K: int, listed=MAPS):
    return tuple(pack(randn(O, K, seed=O), form) for O, form in listed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("N,K", [(33, 160), (64, 416)], ids=str)
def test_several_maps_of_tens_of_tokens(dtype, normed, N, K):
    """More weights than a launch takes, and rows whose last tiles of columns are short."""
    weights, x = maps(K), randn(N, K).to(dtype)
    norm = randn(K).to(dtype) if normed else None
    got = triton_fused.linears(x, norm, 1e-4, weights, (False,) * len(weights), EXACT)
    y = rms_norm(x, norm, 1e-4) if normed else x
    for out, w, kind in zip(got, weights, EXACT):
        assert out.dtype is (kind or dtype) and out.is_contiguous()
        assert distance(out, exact(y, w)) < TOLERANCE[out.dtype if not normed else dtype]


@pytest.mark.skipif(CUDA, reason="a GPU multiplies bf16 anyway")
@pytest.mark.parametrize("form", STREAMED)
@pytest.mark.parametrize("normed", [False, True])
def test_each_format_as_a_gpu_multiplies_it(as_on_a_gpu, form, normed):
    N, K = 40, 320
    weights, x = maps(K, ((70, form), (130, form))), randn(N, K).bfloat16()
    norm = randn(K).bfloat16() if normed else None
    got = triton_fused.linears(x, norm, 1e-4, weights, (False, False), (None, torch.float32))
    for out, w in zip(got, weights):
        assert distance(out, exact(rms_norm(x.float(), norm.float(), 1e-4) if normed else x, w)) < 6e-3


@pytest.mark.parametrize("normed", [False, True])
def test_maps_that_quantise_their_input_beside_others_that_do_not(normed):
    K = 256
    weights, x = maps(K, ((20, "fp8"), (24, "dense bf16"), (36, "mxfp4"))), randn(40, K)
    norm = randn(K) if normed else None
    got = triton_fused.linears(x, norm, 1e-4, weights, (True, False, True), (None, torch.float32, None))
    y = rms_norm(x, norm, 1e-4) if normed else x
    for out, w, sim in zip(got, weights, (True, False, True)):
        assert distance(out, exact(simulate_fp8_blocks(y, 128) if sim else y, w)) < 1e-5


def test_numbers_that_come_with_the_input_are_taken_where_it_is_rounded():
    weights, x = maps(256, ((20, "fp8"), (24, "dense bf16"))), randn(40, 256)
    other = randn(40, 256, seed=5)
    run = lambda x: triton_fused.linears(x, None, 0.0, weights, (True, False), (None, torch.float32))
    found, wanted = run(RoundedRows(x, simulate_fp8_blocks(x, 128))), run(x)
    assert all(map(torch.equal, found, wanted))
    found = run(RoundedRows(x, simulate_fp8_blocks(other, 128)))
    assert torch.equal(found[0], run(other)[0]) and torch.equal(found[1], wanted[1])


def test_the_norm_adds_eps_to_the_mean_of_squares():
    x, w, norm = 1e-3 * randn(40, 160), maps(160, ((24, "fp8"),)), randn(160)
    got = triton_fused.linears(x, norm, 1e-4, w, (False,), (None,))[0]
    assert distance(got, exact(rms_norm(x, norm, 1e-4), w[0])) < 1e-5
    assert distance(got, exact(rms_norm(x, norm, 1e-6), w[0])) > 1e-2


@pytest.mark.parametrize("D,d", [(128, 32), (256, 64), (128, 16)])
@pytest.mark.parametrize("form", ["fp8", "dense bf16", "mxfp4"])
@pytest.mark.parametrize("N,path", [(20, "fp32"), (64, "bf16")])
def test_heads_are_rotated_in_the_tiles_of_their_projection(N, path, form, D, d, request):
    if path == "bf16":
        request.getfixturevalue("as_on_a_gpu")
    H, G, R = 6, 2, 64
    o, w = randn(N, H, D).to(torch.bfloat16 if path == "bf16" else torch.float32), pack(randn(G * R, H * D // G), form)
    cis = rotation(torch.arange(N, device=DEVICE), inverse_frequencies(d, 100.0).to(DEVICE)).conj()
    deep = path == "bf16" or form != "dense bf16" or d <= 32  # tiles of fp32 have 32 columns
    assert triton_batch.turns_within(gpu.hold("", w), o, G, D, d) == deep
    wanted = DEFINED.project_heads(o.clone(), cis, w, G)
    assert distance(triton_fused.project_heads(o, cis, w, G), wanted) < (6e-3 if path == "bf16" else 1e-5)


def test_heads_that_tiles_do_not_divide_are_rotated_before():
    N, H, D, d, G, R = 20, 4, 80, 16, 2, 64
    o, w = randn(N, H, D), pack(randn(G * R, H * D // G), "dense bf16")
    cis = rotation(torch.arange(N, device=DEVICE), inverse_frequencies(d, 100.0).to(DEVICE)).conj()
    assert not triton_batch.turns_within(gpu.hold("", w), o, G, D, d)
    wanted = DEFINED.project_heads(o.clone(), cis, w, G)
    assert distance(triton_fused.project_heads(o.clone(), cis, w, G), wanted) < 1e-5


@pytest.mark.parametrize("N", [17, 33, 64])
def test_heads_come_with_the_codes_of_their_rounding(as_on_a_gpu, monkeypatch, N):
    """Both groups have two blocks of 128 columns. x is that of heads without codes, bit for bit."""
    H, D, d, G, R = 4, 128, 32, 2, 256
    monkeypatch.setattr(triton_batch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "TOKENS", 8)
    monkeypatch.setattr(triton_fused, "TOKENS", 8)
    o, w = randn(N, H, D).bfloat16(), pack(randn(G * R, H * D // G), "fp8")
    o[1::3] *= 2.0**-20  # scales of every token of its own, some of them the least
    o[2, :, D // 2 :] *= 64
    cis = rotation(torch.arange(N, device=DEVICE), inverse_frequencies(d, 100.0).to(DEVICE)).conj()
    found, x = (triton_fused.project_heads(o.clone(), cis, w, G, coded) for coded in (True, False))
    assert isinstance(found, CodedRows) and torch.equal(found.x, x)
    assert all(map(torch.equal, found[1:], triton_fp8.quantised(x)))
    assert len(found.scales.unique()) > 2


def test_heads_come_without_codes_where_a_block_is_of_two_groups_or_no_product_takes_them(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(triton_batch, "capability", lambda device: (9, 0))
    x = torch.zeros(40, 256, dtype=torch.bfloat16, device=DEVICE)
    held = lambda rows: gpu.hold("", pack(randn(rows, 128), "fp8"))
    assert triton_batch.codes_within(held(256), x, 2) and not triton_batch.codes_within(held(384), x, 2)
    assert not triton_batch.codes_within(held(256), x[:9], 2) and not triton_batch.codes_within(held(256), x.float(), 2)
    monkeypatch.setattr(triton_batch, "capability", lambda device: (8, 0))
    assert not triton_batch.codes_within(held(256), x, 2)
