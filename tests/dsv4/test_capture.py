"""Captures of CUDA graphs are not disturbed by what Python frees meanwhile."""

import gc
from contextlib import contextmanager

import pytest
import torch

from dsv4.runtime.capture import capturing


class Owner:
    """Holds itself, so that only a collection frees it and what it has."""

    def __init__(self, graph=None):
        self.itself, self.graph = self, graph


@pytest.fixture
def seen(monkeypatch):
    """What a capture was asked, and whether garbage was collected at its begin, in it, and at its end."""
    found = []

    @contextmanager
    def graph(captured, **how):
        found.append((captured, how, gc.isenabled()))
        try:
            yield
        finally:
            found.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return found


@pytest.mark.parametrize("before", [True, False], ids=["collecting", "not collecting"])
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_nothing_is_collected_meanwhile(seen, before, fails):
    enabled = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        try:
            with capturing("a graph", pool=3):
                inside = gc.isenabled()
                if fails:
                    raise ValueError
        except ValueError:
            assert fails
        after = gc.isenabled()
    finally:
        (gc.enable if enabled else gc.disable)()
    assert seen == [("a graph", {"pool": 3}, False), False] and not inside and after is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_that_are_garbage_break_no_capture():
    x = torch.zeros(4, device="cuda")

    def captured(busy=lambda: None):
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            x.add_(1)
            busy()
        return graph

    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)  # a collection would come at once
    try:
        Owner(captured())
        graph = captured(lambda: [Owner() for _ in range(5000)])
    finally:
        gc.set_threshold(*before)
    graph.replay()
    assert x.tolist() == [1] * 4
