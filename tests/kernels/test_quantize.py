"""Number formats, bit by bit, against definitions written here in Python floats."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.kernels.hadamard import hadamard
from dsv4.kernels.quantize import (
    InexactConversion,
    PackedWeight,
    WeightFormat,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    mxfp4_to_nvfp4,
    nvfp4_to_mxfp4,
    pack_e2m1,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    simulate_fp4_blocks,
    simulate_fp8_blocks,
    to_float,
    unpack_e2m1,
)

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e4m3(byte: int) -> float:
    """The definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; S.1111.111 is NaN; no infinities."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).flatten().tolist()


def nearest_even(x: float, grid: list[tuple[float, int]]) -> float:
    """The value of the grid nearest to x, ties to the even code. grid: (value ≥ 0, code)."""
    best = min(grid, key=lambda vc: (abs(Fraction(abs(x)) - Fraction(vc[0])), vc[1] & 1))
    return math.copysign(best[0], x)


E4M3_GRID = [(e4m3(b), b) for b in range(0x7F)]
E2M1_GRID = [(v, c) for c, v in enumerate(E2M1[:8])]


def block_scale(values: list[float], floor: float, top: float) -> float:
    amax = max(struct.unpack("f", struct.pack("f", floor))[0], max(abs(v) for v in values))
    quotient = Fraction(struct.unpack("f", struct.pack("f", amax / top))[0])
    k = math.floor(math.log2(quotient)) - 2
    while Fraction(2) ** k < quotient:
        k += 1
    return 2.0**k


def simulated(values, block, floor, top, grid):
    out = []
    for i in range(0, len(values), block):
        part = values[i : i + block]
        s = block_scale(part, floor, top)
        out += [nearest_even(max(-top, min(top, v / s)), grid) * s for v in part]
    return out


def test_every_e8m0_byte_is_a_power_of_two():
    got = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert all(got[b].item() == 2.0 ** (b - 127) for b in range(255))
    assert math.isnan(got[255]) and got[0].item() > 0
    same = decode_e8m0(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert bits(got) == bits(same)


def test_every_e4m3_byte():
    w = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    got = to_float(
        PackedWeight(WeightFormat.FP8, w, torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    )
    for byte, value in enumerate(got.flatten().tolist()):
        wanted = e4m3(byte)
        assert value == wanted or (math.isnan(value) and math.isnan(wanted)), byte


def test_every_fp4_code_times_every_scale_byte():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)  # 32 values: one block
    packed = pack_e2m1(codes).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e8m0fnu)
    got = to_float(PackedWeight(WeightFormat.MXFP4, packed, scale))
    for byte in range(255):
        wanted = torch.tensor([E2M1[c] * 2.0 ** (byte - 127) for c in codes.tolist()], dtype=torch.float32)
        assert bits(got[byte]) == bits(wanted), byte
    assert got[255].isnan().all()


def test_the_low_nibble_is_the_even_index():
    assert pack_e2m1(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)).tolist() == [[0x21, 0x43]]
    assert unpack_e2m1(torch.tensor([[0x21, 0x43]], dtype=torch.uint8)).tolist() == [[0.5, 1.0, 1.5, 2.0]]


def test_fp4_codes_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)
    assert decode_e2m1(codes).tolist() == E2M1


@pytest.mark.parametrize(
    "value,code",
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (5.0001, 7),
        (100.0, 7),
        (-0.25, 8),
        (-2.5, 12),
        (0.2500001, 1),
    ],
)
def test_fp4_ties_go_to_the_even_code(value, code):
    assert encode_e2m1(torch.tensor([value])).item() == code


finite = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, 1e-30, 448.0, 6.0, 3.5, -5.0, 2.0**-20, 896.0, 449.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=1, max_size=40), st.sampled_from([1, 4, 32, 64]))
def test_fp8_simulation_is_the_definition_bit_for_bit(values, block):
    x = torch.tensor(values, dtype=torch.float32)
    assert bits(simulate_fp8_blocks(x, block)) == bits(
        torch.tensor(simulated(x.tolist(), block, 1e-4, 448.0, E4M3_GRID))
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=1, max_size=40), st.sampled_from([1, 4, 32]))
def test_fp4_simulation_is_the_definition_bit_for_bit(values, block):
    x = torch.tensor(values, dtype=torch.float32)
    assert bits(simulate_fp4_blocks(x, block)) == bits(
        torch.tensor(simulated(x.tolist(), block, 6 * 2.0**-126, 6.0, E2M1_GRID))
    )


