"""What the benchmark of decode steps counts."""

import warnings

import pytest
import torch

from scripts.bench.decode import counted_syncs


@pytest.fixture
def modes(monkeypatch):
    """Sync debug modes as they are set, without a device. Setting one for the first time warns, as torch does."""
    held = [0]

    def put(mode):
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations")
        held.append(mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: held[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", put)
    return held


def test_only_what_waits_is_a_sync(modes):
    with counted_syncs() as found:
        pass
    assert found == [] and modes == [0, "warn", 0]
    with counted_syncs() as found:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:138.)\nmore")
        warnings.warn("another matter")
    assert found == ["called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:138.)"]


def test_what_was_set_is_set_again_after_a_failure(modes):
    with pytest.raises(ValueError), counted_syncs() as found:
        warnings.warn("called a synchronizing CUDA operation")
        raise ValueError
    assert len(found) == 1 and modes[-1] == 0


@pytest.mark.gpu
def test_on_a_device():
    one = torch.ones(1, device="cuda")
    for _ in range(2):
        with counted_syncs() as found:
            one.add_(1)
        assert found == []
    with counted_syncs() as found:
        one.item()
    assert len(found) == 1
