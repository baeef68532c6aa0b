"""Capturing CUDA graphs while Python goes on collecting garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **how) -> Iterator[None]:
    """torch.cuda.graph(graph, **how), during which nothing is collected.

    A model or an engine that is no more may hold its graphs in a cycle, so that they are freed whenever Python
    collects. Freeing a graph is a call that the driver forbids during a capture: the capture under way is lost
    ("operation failed due to a previous error during capture").
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **how):
            yield
    finally:
        if collects:
            gc.enable()
