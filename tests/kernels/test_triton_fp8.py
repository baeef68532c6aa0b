"""Products of FP8 activations and FP8 weights."""

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.linear import triton_fp8
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.rms_norm.triton import rms_norm, rms_norm_fp8
from tests.kernels.products import CUDA, DEVICE, randn

SIZES = [(1, 128), (200, 384)] + [(4096, 4096), (1000, 1536)] * CUDA


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N, K", SIZES)
def test_codes_are_those_of_the_official_rounding(N, K, dtype):
    x = (randn(N, K, seed=3) * torch.exp2(randn(N, K // 128, seed=4) * 6).repeat_interleave(128, 1)).to(dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, 448.0, -1e-9, 3e4])
    codes, scales = triton_fp8.quantised(x)
    found = codes.view(torch.float8_e4m3fn).float() * scales.t().repeat_interleave(128, 1)
    assert torch.equal(found, simulate_fp8_blocks(x, 128).float())


@pytest.mark.parametrize("N, K", [(1, 128), (5, 384), *[(64, 1024)] * CUDA])
def test_codes_of_normalised_rows(N, K):
    x, weight = randn(N, K, seed=3).bfloat16(), randn(K, seed=5).bfloat16()
    codes, scales = triton_fp8.quantised(x, weight, 1e-6)
    found = codes.view(torch.float8_e4m3fn).float() * scales.t().repeat_interleave(128, 1)
    assert torch.equal(found, rms_norm_fp8(x, weight, 1e-6, 128).float())
    assert not torch.equal(found, rms_norm(x, weight, 1e-6).float())


@pytest.mark.parametrize("O, K", [(256, 512), *[(2048, 4096)] * CUDA])
def test_fp4_weights_are_codes(O, K):
    """Exactly; groups of zeros may have any scale."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (O, K // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 14, (O, K // 32), generator=g, dtype=torch.uint8)
    scale += torch.randint(7, 200, (O, 1), generator=g, dtype=torch.uint8)
    codes[0, :16], scale[0, 0] = 0x80, 254
    w = PackedWeight(WeightFormat.MXFP4, codes.to(DEVICE), scale.view(torch.float8_e8m0fnu).to(DEVICE))
    made = triton_fp8.of_fp4(hold("linear", w))
    assert torch.equal(made.codes.double() * made.scale.double()[:, None], to_float(w).double())
    assert made.ones.eq(127).all()


@pytest.mark.parametrize("byte", [90, 255], ids=["far away", "not a number"])
def test_other_fp4_weights_are_left_alone(byte, monkeypatch):
    scale = torch.full((256, 16), 127, dtype=torch.uint8, device=DEVICE)
    scale[3, 1] = byte
    w = torch.full((256, 256), 0x22, dtype=torch.uint8, device=DEVICE)
    held = hold("linear", PackedWeight(WeightFormat.MXFP4, w, scale.view(torch.float8_e8m0fnu)))
    monkeypatch.setattr(triton_fp8, "capability", lambda device: (9, 0))
    assert not triton_fp8.takes_fp4(held, held.weight.device)
    with pytest.raises(UnsupportedInput, match="one scale a row"):
        triton_fp8.of_fp4(held)
    near = held._replace(scale=torch.full_like(held.scale, 127), weight=held.weight.clone())
    assert triton_fp8.takes_fp4(near, held.weight.device)


@pytest.mark.parametrize("O, K, block", [(200, 128, (128, 128)), (128, 192, (128, 128)), (128, 128, (64, 128))])
def test_other_weights_are_refused(O, K, block):
    rows, columns = -(-O // block[0]), -(-K // block[1])
    codes, scale = torch.zeros(O, K, device=DEVICE), torch.ones(rows, columns, device=DEVICE)
    w = PackedWeight(WeightFormat.FP8, codes.to(torch.float8_e4m3fn), scale, block=block)
    codes = torch.zeros(2, K, dtype=torch.uint8, device=DEVICE)
    scales = triton_fp8.scales_of(torch.zeros(2, K, device=DEVICE))
    with pytest.raises(UnsupportedInput, match="FP8 products take FP8 weights in blocks of 128 × 128"):
        triton_fp8.product(codes, scales, hold("linear", w), torch.empty(2, O, device=DEVICE))
