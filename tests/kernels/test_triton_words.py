"""The PTX that unpacks weights and rounds activations, over every code, against the number formats."""

import numpy as np
import pytest
import torch

from dsv4.kernels.linear import triton_words as words
from dsv4.kernels.quantize.formats import decode_e2m1, round_e4m3
from tests.kernels.ptx import U32, narrow, pairs, run, widen

ALL = np.arange(1 << 16, dtype=U32)
E2M1 = decode_e2m1(torch.arange(16)).numpy()
E4M3 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
KNOWN = ~np.isnan(E4M3)  # the PTX reads NaN as 480
twice = lambda x: narrow(np.float32(x)) * U32(0x10001)


@pytest.mark.parametrize("exponent", [-127, -60, 0, 2, 120])
def test_pairs_of_e2m1(exponent):
    scale = np.float32(2.0**exponent)
    word = ALL | ((ALL ^ U32(0x5A5A)) << U32(16))
    for i, value in enumerate(run(words.E2M1_PAIRS.value, 8, word, twice(scale))):
        assert np.array_equal(widen(value), E2M1[(word >> U32(4 * i)) & U32(15)] * scale)


def test_halves_of_e2m1():
    word = ALL | ((ALL ^ U32(0x5A5A)) << U32(16))
    for i, value in enumerate(run(words.E2M1_HALVES.value, 8, word)):
        half = value.astype(np.uint16).view(np.float16).astype(np.float32)
        assert np.array_equal(half * words.HALVES_DOWN.value, E2M1[(word >> U32(4 * i)) & U32(15)])
        assert np.array_equal(np.signbit(half), np.signbit(E2M1[(word >> U32(4 * i)) & U32(15)]))


def test_pairs_of_e4m3():
    word = ALL | ((ALL ^ U32(0x5A5A)) << U32(16))
    for i, value in enumerate(run(words.E4M3_PAIRS.value, 4, word)):
        code = (word >> U32(8 * i)) & U32(255)
        assert np.array_equal(widen(value)[KNOWN[code]], E4M3[code][KNOWN[code]])


@pytest.mark.parametrize("exponent", [-124, -60, 0, 2, 119])
def test_scaled_pairs_of_e4m3(exponent):
    scale = np.float32(2.0**exponent)
    word = ALL | ((ALL ^ U32(0x5A5A)) << U32(16))
    for i, value in enumerate(run(words.E4M3_SCALED.value, 4, word, twice(scale))):
        code = (word >> U32(8 * i)) & U32(255)
        assert np.array_equal(widen(value)[KNOWN[code]], (E4M3[code] * scale)[KNOWN[code]])


def test_bytes_in_the_order_of_columns():
    word = ALL | ((ALL ^ U32(0x5A5A)) << U32(16))
    for i, value in enumerate(v for r in run(words.E4M3_BYTES.value, 2, word) for v in pairs(r)):
        code = (word >> U32(8 * i)) & U32(255)
        assert np.array_equal(value[KNOWN[code]], E4M3[code][KNOWN[code]])


@pytest.mark.parametrize("k", [-22, -3, 0, 1, 40, 119])
def test_rounding_to_e4m3(k):
    """Every bf16 number, beside every other sign and magnitude, in a block of scale 2^k."""
    word = ALL | (np.roll(ALL, 12345) << U32(16))
    e = U32((k + 127) * 0x00800080)
    (out,) = run(words.ROUND_E4M3.value, 1, word, e - U32(0x00C000C0), e - U32(0x03000300), e + U32(0x04600460))
    for got, bits in zip(pairs(out), (word & U32(0xFFFF), word >> U32(16))):
        x = torch.from_numpy(widen(bits))
        # 2^-k may leave fp32's range only where the result is 0 anyway
        wanted = round_e4m3(x * 2.0**-k).float() * 2.0**k
        same = torch.from_numpy(got).eq(wanted) | (torch.from_numpy(got).isnan() & x.isnan())
        assert same.all(), (x[~same][:4], torch.from_numpy(got)[~same][:4], wanted[~same][:4])


def test_larger_pairs_keep_nan():
    (out,) = run("{ max.NaN.bf16x2 $0, $1, $2; }", 1, ALL, np.full_like(ALL, 0x3F803F80))
    low, high = pairs(out)
    x = widen(ALL)
    assert np.array_equal(low, np.maximum(x, np.float32(1)), equal_nan=True) and (high == 1).all()
