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


@pytest.mark.parametrize("O, K", [(64, 256), *[(2048, 4096)] * CUDA])
def test_fp4_weights_are_codes(O, K):
    """Exactly, where scales of 128 columns are within 2^14; then by 2^-16 of the largest scale."""
    codes = torch.randint(0, 256, (O, K // 2), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    near = torch.randint(0, 15, (O, K // 32), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    base = torch.randint(0, 200, (O, 1), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    for scale, exact in ((near + base, True), (2 * near + base, False)):
        w = PackedWeight(WeightFormat.MXFP4, codes.to(DEVICE), scale.view(torch.float8_e8m0fnu).to(DEVICE))
        made, wanted = triton_fp8.of_fp4(hold("linear", w)), to_float(w).double()
        found = made.weight.double().unflatten(1, (-1, 128)) * made.scale.double().t().unsqueeze(-1)
        most = torch.exp2(scale.to(DEVICE).double() - 127).unflatten(1, (-1, 4)).amax(-1, keepdim=True)
        off = (found - wanted.unflatten(1, (-1, 128))).abs() / most
        assert made.block == (1, 128) and off.max() <= (0.0 if exact else 2**-16) and (exact or off.max() > 0)


def test_fp4_weights_with_scales_that_are_not_numbers():
    w = torch.full((32, 64), 0x22, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((32, 4), 127, dtype=torch.uint8, device=DEVICE)
    scale[3, 1] = 255
    w = PackedWeight(WeightFormat.MXFP4, w, scale.view(torch.float8_e8m0fnu))
    made = triton_fp8.of_fp4(hold("linear", w))
    assert torch.equal(made.weight.float().isnan(), to_float(w).isnan())


@pytest.mark.parametrize("O, K, block", [(200, 128, (128, 128)), (128, 192, (128, 128)), (128, 128, (64, 128))])
def test_other_weights_are_refused(O, K, block):
    rows, columns = -(-O // block[0]), -(-K // block[1])
    codes, scale = torch.zeros(O, K, device=DEVICE), torch.ones(rows, columns, device=DEVICE)
    w = PackedWeight(WeightFormat.FP8, codes.to(torch.float8_e4m3fn), scale, block=block)
    codes = torch.zeros(2, K, dtype=torch.uint8, device=DEVICE)
    scales = triton_fp8.scales_of(torch.zeros(2, K, device=DEVICE))
    with pytest.raises(UnsupportedInput, match="FP8 products take FP8 weights in blocks of 128 × 128"):
        triton_fp8.product(codes, scales, hold("linear", w), torch.empty(2, O, device=DEVICE))
