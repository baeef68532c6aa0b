"""The interpreter that the tests run kernels in against Triton's own as it comes: the same bits and the same errors."""

import pytest
import torch

from tests.kernels.products import CUDA

if CUDA:
    pytest.skip("kernels are compiled here", allow_module_level=True)

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter import PLAIN

S = 16


@triton.jit
def doubled(x):
    return x * 2 + 1


@triton.jit
def twice(x):
    return doubled(doubled(x))


@triton.jit
def mixed(X, N, F, I, B, n, S: tl.constexpr):
    """Functions of functions, sums and scans of the standard library, products, casts, bits, branches, loops, and int32
    that wraps."""
    i, j = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    p = tl.program_id(0)
    x = tl.load(X + i * S + j, mask=i * S + j < n, other=float("nan"))
    product = tl.dot(x, tl.trans(x), input_precision="ieee") + twice(x) / (p + 1.5)
    if p == 1:
        product = tl.where(product > 0, product, -product)
    for k in range(3):
        product += 3 - tl.sum(x, 1)[:, None] * k - tl.max(product, 0)[None, :]
    product = tl.where(i < 0, float("nan") - product, 0.5 * product)
    tl.store(F + p * S * S + i * S + j, product)
    whole = tl.load(N + tl.arange(0, S))
    for k in tl.static_range(2):
        whole = whole * 1103515245 + 12345 + k + tl.cumsum(whole, 0) - (whole >> 3) // 7
    tl.store(I + p * S + tl.arange(0, S), (whole ^ (whole.to(tl.uint8) % 9).to(tl.int32)) + tl.program_id(0))
    half = tl.sum(x, 1).to(tl.bfloat16)
    tl.store(B + p * S + tl.arange(0, S), half / (half * half) + half)


def run():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(S, S, generator=g)
    whole = torch.randint(-(2**31), 2**31 - 1, (S,), generator=g, dtype=torch.int32)
    out = torch.empty(2, S, S), torch.empty(2, S, dtype=torch.int32), torch.empty(2, S, dtype=torch.bfloat16)
    mixed[(2,)](x, whole, *out, S * S, S)
    return [t.contiguous().view(torch.uint8) for t in out]


@triton.jit
def no_power(X):
    tl.store(X + tl.arange(0, 16), tl.zeros((12,), tl.float32))


@triton.jit
def shapes_differ(X):
    tl.store(X + tl.arange(0, 16), tl.arange(0, 16) + tl.arange(0, 8))


@triton.jit
def negative(X):
    tl.store(X, tl.load(X).to(tl.uint32) + -1)


@triton.jit
def asserted(X):
    tl.static_assert(doubled(1) == 4, "one doubled")


@triton.jit
def size_unknown(X):
    tl.store(X + tl.zeros((tl.load(X),), tl.int32), 1)


@triton.jit
def deep(X):
    tl.store(X, doubled(tl.no_such_name(X)))


def raised(kernel) -> str:
    with pytest.raises(interpreter.InterpreterError) as said:
        kernel[(1,)](torch.full((16,), 4, dtype=torch.int32))
    return str(said.value)


def as_it_comes(monkeypatch):
    for (thing, name), value in PLAIN.items():
        monkeypatch.setattr(thing, name, value)


def test_kernels_have_the_bits_that_triton_gives_them(monkeypatch):
    first, again = run(), run()
    as_it_comes(monkeypatch)
    for light, repeated, plain in zip(first, again, run()):
        assert torch.equal(light, plain) and torch.equal(repeated, plain)


@pytest.mark.parametrize(
    "kernel", [no_power, shapes_differ, negative, asserted, size_unknown, deep], ids=lambda k: k.__name__
)
def test_errors_are_tritons_and_nothing_stays_replaced(kernel, monkeypatch):
    light = raised(kernel), raised(kernel)
    assert (
        interpreter._patch_lang.launch is None and tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
    )
    as_it_comes(monkeypatch)
    assert light == (raised(kernel),) * 2


def test_types_are_numpys_as_triton_says_and_what_it_does_not_know_is_refused():
    light, plain = interpreter._get_np_dtype, PLAIN[interpreter, "_get_np_dtype"]
    kinds = [
        getattr(tl, name)
        for name in (
            "int1",
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "int64",
            "uint64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "float8e4nv",
            "float8e5",
            "float8e4b15",
        )
    ]
    kinds += [
        tl.pointer_type(tl.float32),
        *(tl.block_type(kind, [2, 4]) for kind in kinds),
        tl.block_type(tl.pointer_type(tl.int8), [8]),
    ]
    assert [light(kind) for kind in kinds] == [plain(kind) for kind in kinds] and all(
        isinstance(light(kind), np.dtype) for kind in kinds
    )
    for unknown in (tl.void, tl.block_type(tl.void, [2])):
        for look_up in (light, plain):
            with pytest.raises(KeyError):
                look_up(unknown)
    with pytest.raises(TypeError, match="must have type"):  # though it equals a shape that was checked
        tl.block_type(tl.int8, [2.0, 4])


def test_a_launch_looks_through_the_language_once(monkeypatch):
    """And not again for each function that a kernel calls: most of the time went there, and into sums that nobody
    read."""
    looked, replaced, patches, replace = [], [], interpreter._patch_lang, interpreter._LangPatchScope.set_attr
    monkeypatch.setattr(patches, "replaced", {})
    monkeypatch.setattr(
        patches, "plain", lambda function, plain=patches.plain: looked.append(function) or plain(function)
    )
    monkeypatch.setattr(
        interpreter._LangPatchScope, "set_attr", lambda *about: replaced.append(about[1:3]) or replace(*about)
    )
    run()
    assert len(looked) == 2  # for the kernel, and for the standard library's functions
    assert len(replaced) < 2 * len(set(replaced))
    options = interpreter.interpreter_builder.options
    assert not options.sanitize_overflow and not options.debug