@pytest.mark.parametrize("k", [-40, -3, 0, 5], ids=lambda k: f"2^{k}")
def test_a_block_whose_amax_is_exactly_the_top_keeps_it(k):
    x = torch.tensor([448.0 * 2.0**k if k > -20 else 448.0, 1.0])
    assert simulate_fp8_blocks(x, 2)[0] == x[0]
    y = torch.tensor([6.0 * 2.0**k, 0.0])
    assert torch.equal(simulate_fp4_blocks(y, 2), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_last_block_leaves_a_contiguous_result(dtype):
    """A kernel that stands for an operation must return one, the reference too."""
    assert simulate_fp8_blocks(torch.ones(3, 200, dtype=dtype), 128).is_contiguous()


def test_bf16_is_simulated_in_fp32_and_comes_back_as_bf16():
    x = torch.randn(5, 100).bfloat16()
    assert torch.equal(simulate_fp8_blocks(x, 64), simulate_fp8_blocks(x.float(), 64).bfloat16())


@pytest.mark.parametrize("shape", [(128, 128), (130, 200), (1, 5), (300, 64)], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (32, 32)], ids=str)
def test_fp8_blocks_are_scaled_each_by_its_own_amax(shape, block):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[1])
    weight, scale = quantize_fp8(w, block)
    back = to_float(PackedWeight(WeightFormat.FP8, weight, scale, None, block))
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            part = (slice(i, i + block[0]), slice(j, j + block[1]))
            s = block_scale(w[part].flatten().tolist(), 1e-4, 448.0)
            assert decode_e8m0(scale)[i // block[0], j // block[1]].item() == s
            assert torch.equal(back[part], (w[part] / s).to(torch.float8_e4m3fn).float() * s)
    again = quantize_fp8(back, block)
    assert torch.equal(to_float(PackedWeight(WeightFormat.FP8, *again, None, block)), back)


def test_rows_can_be_dequantised_alone():
    w = torch.randn(70, 64)
    for form, tensors in (
        (WeightFormat.FP8, quantize_fp8(w, (32, 32))),
        (WeightFormat.MXFP4, quantize_mxfp4(w)),
        (WeightFormat.NVFP4, (*quantize_nvfp4(w)[:2], quantize_nvfp4(w)[2].view(1))),
    ):
        packed = PackedWeight(form, *tensors, *([None] if len(tensors) == 2 else []), (32, 32))
        assert torch.equal(to_float(packed, slice(32, 70)), to_float(packed)[32:70])


def test_mxfp4_rounds_to_the_definition():
    w = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)) * 7
    packed, scale = quantize_mxfp4(w)
    back = to_float(PackedWeight(WeightFormat.MXFP4, packed, scale))
    for row in range(4):
        assert back[row].tolist() == simulated(w[row].tolist(), 32, 6 * 2.0**-126, 6.0, E2M1_GRID)


def test_nvfp4_value_is_code_times_block_scale_times_global():
    w = torch.randn(6, 64)
    packed, scale, glob = quantize_nvfp4(w)
    back = to_float(PackedWeight(WeightFormat.NVFP4, packed, scale, glob.view(1)))
    assert (back - w).abs().max() / w.abs().max() < 0.2
    step = scale.float().repeat_interleave(16, 1) * glob
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    assert torch.equal(back, decode_e2m1(codes) * step)


def test_stacked_nvfp4_parts_have_their_own_global_scale():
    parts = [torch.randn(4, 32) * s for s in (1.0, 50.0)]
    q = [quantize_nvfp4(p) for p in parts]
    stacked = PackedWeight(
        WeightFormat.NVFP4,
        torch.cat([a[0] for a in q]),
        torch.cat([a[1].view(torch.uint8) for a in q]).view(torch.float8_e4m3fn),
        torch.stack([a[2] for a in q]),
    )
    alone = [to_float(PackedWeight(WeightFormat.NVFP4, a[0], a[1], a[2].view(1))) for a in q]
    assert torch.equal(to_float(stacked), torch.cat(alone))
    assert torch.equal(to_float(stacked, slice(3, 7)), torch.cat(alone)[3:7])


def mx(exponents, codes=None):
    """One row of MXFP4 blocks with the given scale exponents."""
    n = len(exponents)
    codes = torch.arange(32 * n, dtype=torch.uint8).view(1, -1) % 16 if codes is None else codes
    return pack_e2m1(codes), (torch.tensor([exponents]) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("span,inexact", [(0, 0), (8, 0), (17, 0), (18, 1)], ids=lambda v: str(v))
def test_mxfp4_to_nvfp4_is_exact_within_17_powers_of_two(span, inexact):
    packed, scale = mx([3, 3 - span])
    weight, blocks, glob, count = mxfp4_to_nvfp4(packed, scale)
    assert count == inexact and torch.equal(weight, packed)
    a = to_float(PackedWeight(WeightFormat.MXFP4, packed, scale))
    b = to_float(PackedWeight(WeightFormat.NVFP4, weight, blocks, glob.view(1)))
    assert torch.equal(a, b) == (inexact == 0)


def test_a_block_of_zeros_is_exact_however_far_its_scale_lies():
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[:, :32] = 3
    assert mxfp4_to_nvfp4(*mx([0, -60], codes))[3] == 0


def test_a_shared_k_max_gives_a_shared_global_scale():
    packed, scale = mx([0, -3])
    assert mxfp4_to_nvfp4(packed, scale, k_max=4)[2].item() == 2.0**-4


def test_nvfp4_comes_back_to_the_same_bytes():
    packed, scale = mx([5, -2, -12])
    weight, blocks, glob, _ = mxfp4_to_nvfp4(packed, scale)
    again = nvfp4_to_mxfp4(weight, blocks, glob)
    assert torch.equal(again[0], packed) and torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))


def test_nvfp4_that_mxfp4_cannot_hold_is_refused():
    with pytest.raises(InexactConversion, match="of 4 blocks have no exact MXFP4 form"):
        nvfp4_to_mxfp4(*quantize_nvfp4(torch.randn(2, 64)))


@pytest.mark.parametrize("d", [1, 2, 16, 128])
def test_hadamard_is_sylvester_s_and_its_own_inverse(d):
    x = torch.randn(3, d)
    wanted = torch.tensor([[(-1) ** bin(i & j).count("1") * d**-0.5 for j in range(d)] for i in range(d)])
    assert torch.allclose(hadamard(x), x @ wanted, atol=1e-5)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
