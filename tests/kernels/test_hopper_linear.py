"""FP8 products on Hopper, emulated: any order of copies, products and warps that a GPU may have."""

import pytest
import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.kernels.linear import hopper, triton, triton_fp8
from dsv4.kernels.linear.triton_fp8 import Tile
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_mxfp4, to_float
from dsv4.kernels.quantize.coded import FEWEST, CodedRows
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.rms_norm.reference import rms_norm
from tests.gluon import SEEDS, OnCPU
from tests.kernels.products import CUDA, randn

HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9


def on_cpu(monkeypatch, seed: int, programs: int, stages: int, each: int = 1) -> None:
    """`product` as a GPU of so many multiprocessors runs it, with a ring of so many stages of `each` blocks."""
    for name, value in (("capability", (9, 0)), ("processors", programs), ("dependent_launch", True)):
        monkeypatch.setattr(triton_fp8, name, lambda device, value=value: value)
    monkeypatch.setattr(Tile, "stages", lambda tile, out, blocks: (stages, each))
    monkeypatch.setattr(hopper, "product", OnCPU(hopper.product, seed))


def packed(O: int, K: int, e8m0: bool, seed: int = 2) -> PackedWeight:
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-4, 3, (O // 128, K // 128), generator=g).float()) * (1.0 if e8m0 else 1.3)
    codes = torch.randn(O, K, generator=g).to(torch.float8_e4m3fn)
    return PackedWeight(WeightFormat.FP8, codes, scale.to(torch.float8_e8m0fnu) if e8m0 else scale, block=(128, 128))


CASES = [  # tokens, rows, columns, tile, programs, stages, blocks of a stage
    (5, 128, 128, Tile(64, 32, True), 132, 4, 1),  # the second warpgroup has no columns
    (5, 128, 256, Tile(64, 32, True), 132, 4, 2),
    (70, 128, 640, Tile(64, 64, True), 3, 2, 1),  # several tiles a program, an odd number of blocks
    (70, 128, 768, Tile(64, 64, True), 3, 2, 2),  # an odd number of stages
    (70, 256, 256, Tile(64, 32, True), 2, 8, 1),  # the second warpgroup may be several tiles ahead
    (70, 256, 512, Tile(64, 32, True), 2, 8, 2),
    (130, 256, 512, Tile(128, 64, False), 3, 3, 1),
    (300, 256, 384, Tile(128, 128, False), 132, 4, 1),  # more stages than blocks
    (257, 256, 640, Tile(128, 128, False), 2, 2, 1),
    (300, 256, 384, Tile(256, 128, False), 132, 4, 1),
    (257, 256, 640, Tile(256, 64, False), 2, 2, 1),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("N, O, K, tile, programs, stages, each", CASES)
def test_products_are_those_of_the_rounded_numbers(N, O, K, tile, programs, stages, each, seed, monkeypatch):
    x, w = randn(N, K, seed=3).cpu().bfloat16(), packed(O, K, seed % 2 == 0)
    given, out = codes_of(x), torch.full((N, O), float("nan"), dtype=(torch.bfloat16, torch.float32)[seed % 3 == 1])
    on_cpu(monkeypatch, seed, programs, stages, each)
    triton_fp8.product(*given, hold("linear", w), out, tile)
    rounded, wide = simulate_fp8_blocks(x, 128).double(), to_float(w).double().t()
    right, size = rounded @ wide, rounded.abs() @ wide.abs()
    rounding = 2**-8 if out.dtype is torch.bfloat16 else 2**-20
    assert bool(((out.double() - right).abs() <= right.abs() * rounding + size * 2**-20).all())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "N, O, O1, K, tile, programs",
    [
        (70, 256, 128, 256, Tile(64, 32, True), 3),  # programs go from one weight to the other
        (5, 128, 384, 384, Tile(64, 64, True), 132),
        (130, 128, 256, 384, Tile(128, 128, False), 2),
        (300, 256, 128, 256, Tile(256, 64, False), 2),
    ],
)
def test_two_weights_of_one_launch(N, O, O1, K, tile, programs, seed, monkeypatch):
    """They have the bits of two launches."""
    x, e8m0 = randn(N, K, seed=3).cpu().bfloat16(), seed % 2 == 0
    given, both = codes_of(x), [hold("linear", packed(rows, K, e8m0, seed=rows)) for rows in (O, O1)]
    on_cpu(monkeypatch, seed, programs, 4)
    made = lambda: [torch.full((N, rows), float("nan"), dtype=torch.bfloat16) for rows in (O, O1)]
    apart, together = made(), made()
    for h, out in zip(both, apart, strict=True):
        triton_fp8.product(*given, h, out, tile)
    triton_fp8.product(*given, both[0], together[0], tile, both[1], together[1])
    assert all(map(torch.equal, apart, together)) and not torch.equal(together[0][:, :O1], together[1][:, :O])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "N, tile, programs", [(130, Tile(128, 128, False), 2), (70, Tile(64, 64, True), 3), (260, Tile(256, 128, False), 2)]
)
def test_rows_with_a_scale_each(N, tile, programs, seed, monkeypatch):
    """Rows whose sizes differ by 2^40 lose nothing to each other."""
    O, K = 256, 384
    x, w, g = randn(N, K, seed=3).cpu().bfloat16(), packed(O, K, True), torch.Generator().manual_seed(seed)
    scale, ones = torch.exp2(torch.randint(-20, 20, (O,), generator=g).float()), torch.full((2, 3), 127)
    monkeypatch.setattr(triton_fp8, "takes_fp4", lambda h, device: True)
    monkeypatch.setattr(triton_fp8, "of_fp4", lambda h: triton_fp8.Coded(w.weight, ones.to(torch.uint8), scale))
    out = torch.full((N, O), float("nan"))
    on_cpu(monkeypatch, seed, programs, 4)
    triton_fp8.product(*codes_of(x), hold("linear", w), out, tile)
    rounded, wide = simulate_fp8_blocks(x, 128).double(), (w.weight.double() * scale.double()[:, None]).t()
    assert bool(((out.double() - rounded @ wide).abs() <= rounded.abs() @ wide.abs() * 2**-20).all())


