"""The shared expert in the launches of routed ones on FP8 tensor cores: on Hopper, or emulated on a CPU."""

import pytest
import torch

from dsv4.kernels.experts import hopper_launch, reference, triton
from dsv4.kernels.experts.hopper_launch import joins, multiply_codes
from dsv4.kernels.experts.hopper_order import arrange
from dsv4.kernels.experts.triton_order import sort_pairs
from dsv4.kernels.experts.triton_stream import Shared
from dsv4.kernels.linear.triton_fp8 import quantised
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight
from tests.gluon import SEEDS
from tests.kernels.products import DEVICE, needs_gpu, pack, randn
from tests.kernels.test_triton_hopper_experts import (  # noqa: F401
    LIMIT,
    D,
    I,
    assert_close,
    choices,
    each_pair,
    emulated,
    held,
    pytestmark,
    weights,
)


def matrices(d: int = D, inner: int = I, form: str = "fp8") -> tuple[PackedWeight, ...]:
    """Blocks of which each has another scale."""
    sizes = lambda o, k: torch.exp2(3 * randn(o // 128, k // 128, seed=o + k)).repeat_interleave(128, 0)
    wide = lambda o, k: sizes(o, k).repeat_interleave(128, 1)
    shapes = ((inner, d), (inner, d), (d, inner))
    return tuple(pack(randn(*s, seed=i) * wide(*s) / 32, form) for i, s in enumerate(shapes, 1))


def beside(given: tuple[PackedWeight, ...]) -> Shared:
    return Shared(*(hold("shared_expert", w) for w in given))


def tiles_of(monkeypatch, T: int) -> None:
    monkeypatch.setattr(hopper_launch, "tile_tokens", lambda P, E: T)


def assert_shared(x, ys, shared) -> None:
    """Results are fp32. They are compared as the routed ones are."""
    right = reference.shared_expert(x, *shared, LIMIT, True)
    assert ys.dtype is torch.float32 and ys.shape == right.shape
    assert_close(ys.bfloat16(), right.bfloat16().float())


def assert_both(x, given, shared) -> None:
    y, ys = multiply_codes(x, held(*given), LIMIT, beside(shared))
    assert_close(y, each_pair(x, *given))
    assert_shared(x, ys, shared)


@pytest.mark.parametrize("N, k, E, T", [(1, 3, 4, 8), (13, 2, 5, 8), (64, 1, 3, 8), (9, 2, 40, 16)])
def test_tokens_follow_the_rows_of_pairs(N, k, E, T):
    """As the products of FP8 weights have them, and rows of the pairs are what they are without."""
    x, (indices, _) = randn(N, D).bfloat16(), choices(N, k, E)
    indices[N // 2 :, 0] = -1
    order, table, _ = sort_pairs(indices, E, T) if N > 1 else (None, None, None)
    codes, scales, listed, own = arrange(x, indices, order, table, T, True)
    right, right_scales = quantised(x)
    assert torch.equal(codes[own : own + N].view(torch.uint8), right) and len(codes) % 4 == own % 4 == 0
    assert torch.equal(scales[:, own : own + N], right_scales)
    alone, alone_scales, alone_listed, rows = arrange(x, indices, order, table, T)
    found, (_, _, count, row) = int(listed[0]), listed[1:].view(4, -1).cpu()
    assert rows == own == len(alone) and torch.equal(listed[: 1 + found], alone_listed[: 1 + found])
    for b in range(found):
        at = slice(int(row[b]), int(row[b] + count[b]))
        assert torch.equal(codes[at].view(torch.uint8), alone[at].view(torch.uint8))
        assert torch.equal(scales[:, at], alone_scales[:, at])


@pytest.mark.parametrize(
    "N, k, E, T, seed", [(1, 3, 4, 8, 0), (19, 3, 5, 16, 3), *((11, 2, 3, 8, seed) for seed in SEEDS)]
)
def test_both_are_those_of_the_reference(emulated, monkeypatch, N, k, E, T, seed):
    """Tiles that are not full, programs that begin with either kind, and programs with both."""
    emulated(seed)
    tiles_of(monkeypatch, T)
    assert_both(randn(N, D).bfloat16(), (*choices(N, k, E), *weights(E)), matrices())


@pytest.mark.parametrize("stages", [8, 12, 16])
def test_any_number_of_stages_will_do(emulated, monkeypatch, stages):
    emulated(1, stages)
    tiles_of(monkeypatch, 8)
    assert_both(randn(9, D).bfloat16(), (*choices(9, 2, 3), *weights(3)), matrices())


@pytest.mark.parametrize("inner", [1024, 1536])
def test_another_width_than_that_of_routed_experts(emulated, inner):
    """As of a rank that has a part of it; scales in fp32."""
    emulated(2)
    shared = matrices(D, inner, "fp8 fp32 scales")
    assert_both(randn(5, D).bfloat16(), (*choices(5, 2, 3), *weights(3)), shared)


def test_no_routed_expert_at_all(emulated):
    """Of a rank whose experts no token chose."""
    emulated(3)
    x, (indices, routing), shared = randn(3, D).bfloat16(), choices(3, 2, 3), matrices()
    _, ys = multiply_codes(x, held(indices.fill_(-1), routing, *weights(3)), LIMIT, beside(shared))
    assert_shared(x, ys, shared)


def test_bits_do_not_depend_on_other_tokens_and_tiles(emulated, monkeypatch):
    x, (indices, routing), both, shared = randn(20, D).bfloat16(), choices(20, 2, 3), weights(3), beside(matrices())
    found = []
    for T, some in ((8, slice(0, 20)), (32, slice(0, 20)), (128, slice(7, 10)), (8, slice(7, 8))):
        emulated(T % 5)
        tiles_of(monkeypatch, T)
        given = held(indices[some], routing[some], *both)
        found.append((some, *multiply_codes(x[some], given, LIMIT, shared)))
    _, y, ys = found[0]
    for some, of_pairs, of_tokens in found[1:]:
        assert torch.equal(of_tokens, ys[some]) and torch.equal(of_pairs, y.view(20, 2, D)[some].flatten(0, 1))


def test_what_joins():
    x, good = randn(2, D).bfloat16(), matrices()
    assert joins(x, beside(good)) and joins(randn(hopper_launch.BESIDE, D), beside(good))
    assert not joins(randn(hopper_launch.BESIDE + 1, D), beside(good))
    assert not joins(x, beside(matrices(D, 768)))
    assert not joins(x, beside((*good[:2], good[2]._replace(exact_sums=True))))
    assert not joins(x, beside(matrices(form="fp8 blocks of 32")))
    assert not joins(x, beside(matrices(form="mxfp4")))


@pytest.mark.parametrize(
    "simulate, shared_too, tokens", [(True, True, 3), (True, False, 3), (False, False, 3), (True, True, 65)]
)
def test_moe_joins_them_in_official_numerics(emulated, monkeypatch, simulate, shared_too, tokens):
    emulated()
    made, rows = [], lambda x, *_: torch.zeros(2 * len(x), D, dtype=x.dtype, device=DEVICE)
    of_shared = lambda x: torch.zeros(len(x), D, device=DEVICE)
    codes = lambda x, routed, limit, shared: made.append(shared is not None) or (rows(x), shared and of_shared(x))
    monkeypatch.setattr(hopper_launch, "multiply_codes", codes)
    streams = lambda x, routed, shared, *_: (routed and rows(x), shared and of_shared(x))
    monkeypatch.setattr(triton, "stream_experts", streams)
    monkeypatch.setattr(triton, "tile_shared", lambda name, x, *_: of_shared(x))
    given = randn(tokens, D).bfloat16(), *choices(tokens, 2, 2), *weights(2), matrices(), LIMIT
    triton.moe(*given, simulate, shared_too)
    assert made == ([shared_too and tokens == 3] if simulate else [])


@needs_gpu
@pytest.mark.gpu
def test_a_token_alone_has_the_bits_that_it_has_among_others():
    """Flash's widths, fewer experts: text with drafts is that of plain decoding."""
    stacks = tuple(pack_stack(32, *shape) for shape in ((4096, 4096), (4096, 2048)))
    x, (indices, routing), shared = randn(64, 4096).bfloat16(), choices(64, 6, 32), matrices(4096, 2048)
    rows = lambda n: multiply_codes(x[:n], held(indices[:n], routing[:n], *stacks), LIMIT, beside(shared))
    y, ys = rows(1)
    for n in (1, 2, 8, 9, 16, 17, 33, 64):
        again, shared_again = rows(n)
        assert torch.equal(again[:6], y) and torch.equal(shared_again[:1], ys), n
        assert_shared(x[:n], shared_again, shared)


def pack_stack(E: int, O: int, K: int) -> PackedWeight:
    w = pack(randn(E * O, K) * 0.02, "mxfp4")
    return w._replace(weight=w.weight.view(E, O, -1), scale=w.scale.view(E, O, -1))
