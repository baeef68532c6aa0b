"""The imports of a command that runs a model. They take seconds, most of them torch's."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from dsv4.runtime import driver

# torch's shared libraries without Python in them, each after those that it needs
LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
# Modules that torch and dsv4 import, and that need no torch. The linker loads one library at a time, so NATIVE, which
# have libraries of their own, come before torch's, and PLAIN are imported meanwhile.
NATIVE = ("unittest.mock", "numpy", "tokenizers", "triton")
PLAIN = ("triton.experimental.gluon", "torchgen.model", "einops", "pynvml")


@dataclass
class Imports:
    """Seconds that imports took: torch, with what it imports; all."""

    torch: float = 0.0
    all: float = 0.0


@contextmanager
def importing(device: str = "cpu") -> Iterator[Imports]:
    """A block of imports that need torch, before a model runs on `device`. torch is imported before the block.

    The CUDA driver and torch's libraries load in threads, which leave Python to this one. Garbage is not collected
    meanwhile: little of what is imported is garbage, and each collection looks through all of it. Later collections
    leave it out. Where torch is imported already, only the driver starts. The result is complete after the block.
    """
    driver.start(device)
    took = Imports()
    if "torch" in sys.modules:
        yield took
        return
    begun, collecting = time.perf_counter(), gc.isenabled()
    gc.disable()
    try:
        _import(NATIVE)
        loading = Thread(target=load_libraries, daemon=True)
        loading.start()
        _import(PLAIN)
        loading.join()
        import_module("torch")
        took.torch = time.perf_counter() - begun
        yield took
        took.all = time.perf_counter() - begun
        gc.freeze()
    finally:
        if collecting:
            gc.enable()


def load_libraries() -> list[str]:
    """Load those of torch's shared libraries that are there, without importing torch. Returns their names. `import
    torch` loads the others, or fails as it would without this."""
    spec, loaded = find_spec("torch"), []
    # called so, it lets other threads run, which ctypes.CDLL(name) does not
    dlopen = getattr(ctypes.CDLL(None), "dlopen", None)
    if spec is None or dlopen is None:
        return loaded
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for folder in spec.submodule_search_locations or ():
        for name in LIBRARIES:
            shared = os.RTLD_GLOBAL if name == LIBRARIES[0] else os.RTLD_LOCAL  # as torch does
            if dlopen(os.fsencode(Path(folder, "lib", name)), os.RTLD_NOW | shared):
                loaded.append(name)
    return loaded


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with suppress(Exception):  # who needs it will say what is wrong with it
            import_module(name)