def test_a_weight_of_exact_sums_meets_no_codes(monkeypatch):
    monkeypatch.setattr(triton_fp8, "capability", lambda device: (9, 0))
    x, w = torch.zeros(64, 256, dtype=torch.bfloat16), packed(128, 256, True)
    monkeypatch.setattr(triton, "dot_in_fp32", lambda x: False)
    assert triton.multiplies_codes(x, hold("linear", w), True)
    assert not triton.multiplies_codes(x, hold("linear", w._replace(exact_sums=True)), True)


@pytest.mark.parametrize("O, K, tile", [(256, 512, None), (128, 256, Tile(64, 32, True))])
def test_a_token_has_the_same_bits_among_up_to_64(O, K, tile, monkeypatch):
    """So a pass with drafts has those of its tokens one by one."""
    assert 1 + MAX_DRAFTS < FEWEST <= 64  # several weights of an input are streamed on both sides
    on_cpu(monkeypatch, 1, 132, 4)
    assert len({triton_fp8.tile_for(N, O, 132) for N in range(1, 65)}) == 1
    x, h = randn(64, K, seed=3).cpu().bfloat16(), hold("linear", packed(O, K, True))
    outs = [torch.empty(N, O, dtype=torch.bfloat16) for N in (64, 17, 5, 1)]
    for out in outs:
        triton_fp8.product(*codes_of(x[: len(out)]), h, out, tile)
    assert all(torch.equal(out, outs[0][: len(out)]) for out in outs)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_codes_that_come_with_the_input_are_multiplied(normed, exact, monkeypatch):
    """As those that are made of it. A norm needs others, and weights of exact sums take the numbers."""
    monkeypatch.setattr(triton, "dot_in_fp32", lambda x: False)
    on_cpu(monkeypatch, 1, 132, 4)
    made = lambda x, norm, eps: codes_of(x if norm is None else rms_norm(x, norm, eps))
    monkeypatch.setattr(triton_fp8, "quantised", made)
    x, norm = randn(33, 256, seed=3).cpu().bfloat16(), torch.rand(256).bfloat16() if normed else None
    w = packed(128, 256, True)._replace(exact_sums=exact)
    others = CodedRows(x, *codes_of(2 * x))
    run = lambda x: triton.products("linears", x, norm, 1e-6, (w,), (True,), (torch.bfloat16,))[0]
    found, wanted, doubled = run(others), run(x), run(2 * x)
    assert torch.equal(found, doubled if not normed and not exact else wanted)
    assert normed or not torch.equal(wanted, doubled)


