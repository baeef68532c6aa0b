"""Pinned memory that is not to be had is an error with the number."""

from contextlib import nullcontext

import pytest
import torch

from dsv4.cache.host_tier import memory
from dsv4.cache.host_tier.memory import HostBuffer, PinnedMemoryError
from dsv4.errors import CapacityError


def test_a_buffer_on_the_cpu():
    buffer = HostBuffer((3, 5), torch.bfloat16, torch.device("cpu"))
    assert buffer.nbytes == 30 and buffer.host is buffer.device and (buffer.host == 0).all()


def test_more_than_can_be_mapped():
    with pytest.raises(
        PinnedMemoryError, match=r"36028797018963968 bytes of host memory \(36028797.02 GB\) could not be mapped"
    ):
        HostBuffer((1 << 55,), torch.uint8, torch.device("cpu"))
    assert issubclass(PinnedMemoryError, CapacityError)


def test_more_than_the_group_may_have(monkeypatch):
    monkeypatch.setattr(memory, "_limit", lambda: 1000)
    HostBuffer((1000,), torch.uint8, torch.device("cpu"))
    with pytest.raises(PinnedMemoryError, match="1001 bytes.* more than the 1000"):
        HostBuffer((1001,), torch.uint8, torch.device("cpu"))


def test_a_refusal_by_the_runtime(monkeypatch):
    """What cudaHostRegister refuses names the bytes and the limit."""

    class Runtime:
        cudaHostRegister = staticmethod(lambda pointer, nbytes, flags: 2)

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(memory, "_clear_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    with pytest.raises(PinnedMemoryError, match="4096 bytes.*could not be pinned .CUDA error 2.*locked"):
        HostBuffer((4096,), torch.uint8, torch.device("cuda"))


@pytest.mark.gpu
def test_pages_are_seen_from_both_sides():
    buffer = HostBuffer((1 << 20,), torch.int64, torch.device("cuda"))
    assert buffer.host.is_pinned() and buffer.device.is_cuda and buffer.host.data_ptr() == buffer.device.data_ptr()
    buffer.device.copy_(torch.arange(1 << 20, device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(buffer.host, torch.arange(1 << 20))
    buffer.host.add_(1)
    assert torch.equal(buffer.device.cpu(), torch.arange(1 << 20) + 1)
    buffer.close()
    assert buffer.host is None and buffer.device is None
