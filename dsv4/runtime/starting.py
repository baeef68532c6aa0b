"""The imports of a command that runs a model. They take seconds, most of them torch's."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from dsv4.runtime import driver


@dataclass
class Imports:
    """Seconds that imports took: torch, with what it imports; all."""

    torch: float = 0.0
    all: float = 0.0


@contextmanager
def importing(device: str = "cpu") -> Iterator[Imports]:
    """A block of imports that need torch, before a model runs on `device`. torch is imported before the block.

    The CUDA driver starts in a thread. Garbage is not collected meanwhile: little of what is imported is garbage, and
    each collection looks through all of it. Later collections leave it out. Where torch is imported already, only the
    driver starts. The result is complete after the block.
    """
    driver.start(device)
    took = Imports()
    if "torch" in sys.modules:
        yield took
        return
    begun, collecting = time.perf_counter(), gc.isenabled()
    gc.disable()
    try:
        import_module("torch")
        took.torch = time.perf_counter() - begun
        yield took
        took.all = time.perf_counter() - begun
        gc.freeze()
    finally:
        if collecting:
            gc.enable()