@pytest.mark.parametrize("paired", [True, False])
def test_weights_that_are_alike_share_a_launch(paired, monkeypatch):
    made, x = [], torch.zeros(2, 256)
    monkeypatch.setattr(triton_fp8, "PAIRED", paired)
    monkeypatch.setattr(triton_fp8, "product", lambda codes, scales, *given: made.append(given))
    held = [hold("linear", packed(128, 256, e8m0)) for e8m0 in (True, False, True, True, False, True)]
    outs = [torch.empty(2, 128, dtype=t) for t in (torch.bfloat16,) * 3 + (torch.float32,) + (torch.bfloat16,) * 2]
    triton_fp8.products(x, x, held, outs)
    pairs = [[i for i, h in enumerate(held) if any(h is each for each in given)] for given in made]
    assert pairs == ([[0, 2], [1, 4], [3], [5]] if paired else [[i] for i in range(6)])
    assert all(given[1] is outs[pair[0]] for given, pair in zip(made, pairs, strict=True))


@pytest.mark.parametrize("N", [1, 16, 64, 65, 128, 256, 4096])
@pytest.mark.parametrize("O", [128, 1024, 4096, 32768])
def test_the_chosen_tile_keeps_the_gpu_busy(N, O):
    """No other tile takes fewer rounds and less time each."""
    chosen = triton_fp8.tile_for(N, O, 132)
    rounds = lambda tile: -(-(-(-N // tile.tokens) * (O // tile.rows)) // 132)
    better = [t for t, us in triton_fp8.TIMES.items() if rounds(t) <= rounds(chosen) and us < triton_fp8.TIMES[chosen]]
    assert all(tile.rows == 32 for tile in better)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("N", [1, 16, 64, 65, 128, 300, 1000])
@pytest.mark.parametrize("O, K", [(4096, 4096), (1024, 4096), (32768, 1024), (4096, 8192), (256, 128)])
def test_on_the_gpu(N, O, K):
    """Every tile, and the one that is chosen, often: sums of a block keep 13 bits at least."""
    x, w, dtype = randn(N, K, seed=3).bfloat16(), packed(O, K, N % 2 == 0), (torch.bfloat16, torch.float32)[N % 3 == 1]
    w = w._replace(weight=w.weight.cuda(), scale=w.scale.cuda())
    given, held = triton_fp8.quantised(x), hold("linear", w)
    rounded, wide = simulate_fp8_blocks(x, 128).double(), to_float(w).double().t()
    right, size = rounded @ wide, rounded.abs() @ wide.abs()
    for tile in (None, *triton_fp8.TIMES):
        outs = [torch.full((N, O), float("nan"), dtype=dtype, device="cuda") for _ in range(3)]
        for out in outs:
            triton_fp8.product(*given, held, out, tile)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), tile
        assert bool(((outs[0].double() - right).abs() <= right.abs() * 2**-8 + size * 2**-12).all()), tile


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("N", [17, 64, 300, 1000])
@pytest.mark.parametrize("O, O1, K", [(1024, 512, 4096), (32768, 8192, 1024), (2048, 2048, 4096)])
def test_two_weights_on_the_gpu(N, O, O1, K):
    x, both = randn(N, K, seed=3).bfloat16(), [packed(rows, K, True, seed=rows) for rows in (O, O1)]
    held = [hold("linear", w._replace(weight=w.weight.cuda(), scale=w.scale.cuda())) for w in both]
    given = triton_fp8.quantised(x)
    made = lambda: [torch.full((N, rows), float("nan"), dtype=torch.bfloat16, device="cuda") for rows in (O, O1)]
    for tile in triton_fp8.TIMES:
        apart, together = made(), made()
        for h, out in zip(held, apart, strict=True):
            triton_fp8.product(*given, h, out, tile)
        triton_fp8.product(*given, held[0], together[0], tile, held[1], together[1])
        assert all(map(torch.equal, apart, together)), tile


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_fp4_weights_on_the_gpu():
    """A product of many tokens by codes, beside the exact one of the same numbers."""
    x, w = randn(1024, 4096, seed=3).bfloat16(), randn(2048, 4096, seed=4)
    w *= torch.exp2(randn(2048, 1, seed=5) * 6)
    w = PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(w))
    assert triton.multiplies_codes(x, hold("linear", w), True)
    out = triton.linear(x, w, True)
    rounded, wide = simulate_fp8_blocks(x, 128).double(), to_float(w).double().t()
    right, size = rounded @ wide, rounded.abs() @ wide.abs()
    assert bool(((out.double() - right).abs() <= right.abs() * 2**-8 + size * 2**-12).all())


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantised` gives, by torch."""
    blocks = x.float().unflatten(-1, (-1, 128))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-4) / 448))
    codes = (blocks / torch.exp2(exponent).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    scales = triton_fp8.scales_of(x)
    scales.copy_(torch.exp2(exponent).t())
    return codes.view(torch.uint8), scales
