"""What the benchmark of decode steps counts."""

import warnings

import pytest
import torch

from scripts.bench.decode import Point, add_profile
from scripts.bench.decode_report import _kernel_table
from scripts.bench.timing import what_each_adds
from scripts.bench.waits import counted_syncs


@pytest.fixture
def modes(monkeypatch):
    """Sync debug modes as they are set, without a device. Setting one for the first time warns, as torch does."""
    held = [0]

    def put(mode):
        if mode == "warn":
            warnings.warn(
                "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
            )
        held.append(mode)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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


def test_waiting_for_a_kernel_before_adds_nothing():
    """b starts early and waits for a; c ends before b does; d comes after a gap."""
    spans = [("b", 1.0, 9.0), ("a", 0.0, 6.0), ("c", 2.0, 8.0), ("d", 10.0, 12.0)]
    assert what_each_adds(spans) == [("a", 6.0, 6.0), ("b", 8.0, 3.0), ("c", 6.0, 0.0), ("d", 2.0, 3.0)]
    assert what_each_adds([]) == []


def test_the_table_of_kernels_has_a_column_a_point():
    def point(context, kernels):
        found = Point(1, context, 2, 0.1, 0.1, 0.0, 0.05, 1, 1, 1, 0.0)
        add_profile(found, kernels)
        return found

    points = [
        point(8192, [("void f<3>(int)", 9.0, 2.0), ("g", 4.0, 4.0), ("void f<4>(int)", 3.0, 1.5)]),
        point(1 << 20, [("g", 9.0, 8.0)]),
    ]
    lines = "\n".join(_kernel_table(points))
    assert "| `g` | 4 (1) | 8 (1) |\n| `f` | 4 (2) | – |" in lines and "| all | 8 | 8 |" in lines
    assert points[0].kernels == 3 and _kernel_table([]) == []
