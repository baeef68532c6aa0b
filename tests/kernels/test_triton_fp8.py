"""Products of FP8 activations and FP8 weights."""

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.linear import triton_fp8
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from tests.kernels.products import CUDA, DEVICE, randn

SIZES = [(1, 128, 128), (200, 256, 384)] + [(4096, 4096, 4096), (1000, 1536, 4096)] * CUDA


def packed(O: int, K: int, e8m0: bool) -> PackedWeight:
    codes = randn(O, K, seed=1).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-4, 3, (O // 128, K // 128), generator=torch.Generator().manual_seed(2)).float())
    scale = scale.to(DEVICE) * (1.0 if e8m0 else 1.3)
    return PackedWeight(WeightFormat.FP8, codes, scale.to(torch.float8_e8m0fnu) if e8m0 else scale, block=(128, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N, O, K", SIZES)
def test_codes_are_those_of_the_official_rounding(N, O, K, dtype):
    x = (randn(N, K, seed=3) * torch.exp2(randn(N, K // 128, seed=4) * 6).repeat_interleave(128, 1)).to(dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, 448.0, -1e-9, 3e4])
    codes, exponents = triton_fp8.quantised(x)
    found = codes.view(torch.float8_e4m3fn).float() * torch.exp2(exponents.float()).t().repeat_interleave(128, 1)
    assert torch.equal(found, simulate_fp8_blocks(x, 128).float())


@pytest.mark.parametrize("e8m0", [True, False], ids=["e8m0", "fp32"])
@pytest.mark.parametrize("N, O, K", SIZES)
def test_products_are_those_of_the_rounded_numbers(N, O, K, e8m0):
    """Beside fp64, no further than rounding to bf16 and 13 bits of a sum of 128 products."""
    x, w = randn(N, K, seed=3).bfloat16(), packed(O, K, e8m0)
    out = torch.empty(N, O, dtype=torch.bfloat16, device=DEVICE)
    triton_fp8.pipelined_product(*triton_fp8.quantised(x), hold("linear", w), out)
    rounded, wide = simulate_fp8_blocks(x, 128).double(), to_float(w).double().t()
    right, size = rounded @ wide, rounded.abs() @ wide.abs()
    off = (out.double() - right).abs()
    assert bool((off <= right.abs() * 2**-8 + size * 2**-12).all())


@pytest.mark.parametrize("O, K, block", [(200, 128, (128, 128)), (128, 192, (128, 128)), (128, 128, (64, 128))])
def test_other_weights_are_refused(O, K, block):
    rows, columns = -(-O // block[0]), -(-K // block[1])
    codes, scale = torch.zeros(O, K, device=DEVICE), torch.ones(rows, columns, device=DEVICE)
    w = PackedWeight(WeightFormat.FP8, codes.to(torch.float8_e4m3fn), scale, block=block)
    codes = torch.zeros(2, K, dtype=torch.uint8, device=DEVICE)
    exponents = torch.zeros(K // 128, 2, dtype=torch.int8, device=DEVICE)
    with pytest.raises(UnsupportedInput, match="FP8 products take FP8 weights in blocks of 128 × 128"):
        triton_fp8.product(codes, exponents, hold("linear", w), torch.empty(2, O, device=DEVICE))
