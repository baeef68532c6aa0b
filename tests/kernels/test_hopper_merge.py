"""Attention in one kernel, whose programs merge what they find, in the emulator of Gluon: against the reference, with
the same bits however columns are shared, and wrong where programs do not wait for each other."""

import pytest
import torch
from triton.experimental import gluon

from dsv4.kernels.attention import hca_attention, hopper, hopper_merge, sparse_attention, triton_plan
from dsv4.kernels.attention import triton as kernels
from dsv4.kernels.attention.triton_plan import Tile
from dsv4.kernels.launch import captured_in
from tests.gluon import SEEDS, Deadlock, OnCPU
from tests.kernels.products import CUDA, poison  # noqa: F401 (a fixture: fresh buffers hold NaN)
from tests.kernels.test_hopper_attention import ROPE, SCALE, D, agree
from tests.kernels.test_triton_attention import NAN, as_pool, listed, randn, unseen

if CUDA:
    pytest.skip("the kernel itself runs here", allow_module_level=True)

TILES = {"64 keys": Tile(64, 64, 8, 2, 1, 1, copied=True), "32 keys": Tile(64, 32, 4, 2, 1, 1, copied=True)}


@pytest.fixture
def merging(monkeypatch):
    """Function of (tile, splits, parts, seed): what follows runs so, in the emulator."""
    kernel = hopper.attend
    monkeypatch.setattr(kernels, "processors", lambda device: 132)
    monkeypatch.setattr(kernels, "COOPERATIVE", True)
    monkeypatch.setattr(hopper_merge.Counters, "_of", {})
    monkeypatch.setattr(kernels, "_merge", None)  # a second kernel

    def use(tile: str, splits: int, parts: int, seed: int = 0):
        monkeypatch.setattr(kernels, "plan", lambda *shape: (TILES[tile], splits))
        monkeypatch.setattr(triton_plan, "PARTS", parts)
        monkeypatch.setattr(hopper, "attend", OnCPU(kernel, seed))

    return use


def selected(form: str, N: int = 2, H: int = 5, W: int = 70, K: int = 90) -> list:
    """Of `sparse_attention`: also a query without any row, and rows that no query selects, which hold NaN."""
    wi, ei, window, entries = listed(N, W, 80), listed(N, K, 150, 1), randn(80, D), randn(150, D, seed=1)
    if form == "bf16":
        window[unseen(wi, 80)] = entries[unseen(ei, 150)] = NAN
    pools = as_pool(window, form, ROPE), as_pool(entries, form, ROPE)
    return [randn(N, H, D, seed=2, dtype=torch.bfloat16), pools[0], wi, pools[1], ei, randn(H), SCALE]


def state() -> torch.Tensor:
    """The counters, [programs]."""
    (held,) = hopper_merge.Counters._of.values()
    return held.numbers[0, :, 0]


@pytest.mark.parametrize("seed", SEEDS[::2])
@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("tile,splits,parts", [("64 keys", 3, 2), ("32 keys", 7, 4)], ids=str)
def test_selected_entries(form, seed, tile, splits, parts, merging):
    """Some splits are empty."""
    merging(tile, splits, parts, seed)
    agree(sparse_attention, *selected(form))


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_visible_entries(form, merging):
    """None, a part of a tile, several tiles; a window of less than a tile; no sink."""
    merging("64 keys", 3, 4, SEEDS[-1])
    B, T, H, W, n = 2, 2, 3, 9, 130
    entries, seen = randn(B, n, D, seed=1), torch.tensor([[0, 65], [1, 130]])
    if form == "bf16":
        entries[0, 65:] = NAN
    window, runs = as_pool(randn(70, D), form, ROPE), as_pool(entries, form, ROPE, batch=B)
    q, sink = randn(B, T, H, D, seed=2, dtype=torch.bfloat16), torch.tensor([-8.0, 8.0, -float("inf")])
    agree(hca_attention, q, window, listed(B * T, W, 70), runs, seen, sink, SCALE)


def test_heads_of_two_programs(merging):
    merging("32 keys", 2, 8, SEEDS[-1])
    window = as_pool(randn(40, D), "fp8", ROPE)
    q = randn(2, 70, D, seed=2, dtype=torch.bfloat16)
    agree(sparse_attention, q, window, listed(2, 33, 40), None, None, randn(70), SCALE)


def test_bits_do_not_depend_on_how_columns_are_shared_or_on_other_queries(merging):
    args, found = selected("bf16", N=3), []
    for parts in (1, 2, 8):
        merging("64 keys", 4, parts, parts)
        found.append(sparse_attention(*args, backend="triton"))
    alone = [args[0][:1], args[1], args[2][:1], args[3], args[4][:1], *args[5:]]
    assert all(torch.equal(other, found[0]) for other in found)
    assert torch.equal(sparse_attention(*alone, backend="triton"), found[0][:1])


