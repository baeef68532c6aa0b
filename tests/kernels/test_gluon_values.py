"""Values in the emulator of Gluon: dtypes and rounding, reductions, inline assembly, and names it does not know."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.gluon import EmulationError, UnknownName, launch

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLANE = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
SEVEN = gl.constexpr(7)


def run(kernel, *args, grid=(1,), seed=0, **kwargs):
    launch(kernel, grid, *args, seed=seed, **kwargs)


# Numbers --------------------------------------------------------------------------------------------------------------


@gluon.jit
def integers(X, OUT, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    x = gl.load(X + i)
    small = 100
    gl.store(OUT + i, x // 7)
    gl.store(OUT + N + i, x % SEVEN)
    gl.store(OUT + 2 * N + i, x * 1000003)
    gl.store(OUT + 3 * N + i, x >> 3)
    gl.store(OUT + 4 * N + i, (x.to(gl.uint32) >> 3).to(gl.int32))
    gl.store(OUT + 5 * N + i, (x.to(gl.int8) + small).to(gl.int8))
    gl.store(OUT + 6 * N + i, gl.where(x < 0, -x, x))
    gl.store(OUT + 7 * N + i, (x.to(gl.uint8) + 250).to(gl.int32))


def test_integers_wrap_and_divide_as_in_c():
    x = torch.tensor([-15, -1, 0, 6, 2**31 - 1, -(2**31), 77, 255], dtype=torch.int32)
    out = torch.zeros(8, 8, dtype=torch.int32)
    run(integers, x, out, 8)
    wide = x.long()
    wanted = [
        torch.div(x, 7, rounding_mode="trunc"),
        torch.fmod(x, 7),
        (wide * 1000003).int(),
        x >> 3,
        ((wide & 0xFFFFFFFF) >> 3).int(),
        (wide + 100).to(torch.int8).int(),
        x.abs(),
        (wide + 250) & 255,
    ]
    assert torch.equal(out, torch.stack([w.int() for w in wanted]))


@gluon.jit
def floats(X, HALF, CODES, BITS, OUT, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    x = gl.load(X + i)
    half = x.to(gl.bfloat16)
    gl.store(HALF + i, half * 1.001)  # a number of the source leaves the dtype
    third = 1.001
    gl.store(OUT + i, half * third)  # a variable does not
    gl.store(CODES + i, x.to(gl.float8e4nv))
    gl.store(BITS + i, x.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    gl.store(OUT + N + i, gl.maximum(x, 0.5) / 3)
    gl.static_assert(gl.maximum(half, half).dtype == gl.float32)
    gl.static_assert(gl.maximum(i.to(gl.int8), 1).dtype == gl.int32)
    gl.static_assert((i.to(gl.int8) + 1).dtype == gl.int8)
    gl.static_assert((half / 2).dtype == gl.float32)
    gl.store(OUT + 2 * N + i, gl.fma(x, x, -1.0))
    gl.store(OUT + 3 * N + i, (x * 1e5).to(gl.int32).to(gl.float32))


def test_floats_round_to_nearest_even_and_codes_saturate():
    x = torch.tensor([1.00390625, 1.01171875, -3.3, float("nan"), 1e6, -1e6, 464.0, 0.0])
    half, codes = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8).to(torch.float8_e4m3fn)
    bits, out = torch.zeros(8, dtype=torch.int32), torch.zeros(4, 8)
    run(floats, x, half, codes, bits, out, 8)
    rounded = x.bfloat16()
    same = dict(rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(half, (rounded.float() * torch.tensor(1.001).bfloat16().float()).bfloat16(), **same)
    torch.testing.assert_close(codes.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), **same)
    assert torch.equal(bits, x.view(torch.int32) & 0x7FFFFFFF)
    number = torch.maximum(x.nan_to_num(0.5), torch.tensor(0.5))  # the maximum of NaN and a number is the number
    whole = (x * 1e5).nan_to_num(0).double().trunc().clamp(-(2**31), 2**31 - 1).float()
    wanted = torch.stack([rounded.float() * 1.001, number / 3, (x.double() ** 2 - 1).float(), whole])
    torch.testing.assert_close(out, wanted, **same)


@gluon.jit
def adder(a, b):
    return a + b, a * 1 + b


@gluon.jit
def pair(a, i, b, j):
    return gl.maximum(a, b), gl.where(b > a, j, i)


@gluon.jit
def blocks(X, OUT, PLACE, M: gl.constexpr, N: gl.constexpr):
    row, column = gl.arange(0, M, gl.SliceLayout(1, PLANE)), gl.arange(0, N, gl.SliceLayout(0, PLANE))
    x = gl.load(X + row[:, None] * N + column[None, :])
    gl.store(OUT + row, gl.sum(x, 1))
    gl.store(OUT + M + row, gl.max(x, 1))
    best, place = gl.reduce((x, column[None, :] + gl.zeros([M, N], gl.int32, PLANE)), 1, pair)
    gl.store(PLACE + row, place)
    even, odd = gl.split(gl.reshape(x, [M, N // 2, 2]))
    once, twice = adder(even, odd)
    sums = gl.sum(gl.join(once, twice).reshape([M, N]), 1)
    gl.store(OUT + 2 * M + row, gl.convert_layout(sums, gl.SliceLayout(1, PLANE)))
    total = 0.0
    for n in range(N):
        total += gl.load(X + n)
    gl.store(OUT + 3 * M, total)
    gl.store(OUT + 3 * M + 1, gl.sum(gl.sum(gl.permute(x, [1, 0]), 0), 0))


def test_blocks_are_reduced_split_and_joined():
    x, out, place = torch.arange(64.0).reshape(4, 16).flip(1) - 40, torch.zeros(4, 4), torch.zeros(4, dtype=torch.int32)
    run(blocks, x, out, place, 4, 16)
    assert torch.equal(out[0], x.sum(1)) and torch.equal(out[1], x.amax(1)) and torch.equal(out[2], 2 * x.sum(1))
    assert out[3, 0] == x[0].sum() and out[3, 1] == x.sum() and place.tolist() == x.argmax(1).tolist()


# What the test gives, and what nobody gives ---------------------------------------------------------------------------

SWAP = gl.constexpr("prmt.b32 $0, $1, 0, 0x0123;")


@gluon.jit
def swapped(X, OUT, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    word = gl.inline_asm_elementwise(SWAP, "=r,r", [gl.load(X + i)], gl.int32, is_pure=True, pack=1)
    gl.store(OUT + i, word)


def test_inline_assembly_does_what_the_test_says():
    x, out = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    bytes = lambda t: t.contiguous().view(torch.uint8).reshape(-1, 4).flip(1).contiguous().view(torch.int32).view(-1)
    run(swapped, x, out, 8, asm={SWAP.value: bytes})
    assert torch.equal(out, x << 24)
    with pytest.raises(UnknownName, match="prmt.b32"):
        run(swapped, x, out, 8)


@gluon.jit
def unknown(X):
    gl.store(X, gl.histogram(gl.arange(0, 8, LINE), 8))


@gluon.jit
def misspelt(X):
    gl.store(X, gl.sinus(1.0))


@gluon.jit
def sized(X, n):
    m = 8
    gl.store(X + gl.arange(0, m, LINE), n)


def test_what_is_not_known_is_named():
    with pytest.raises(UnknownName, match="gluon.language.*histogram"):
        run(unknown, torch.zeros(8))
    with pytest.raises(UnknownName, match="gluon.language.sinus does not exist"):
        run(misspelt, torch.zeros(8))
    with pytest.raises(EmulationError, match="must be a constexpr"):
        run(sized, torch.zeros(8), 3)
