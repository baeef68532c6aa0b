"""Weights dequantised for cuBLAS, and products with them."""

import pytest
import torch

from dsv4.kernels.linear import reference, triton, triton_dense
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_mxfp4, to_float
from tests.kernels.products import CUDA, DEVICE, randn

TOKENS = triton_dense.TOKENS if CUDA else 72


def weight(form: str, O: int, K: int, scales=(120, 134)) -> PackedWeight:
    w = randn(O, K, seed=1)
    g = torch.Generator().manual_seed(2)
    if form == "bf16":
        return PackedWeight(WeightFormat.DENSE, w.bfloat16())
    if form == "mxfp4":
        spread = torch.exp2(torch.randint(-20, 20, (O, 1), generator=g).float()).to(DEVICE)
        return PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(w * spread))
    block = (64, 32) if form == "small blocks" else (128, 128)
    shape = -(-O // block[0]), -(-K // block[1])
    scale = torch.randint(*scales, shape, generator=g, dtype=torch.uint8).to(DEVICE)
    if form == "fp32 scales":
        return PackedWeight(WeightFormat.FP8, w.to(torch.float8_e4m3fn), scale.float() / 100, block=block)
    return PackedWeight(WeightFormat.FP8, w.to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), block=block)


SIZES = [("fp8", 256, 384), ("small blocks", 96, 256), ("mxfp4", 48, 256), ("bf16", 32, 128)]


@pytest.mark.parametrize("form, O, K", SIZES)
def test_weights_are_exact(form, O, K):
    w = weight(form, O, K)
    found = triton_dense.dequantised(hold("linear", w))
    assert found.dtype is torch.bfloat16 and torch.equal(found.float(), to_float(w))


@pytest.fixture
def dense(monkeypatch):
    """Counts products; without a GPU so few tokens, and the interpreter, are enough."""
    made, product = [], triton_dense.product
    monkeypatch.setattr(triton_dense, "product", lambda *given: made.append(given) or product(*given))
    if not CUDA:
        monkeypatch.setattr(triton_dense, "TOKENS", TOKENS)
        monkeypatch.setattr(triton_dense, "interpreting", lambda: False)
    return made


@pytest.mark.parametrize("simulate", [False, True])
@pytest.mark.parametrize("form", ["fp8", "small blocks", "mxfp4", "bf16"])
def test_products(form, simulate, dense):
    if simulate and form == "bf16":
        pytest.skip("activations are rounded for FP8 and FP4 weights only")
    x, w = randn(TOKENS, 256, seed=3).bfloat16(), weight(form, 256, 256)
    out = triton.linear(x, w, simulate)
    hopper = CUDA and simulate and form == "fp8" and torch.cuda.get_device_capability()[0] == 9  # codes meet codes
    assert len(dense) == (0 if hopper else 1)
    close(out, reference.linear(x.float(), w, simulate))


def test_groups(dense):
    x, w = randn(TOKENS, 3, 128, seed=3).bfloat16(), weight("fp8", 384, 128)
    out = triton.grouped_linear(x, w)
    assert len(dense) == 1
    close(out, reference.grouped_linear(x.float(), w))


@pytest.mark.parametrize("what", ["few", "fp32", "fp32 scales", "odd rows"])
def test_other_products_use_tiles(what, dense):
    x = randn(TOKENS - (what == "few"), 256, seed=3)
    w = weight("fp32 scales" if what == "fp32 scales" else "mxfp4", 40 if what == "odd rows" else 64, 256)
    triton.linear(x if what == "fp32" else x.bfloat16(), w)
    assert not dense


def close(out: torch.Tensor, right: torch.Tensor) -> None:
    assert out.dtype is torch.bfloat16
    assert float((out.float() - right).abs().max()) <= 2**-7 * float(right.abs().max())
