"""Attention for Hopper, in the emulator of Gluon, against the reference: bf16 and packed rows, listed and not, split
and not. Its launcher gives it the arguments that it has on a GPU."""

import pytest
import torch

from dsv4.kernels.attention import hca_attention, hopper, sparse_attention
from dsv4.kernels.attention import triton as kernels
from dsv4.kernels.attention.triton_plan import Tile
from tests.gluon import SEEDS, OnCPU
from tests.kernels.products import CUDA, poison  # noqa: F401 (a fixture: fresh buffers hold NaN)
from tests.kernels.test_triton_attention import NAN, as_pool, close, listed, randn, unseen

if CUDA:
    pytest.skip("the kernel itself runs here", allow_module_level=True)

D, ROPE, SCALE = 512, 64, 512**-0.5
TOLERANCE = 4e-3  # weights are rounded to bf16
COPIED = Tile(64, 64, 8, 2, 1, 1, copied=True)


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n} splits")
def splits(request, monkeypatch) -> int:
    """Keys in that many splits, by the kernel for Hopper."""
    monkeypatch.setattr(kernels, "plan", lambda *shape: (COPIED, request.param))
    return request.param


@pytest.fixture
def emulated(monkeypatch):
    """Function of a seed: the kernel runs in the emulator with its timing."""
    kernel = hopper.attend
    return lambda seed: monkeypatch.setattr(hopper, "attend", OnCPU(kernel, seed))


def agree(operation, q, *args):
    got = operation(q, *args, backend="triton")
    exact = (a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    close(got.float(), operation(q.float(), *exact), TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_selected_entries(form, seed, splits, emulated):
    """Also a query without any row, and rows that no query selects, which hold NaN."""
    emulated(seed)
    N, H, W, K = 3, 5, 70, 90
    wi, ei, window, entries = listed(N, W, 80), listed(N, K, 150, 1), randn(80, D), randn(150, D, seed=1)
    if form == "bf16":
        window[unseen(wi, 80)] = entries[unseen(ei, 150)] = NAN
    pools = as_pool(window, form, ROPE), as_pool(entries, form, ROPE)
    agree(sparse_attention, randn(N, H, D, seed=2, dtype=torch.bfloat16), pools[0], wi, pools[1], ei, randn(H), SCALE)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_visible_entries(form, seed, splits, emulated):
    """None, a part of a tile, several tiles; a window of less than a tile."""
    emulated(seed)
    B, T, H, W, n = 2, 2, 3, 9, 130
    entries, seen = randn(B, n, D, seed=1), torch.tensor([[0, 65], [1, 130]])
    if form == "bf16":
        entries[0, 65:] = NAN
    window, runs = as_pool(randn(70, D), form, ROPE), as_pool(entries, form, ROPE, batch=B)
    q = randn(B, T, H, D, seed=2, dtype=torch.bfloat16)
    agree(hca_attention, q, window, listed(B * T, W, 70), runs, seen, torch.linspace(-8, 8, H), SCALE)


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_a_window_alone_and_heads_of_two_programs(form, splits, emulated):
    emulated(SEEDS[-1])
    window = as_pool(randn(40, D), form, ROPE)
    q = randn(2, 70, D, seed=2, dtype=torch.bfloat16)
    agree(sparse_attention, q, window, listed(2, 33, 40), None, None, randn(70), SCALE)
    nothing = sparse_attention(q, window, listed(2, 0, 40), None, None, randn(70), SCALE, backend="triton")
    assert torch.equal(nothing, torch.zeros_like(nothing))
