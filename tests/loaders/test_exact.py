"""Dense values that a format can hold come back unchanged; what it cannot hold is counted."""

import pytest
import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_nvfp4, to_float
from dsv4.kernels.quantize.formats import encode_e8m0
from dsv4.loaders.exact import changed, nvfp4_global, quantised

BLOCK = (128, 128)


def codes(shape, seed=0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def mxfp4(exponents: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """fp32 [O, 32·n] of random codes at scales 2^exponents [O, n]."""
    O, n = exponents.shape
    return to_float(PackedWeight(WeightFormat.MXFP4, codes((O, 16 * n), seed), encode_e8m0(exponents)))


@pytest.mark.parametrize("lowest,highest", [(-20, -4), (-127, -110), (100, 115), (3, 3)])
def test_values_of_mxfp4_are_exact_in_mxfp4_and_nvfp4(lowest, highest):
    exponents = torch.randint(lowest, highest + 1, (24, 4), generator=torch.Generator().manual_seed(1))
    value = mxfp4(exponents)
    packed, lost = quantised(value, WeightFormat.MXFP4, BLOCK)
    assert lost == 0 and torch.equal(to_float(packed), value)
    if lowest > -127:  # at the lowest fp32 exponents the global scale itself runs out
        packed, lost = quantised(value, WeightFormat.NVFP4, BLOCK, nvfp4_global(value))
        assert lost == 0 and torch.equal(to_float(packed), value)


@pytest.mark.parametrize("glob", [2.0**-9, 0.00123, 3.3e-5, 0.7])
def test_values_of_nvfp4_of_any_global_scale_are_exact_in_nvfp4(glob):
    g = torch.Generator().manual_seed(2)
    scale = (torch.rand(16, 8, generator=g) * 300 + 1).to(torch.float8_e4m3fn)
    scale[3, 5] = 448.0
    value = to_float(PackedWeight(WeightFormat.NVFP4, codes((16, 64)), scale, torch.tensor([glob])))
    found = nvfp4_global(value)
    packed, lost = quantised(value, WeightFormat.NVFP4, BLOCK, found)
    assert lost == 0 and torch.equal(to_float(packed), value)


@pytest.mark.parametrize("exponent", [-9, -40, -118, 60])
def test_values_of_fp8_are_exact_in_fp8_far_below_the_floor_of_the_official_rule(exponent):
    code = torch.arange(256, dtype=torch.uint8).repeat(140, 1)[:, torch.randperm(256)]
    code[(code & 0x7F) == 0x7F] = 0  # NaN
    scale = encode_e8m0(torch.full((2, 2), exponent) + torch.tensor([[0, 1], [2, 3]]))
    value = to_float(PackedWeight(WeightFormat.FP8, code.view(torch.float8_e4m3fn), scale, block=BLOCK))
    packed, lost = quantised(value, WeightFormat.FP8, BLOCK)
    assert lost == 0 and torch.equal(to_float(packed), value)


def test_zeros_are_exact_in_every_format():
    value = torch.zeros(32, 64)
    for form in (WeightFormat.FP8, WeightFormat.MXFP4, WeightFormat.NVFP4):
        assert quantised(value, form, BLOCK, nvfp4_global(value))[1] == 0


def test_one_value_that_no_scale_holds_is_counted():
    value = mxfp4(torch.zeros(8, 2, dtype=torch.int64))
    value[3, 5] = 5.0
    assert nvfp4_global(value) is None
    assert quantised(value, WeightFormat.NVFP4, BLOCK)[1] > 0
    assert quantised(value, WeightFormat.MXFP4, BLOCK)[1] == 1


def test_random_values_are_rounded_in_the_official_way():
    value = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    assert nvfp4_global(value) is None
    packed, lost = quantised(value, WeightFormat.NVFP4, BLOCK)
    weight, scale, _ = quantize_nvfp4(value)
    assert torch.equal(packed.weight, weight) and lost == changed(packed, value) > 1000
    assert torch.equal(packed.scale.view(torch.uint8), scale.view(torch.uint8))
