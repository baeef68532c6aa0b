"""FP8 products on Hopper, emulated: any order of copies, products and warps that a GPU may have."""

import pytest
import torch

from dsv4.kernels.linear import hopper, triton_fp8
from dsv4.kernels.linear.triton_fp8 import Tile
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from tests.gluon import SEEDS, OnCPU
from tests.kernels.products import randn


def on_cpu(monkeypatch, seed: int, programs: int, stages: int) -> None:
    """`product` as a GPU of so many multiprocessors runs it, with a ring of so many stages."""
    for name, value in (("capability", (9, 0)), ("processors", programs), ("dependent_launch", True)):
        monkeypatch.setattr(triton_fp8, name, lambda device, value=value: value)
    monkeypatch.setattr(Tile, "stages", lambda tile, out: stages)
    monkeypatch.setattr(hopper, "product", OnCPU(hopper.product, seed))


def packed(O: int, K: int, e8m0: bool) -> PackedWeight:
    g = torch.Generator().manual_seed(2)
    scale = torch.exp2(torch.randint(-4, 3, (O // 128, K // 128), generator=g).float()) * (1.0 if e8m0 else 1.3)
    codes = torch.randn(O, K, generator=g).to(torch.float8_e4m3fn)
    return PackedWeight(WeightFormat.FP8, codes, scale.to(torch.float8_e8m0fnu) if e8m0 else scale, block=(128, 128))


CASES = [  # tokens, rows, columns, tile, programs, stages
    (5, 128, 128, Tile(64, 32, True), 132, 4),  # the second warpgroup has no columns
    (70, 128, 640, Tile(64, 64, True), 3, 2),  # several tiles a program, an odd number of blocks
    (70, 256, 256, Tile(64, 32, True), 2, 8),  # the second warpgroup may be several tiles ahead
    (130, 256, 512, Tile(128, 64, False), 3, 3),
    (300, 256, 384, Tile(256, 128, False), 132, 4),  # more stages than blocks
    (257, 256, 640, Tile(256, 64, False), 2, 2),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("N, O, K, tile, programs, stages", CASES)
def test_products_are_those_of_the_rounded_numbers(N, O, K, tile, programs, stages, seed, monkeypatch):
    x, w = randn(N, K, seed=3).cpu().bfloat16(), packed(O, K, seed % 2 == 0)
    given, out = codes_of(x), torch.full((N, O), float("nan"), dtype=torch.bfloat16)
    on_cpu(monkeypatch, seed, programs, stages)
    triton_fp8.product(*given, hold("linear", w), out, tile)
    rounded, wide = simulate_fp8_blocks(x, 128).double(), to_float(w).double().t()
    right, size = rounded @ wide, rounded.abs() @ wide.abs()
    assert bool(((out.double() - right).abs() <= right.abs() * 2**-8 + size * 2**-20).all())


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantised` gives, by torch."""
    blocks = x.float().unflatten(-1, (-1, 128))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-4) / 448))
    codes = (blocks / torch.exp2(exponent).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), exponent.t().contiguous().to(torch.int8)
