"""Number formats inside Triton kernels, bit by bit, and the simulation of quantisation against its reference."""

import pytest
import torch
import triton
import triton.language as tl

from dsv4.kernels import quantize
from dsv4.kernels.quantize import formats
from dsv4.kernels.quantize import triton_codes as codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(got, wanted):
    """Equal bit for bit but for what a NaN holds."""
    assert got.dtype == wanted.dtype and torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(bits(got)[~got.isnan()], bits(wanted)[~wanted.isnan()])


# Number formats -------------------------------------------------------------------------------------------------------


@triton.jit
def _apply(X, Y, n, WHICH: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i, mask=i < n, other=0)
    if WHICH == "decode_e8m0":
        y = codes.decode_e8m0(x)
    elif WHICH == "decode_e4m3":
        y = codes.decode_e4m3(x)
    elif WHICH == "decode_e2m1":
        y = codes.decode_e2m1(x)
    elif WHICH == "encode_e4m3":
        y = codes.encode_e4m3(x)
    elif WHICH == "encode_e2m1":
        y = codes.encode_e2m1(x)
    elif WHICH == "round_e4m3":
        y = codes.round_e4m3(x)
    elif WHICH == "round_e2m1":
        y = codes.round_e2m1(x)
    elif WHICH == "e4m3_exponent":
        y = codes.e4m3_exponent(codes.magnitude(x))
    elif WHICH == "e2m1_exponent":
        y = codes.e2m1_exponent(codes.magnitude(x))
    elif WHICH == "power_of_two":
        y = codes.power_of_two(x)
    elif WHICH == "narrow":
        y = codes.narrow(x, tl.bfloat16)
    else:
        y = codes.widen(x)
    tl.store(Y + i, y, mask=i < n)


def apply(which, x, dtype=torch.float32):
    x = x.to(DEVICE)
    y = torch.zeros(x.shape, dtype=dtype, device=DEVICE)
    _apply[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), which, 1024)
    return y.cpu()


def neighbours(values):
    """Every value, one fp32 step below it and one above, of both signs."""
    x = torch.tensor(values, dtype=torch.float32)
    around = torch.cat((x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(torch.inf))))
    return torch.cat((around, -around))


BYTES = torch.arange(256, dtype=torch.uint8)
E4M3_VALUES = sorted(v for v in BYTES.view(torch.float8_e4m3fn).float().tolist() if v >= 0)
E4M3_MIDDLES = [(a + b) / 2 for a, b in zip(E4M3_VALUES, E4M3_VALUES[1:])]
E4M3_EDGES = neighbours(E4M3_VALUES + E4M3_MIDDLES + [464.0, 480.0, 1e9, 2.0**-11])
E2M1_EDGES = neighbours(
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 1e9, 1e-30]
)


def test_every_byte_decodes_as_the_formats_say():
    same(apply("decode_e8m0", BYTES), formats.decode_e8m0(BYTES))
    same(apply("decode_e4m3", BYTES), BYTES.view(torch.float8_e4m3fn).float())
    same(apply("decode_e2m1", BYTES[:16]), formats.decode_e2m1(BYTES[:16]))


def test_rounding_at_every_value_and_tie():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40])
    wide = torch.cat((torch.randn(4096) * 100, torch.randn(4096) * 0.01, special))
    for x in (E4M3_EDGES, wide):
        same(apply("round_e4m3", x), formats.round_e4m3(x).float())
        assert torch.equal(apply("encode_e4m3", x, torch.int32), formats.round_e4m3(x).view(torch.uint8).int())
    for x in (E2M1_EDGES, wide):
        same(apply("round_e2m1", x), formats.decode_e2m1(formats.encode_e2m1(x)))
        assert torch.equal(apply("encode_e2m1", x, torch.int32), formats.encode_e2m1(x).int())


def test_nan_stays_in_e4m3_and_becomes_zero_in_e2m1():
    x = torch.tensor([float("nan"), 1.0])
    assert (
        apply("round_e4m3", x).isnan().tolist() == [True, False]
        and apply("encode_e4m3", x, torch.int32)[0] & 0x7F == 0x7F
    )
    assert apply("round_e2m1", x).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name,top,floor", [("e4m3_exponent", 448.0, 1e-4), ("e2m1_exponent", 6.0, 6 * 2.0**-126)])
def test_scale_exponents_are_those_of_a_division(name, top, floor):
    x = torch.cat(
        (
            neighbours([top * 2.0**k for k in range(-100, 100)] + [2.0**k for k in range(-149, 127)] + [floor]).abs(),
            torch.rand(4096) * 1000,
            torch.tensor([0.0, 3e38]),
        )
    )
    assert torch.equal(apply(name, x, torch.int32), formats.ceil_log2(x.clamp(min=floor) / top))
    k = torch.arange(-126, 128, dtype=torch.int32)
    same(apply("power_of_two", k), formats.power_of_two(k))


def test_bf16_is_rounded_to_even():
    ties = neighbours([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 3.3e38, 1e-40, 0.0])
    x = torch.cat((ties, torch.randn(4096), torch.tensor([torch.inf, torch.nan])))
    same(apply("narrow", x, torch.bfloat16), x.bfloat16())
    same(apply("widen", x.bfloat16()), x.bfloat16().float())


# Simulation -----------------------------------------------------------------------------------------------------------


def blocks(columns, dtype, seed=0):
    """Rows of every magnitude, and of zeros, ties, floors and what is not finite."""
    x = torch.randn(24, columns, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-36, 36, 24).unsqueeze(
        1
    )
    special = torch.zeros(6, columns)
    special[1] = -0.0
    special[2, 0], special[2, -1] = 448.0, -448.0 * 1.03125
    special[3] = torch.tensor([6.0, 2.5, 5.0, -0.25, 1e-5, 240.0]).repeat(columns)[:columns]
    special[4, 0] = torch.inf
    special[5, 0] = 2.0**-130
    return torch.cat((x, special)).to(dtype)


@pytest.mark.parametrize(
    "columns,block,keep",
    [(128, 64, 0), (512, 64, 64), (80, 64, 32), (33, 32, 0), (7, 4, 2), (5, 1, 3), (100, 48, 10), (160, 128, 0)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulation_is_the_reference_bit_for_bit(columns, block, keep, dtype):
    x = blocks(columns, dtype)
    fp8 = quantize.simulate_fp8_blocks(x.to(DEVICE), block, keep, backend="triton").cpu()
    assert fp8.dtype == dtype
    same(fp8, quantize.simulate_fp8_blocks(x, block, keep))
    same(
        quantize.simulate_fp4_blocks(x.to(DEVICE), block, backend="triton").cpu(),
        quantize.simulate_fp4_blocks(x, block),
    )


def test_simulation_takes_any_strides_and_nothing():
    x = blocks(96, torch.bfloat16)
    for view in (x.t(), x[::2, 3:70], x.view(3, 10, 96).transpose(0, 1)):
        same(
            quantize.simulate_fp8_blocks(view.to(DEVICE), 32, backend="triton").cpu(),
            quantize.simulate_fp8_blocks(view, 32),
        )
    x = torch.zeros(0, 64, device=DEVICE)
    assert quantize.simulate_fp8_blocks(x, 64, backend="triton").shape == (0, 64)
    kept = torch.randn(3, 8).to(DEVICE)
    assert torch.equal(quantize.simulate_fp8_blocks(kept, 64, 8, backend="triton"), kept)