def test_counters_are_ready_for_any_number_of_programs(merging):
    args, before = selected("bf16", N=1), None
    for splits in (3, 4, 2, 4):
        merging("64 keys", splits, 2, splits)
        agree(sparse_attention, *args)
        assert torch.equal(state() & 0x7FFFFFFF, torch.zeros_like(state()))
        assert before is None or torch.equal((state() ^ before).sign()[:3], torch.tensor([-1, -1, 0]))
        before = state().clone()


def test_graphs_that_live_count_apart(monkeypatch):
    """Two of them may be replayed at the same time, whatever stream they were captured on."""
    monkeypatch.setattr(hopper_merge.Counters, "_of", {})
    monkeypatch.setattr(hopper_merge, "PLACES", 3)
    own = lambda: hopper_merge.Counters.of(torch.device("cpu"), 132)
    stream, first, second, third = own(), Graph(), Graph(), Graph()
    places = [stream]
    for graph in (first, second, first):
        with captured_in(graph):
            places.append(own())
    assert [places[0].data_ptr() == p.data_ptr() for p in places] == [True, False, False, False]
    assert places[1].data_ptr() == places[3].data_ptr() != places[2].data_ptr()
    with captured_in(third):
        assert own() is None  # all places are taken
        del first, graph
        assert own().data_ptr() == places[1].data_ptr()
    assert own().data_ptr() == stream.data_ptr() and own().data_ptr() != places[1].data_ptr()


class Graph:
    pass


def test_graphs_without_cooperative_kernels_have_two(merging, monkeypatch):
    merging("64 keys", 3, 2)
    merged = []
    monkeypatch.setattr(kernels, "_merge", lambda *given: merged.append(given))
    for cooperative in (True, False):
        with captured_in(Graph(), cooperative):
            sparse_attention(*selected("bf16", N=1), backend="triton")
        assert len(merged) == (not cooperative)


class SmallCard:
    """A kernel on fewer multiprocessors than the device has: the driver refuses programs that wait for each other."""

    def __init__(self, kernel, said: str):
        self.kernel, self.said = kernel, said

    def __getitem__(self, grid):
        def launch(*args, launch_cooperative_grid=False, **options):
            if launch_cooperative_grid:
                raise RuntimeError(f"Triton Error [CUDA]: {self.said}")
            self.kernel[grid](*args, **options)

        return launch


def test_on_a_part_of_the_multiprocessors_a_second_kernel_merges(merging, monkeypatch):
    args, merged = selected("bf16"), []
    merging("64 keys", 3, 2)
    merge = lambda partial, lse, sink, out, dependent: merged.append(lse.shape)
    monkeypatch.setattr(kernels, "_merge", merge)
    monkeypatch.setattr(hopper, "attend", SmallCard(hopper.attend, kernels.TOO_LARGE))
    sparse_attention(*args, backend="triton")
    assert merged == [(2, 1, 5, 3)] and not bool(state().any())
    monkeypatch.setattr(hopper, "attend", SmallCard(hopper.attend, "an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sparse_attention(*args, backend="triton")
    assert len(merged) == 1


def test_programs_that_do_not_wait_are_found(merging, monkeypatch):
    merging("64 keys", 3, 2)
    monkeypatch.setattr(hopper, "meet", alone)
    with pytest.raises(AssertionError):
        agree(sparse_attention, *selected("bf16"))


def test_a_program_that_never_comes_is_a_deadlock(merging, monkeypatch):
    merging("64 keys", 3, 1)
    monkeypatch.setattr(hopper, "meet", one_more)
    with pytest.raises(Deadlock):
        agree(sparse_attention, *selected("bf16", N=1))


@gluon.jit
def one_more(counter, first, count):
    hopper_merge.meet(counter, first, count + 1)


@gluon.jit
def alone(counter, first, count):
    """In place of `meet`."""


def test_programs_that_are_not_at_once_on_the_device_need_a_second_kernel(merging):
    tile = TILES["64 keys"]
    assert triton_plan.shared_out(tile, 10, 13, 64, 128, 512, 132).parts == 1
    assert triton_plan.shared_out(tile, 10, 14, 64, 128, 512, 132) is None
    assert triton_plan.shared_out(tile, 1, 1, 64, 0, 64, 132) is None
    assert triton_plan.shared_out(tile._replace(copied=False), 10, 1, 64, 128, 512, 132) is None
