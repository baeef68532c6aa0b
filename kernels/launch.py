"""Facts about the device that launchers of Triton kernels need."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import triton
from triton import knobs

from dsv4.kernels import keys, triton_cache
from dsv4.kernels.errors import UnsupportedInput

keys.use()  # every module that launches a kernel imports this one
triton_cache.use()


class GPU(NamedTuple):
    """What a launch depends on of the device: compute capability, and multiprocessors."""

    capability: tuple[int, int]
    processors: int


_assumed: GPU | None = None
_capture = threading.local()


@contextmanager
def assumed(gpu: GPU) -> Iterator[None]:
    """While it lasts, launchers take tensors of the device `meta` for those of such a GPU. Launches must be kept from
    running (`dsv4.kernels.recording`)."""
    global _assumed
    before, _assumed = _assumed, gpu
    try:
        yield
    finally:
        _assumed = before


@contextmanager
def captured_in(graph: object, cooperative: bool = True) -> Iterator[None]:
    """While it lasts, launches of this thread belong to `graph`, which is replayed at most once at a time. cooperative:
    it may have kernels whose programs wait for each other."""
    before, _capture.now = _captured(), (graph, cooperative)
    try:
        yield
    finally:
        _capture.now = before


def capture() -> object | None:
    """What launches of this thread belong to."""
    return _captured()[0]


def cooperative() -> bool:
    """Whether kernels whose programs wait for each other may be launched by this thread."""
    return _captured()[1]


def _captured() -> tuple[object | None, bool]:
    return getattr(_capture, "now", (None, True))


def _gpu(device: torch.device) -> GPU:
    if device.type == "meta" and _assumed is not None:
        return _assumed
    return _present(device)


@cache
def _present(device: torch.device) -> GPU:
    if device.type == "cpu":
        return GPU((0, 0), 4)
    return GPU(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 when Triton was imported)."""
    return bool(knobs.runtime.interpret)


def require_device(name: str, *tensors: torch.Tensor) -> None:
    """Raise UnsupportedInput unless every tensor is where Triton kernels can run: one GPU, or the interpreter's CPU."""
    wanted = "meta" if _assumed is not None else "cpu" if interpreting() else "cuda"
    for t in tensors:
        if t is not None and t.device.type != wanted:
            raise UnsupportedInput(
                f"{name}: the triton backend got a tensor on {t.device}; expected "
                f"{'cpu (TRITON_INTERPRET=1 is set)' if interpreting() else 'a CUDA device'}"
            )


def processors(device: torch.device) -> int:
    """Multiprocessors of the device: at least this many programs run in parallel."""
    return _gpu(device).processors


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) in the interpreter."""
    return _gpu(device).capability


def dot_in_fp32(x: torch.Tensor) -> bool:
    """Whether products must take fp32 operands: in the interpreter, whose bf16 dot returns garbage, and for fp32
    inputs."""
    return interpreting() or x.dtype is torch.float32


def next_power(n: int) -> int:
    return triton.next_power_of_2(n)


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the previous one has ended (programmatic dependent launch, capability 9.0 and
    later).

    A kernel launched so (`launch_pdl=True`) calls `gdc_wait` in every program before it reads results of an earlier
    kernel and before it writes anything; only weights may be read earlier.
    """
    return capability(device) >= (9, 0)
