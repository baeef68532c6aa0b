"""Simulated GPUs: tensors are where they were put, no operation mixes them, and the numbers are the host's."""

import pytest
import torch

from dsv4.kernels import tables
from dsv4.kernels.hadamard.reference import hadamard
from dsv4.kernels.quantize import formats
from dsv4.probes.scenes.simulated_gpus import simulated

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def gpus():
    with simulated():
        yield


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, device="cuda:1"),
        lambda: torch.tensor([1, 2], device=SECOND),
        lambda: torch.ones(3).to(SECOND),
        lambda: torch.ones(3, device=FIRST).to("cuda:1"),
        lambda: torch.ones(3).to(torch.ones(1, device=SECOND)),
        lambda: torch.ones(3, device=SECOND).new_zeros(4),
        lambda: torch.empty_like(torch.ones(3), device=SECOND),
        lambda: torch.ones(3, device=SECOND)[1:].view(1, 2) + 1,
        lambda: torch.arange(3, device=SECOND).topk(2).indices,
        lambda: torch.nn.Parameter(torch.ones(3, device=SECOND)),
        lambda: torch.ones(3, device=SECOND)[torch.tensor([0, 2])],  # as CUDA takes them
        lambda: torch.ones(3, device=SECOND) * torch.tensor(2.0),
    ],
)
def test_a_result_is_where_a_gpu_would_leave_it(make):
    assert make().device == SECOND and make().is_leaf


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, first, second: host + first,
        lambda host, first, second: first * second,
        lambda host, first, second: torch.cat([first, second]),
        lambda host, first, second: torch.where(first > 0, second, 0.0),
        lambda host, first, second: first[second.long()],
        lambda host, first, second: torch.nn.functional.embedding(host.long(), first.unsqueeze(1)),
        lambda host, first, second: first.add_(host),
    ],
)
def test_tensors_of_different_devices_do_not_mix(mix):
    with pytest.raises(RuntimeError, match="expected all on one device"):
        mix(torch.ones(3), torch.ones(3, device=FIRST), torch.ones(3, device=SECOND))


def test_only_copies_move_numbers():
    host = torch.arange(4.0)
    there = host.to(FIRST)
    host[0] = 9
    assert there.cpu().tolist() == [0, 1, 2, 3] and there.cpu().device == host.device
    other = torch.zeros(4, device=SECOND)
    other[1:].copy_(there[1:])
    other[0] = there[3]
    there.fill_(7)
    assert other.device == SECOND and other.tolist() == [3, 1, 2, 3]
    assert (other @ other).item() == 23 and host.to(host.device) is host


def test_tables_of_a_real_gpu_are_not_taken_and_come_back(monkeypatch):
    """A GPU that was used before left its tables under the name of the simulated one."""
    codes, x = torch.tensor([0x72], dtype=torch.uint8, device=FIRST), torch.tensor([3.0, 1.0, 0.0, 0.0], device=FIRST)
    formats.unpack_e2m1(codes), hadamard(x)
    left = {key: "of the GPU" for key in tables._tables if FIRST in key}
    assert len(left) == 3
    monkeypatch.setattr(tables, "_tables", left)
    with simulated():
        values, turned = formats.unpack_e2m1(codes), hadamard(x)
        assert values.device == turned.device == FIRST
        assert values.tolist() == [1.0, 6.0] and turned.tolist() == [2.0, 1.0, 2.0, 1.0]
    assert tables._tables is left and set(left.values()) == {"of the GPU"}
