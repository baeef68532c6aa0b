"""Captures CUDA graphs while garbage collection is paused."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsv4.kernels.launch import captured_in


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, cooperative: bool = True, **how) -> Iterator[None]:
    """torch.cuda.graph(graph, **how), during which nothing is collected. cooperative: as of `captured_in`.

    A deleted model or engine may hold its graphs in a cycle, so that they are freed whenever Python collects. The
    driver forbids freeing a graph during a capture: the running capture is lost ("operation failed due to a previous
    error during capture").
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **how), captured_in(graph, cooperative):
            yield
    finally:
        if collects:
            gc.enable()
