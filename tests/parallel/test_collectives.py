"""The kernels by which GPUs of one host exchange, in processes that share memory of the host."""

import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.collectives.triton_one_shot import BLOCK, BLOCKS, OneShot
from dsv4.kernels.collectives.triton_shares import Shares
from dsv4.kernels.errors import UnsupportedInput
from dsv4.parallel.processes import Processes
from dsv4.parallel.symmetric import OneHost

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs: tests/gpu/test_ranks.py")
# (numbers, dtype) of calls one after the other: blocks of one size follow those of others
CALLS = [
    (1, torch.float32),
    (5000, torch.bfloat16),
    (3, torch.bfloat16),
    (2500, torch.float32),
    (1024, torch.float32),
    (700, torch.float16),
] * 3


def parts(size: int, call: int) -> list[torch.Tensor]:
    n, dtype = CALLS[call]
    return [
        torch.randn(n, generator=torch.Generator().manual_seed(100 * call + r)).mul(10.0**r).to(dtype)
        for r in range(size)
    ]


def in_order(given: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.promote_types(given[0].dtype, torch.float32)
    total = given[0].to(wide)
    for part in given[1:]:
        total = total + part.to(wide)
    return total


def rank_of(rank: int, size: int, buffers, wrong: dict, errors) -> None:
    """All calls of a rank, at its own pace. wrong: {call: rank whose tokens differ}."""
    try:
        torch.set_num_threads(1)
        group = OneShot(rank, [t.data_ptr() for t in buffers], torch.device("cpu"))
        pace = torch.Generator().manual_seed(rank)
        for call in range(len(CALLS)):
            if torch.rand((), generator=pace) < 0.3:
                time.sleep(0.02)
            given = parts(size, call)
            for dtype in (given[0].dtype, torch.bfloat16):
                found = group.sum(given[rank], dtype)
                assert found.dtype is dtype and torch.equal(found, in_order(given).to(dtype)), f"sum of call {call}"
            if group.takes(given[rank]):
                assert torch.equal(group.gather(given[rank]), torch.stack(given)), f"parts of call {call}"
            ids, differs = torch.arange(3) + call, torch.zeros(1, dtype=torch.int32)
            ids[call % 3] += wrong.get(call) == rank
            group.same(ids, differs)
            assert differs.item() == (call in wrong), f"comparison of call {call}"
    except BaseException as failure:
        errors.put(f"rank {rank}: {type(failure).__name__}: {failure}")
        os._exit(1)  # the others wait for this one


def bytes_of(rank: int, size: int, buffers, errors) -> None:
    """Any number of bytes, in as many exchanges as they need."""
    try:
        torch.set_num_threads(1)
        OneShot.BYTES = 4096
        group = OneHost.__new__(OneHost)
        group.few = OneShot(rank, [t.data_ptr() for t in buffers], torch.device("cpu"))
        for n in (1, 5, 4096, 4097, 3 * 4096 + 2):
            given = [torch.arange(n).mul(r + 3).to(torch.uint8) for r in range(size)]
            found = group.gather(given[rank])
            assert len(found) == size and all(map(torch.equal, found, given)), f"{n} bytes"
    except BaseException as failure:
        errors.put(f"rank {rank}: {type(failure).__name__}: {failure}")
        os._exit(1)  # the others wait for this one


MANY = (1, 9000, 40_000, 12_288)  # blocks of a share: fewer than programs, and several of each


def shares_of(rank: int, size: int, buffers, errors) -> None:
    """Sums by shares of a rank, at its own pace."""
    try:
        torch.set_num_threads(1)
        group = Shares(rank, [t.data_ptr() for t in buffers], torch.device("cpu"), programs=3)
        pace = torch.Generator().manual_seed(rank)
        for call in range(8):
            if torch.rand((), generator=pace) < 0.5:
                time.sleep(0.02)
            n, dtype = MANY[call % 4], (torch.bfloat16, torch.float32)[call % 2]
            given = [torch.randn(n, generator=torch.Generator().manual_seed(9 * call + r)) for r in range(size)]
            assert torch.equal(group.sum(given[rank], dtype), in_order(given).to(dtype)), f"sum of call {call}"
    except BaseException as failure:
        errors.put(f"rank {rank}: {type(failure).__name__}: {failure}")
        os._exit(1)  # the others wait for this one


def run_ranks(target, size: int, nbytes: int, *given) -> None:
    """target(rank, size, buffers, *given, errors) of all ranks at once."""
    context = multiprocessing.get_context("fork")
    buffers = [torch.zeros(nbytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    errors = context.SimpleQueue()
    ranks = [context.Process(target=target, args=(r, size, buffers, *given, errors)) for r in range(size)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + 180
    while any(rank.is_alive() for rank in ranks) and errors.empty() and time.monotonic() < until:
        time.sleep(0.02)
    late = [r for r, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
        rank.join()
    assert errors.empty(), errors.get()
    assert not late, f"ranks {late} still wait"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_at_their_own_pace(size):
    run_ranks(rank_of, size, OneShot.nbytes(size), {4: 0, 9: size - 1})


def test_any_number_of_bytes_is_gathered():
    run_ranks(bytes_of, 3, OneShot.nbytes(3))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sum_by_shares_at_their_own_pace(size):
    run_ranks(shares_of, size, Shares.nbytes(size, 3))


def test_what_has_no_room_is_refused():
    group, room = OneShot(0, [0], torch.device("cpu")), BLOCK * BLOCKS
    assert group.sums(torch.empty(room)) and group.takes(torch.empty(room))
    for x in (torch.zeros(1, dtype=torch.float64), torch.zeros(room + 1)):
        with pytest.raises(UnsupportedInput, match=f"sums {room} numbers .*; these are {len(x)} of"):
            group.sum(x, torch.float32)
    for x in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(room + 1)):
        with pytest.raises(UnsupportedInput, match=f"takes {room} whole words of 4 bytes; this tensor has {x.nbytes}"):
            group.gather(x)
    with pytest.raises(UnsupportedInput, match="take float32; this tensor is torch.bfloat16"):
        Shares(0, [0], torch.device("cpu")).sum(torch.zeros(3, dtype=torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(4097.0).view(1, 4097)[:, -1],  # one number, whose stride is not 1
        torch.arange(6.0).view(1, 3, 2)[..., -1:, :].transpose(0, 1),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
    ids=["one of a row", "dimensions of one", "turned", "a number", "nothing"],
)
def test_any_strides_are_gathered(x):
    store = SimpleNamespace(rank=0, size=2, beat=None, exchange=None)
    group = Processes(store, SimpleNamespace(gather=lambda raw: [raw, raw.clone()]))
    found = group.all_gather(x)
    assert len(found) == 2 and all(torch.equal(part, x) and part.dtype == x.dtype for part in found)
