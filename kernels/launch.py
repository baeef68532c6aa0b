"""Facts about the device that launchers of Triton kernels need."""

from functools import cache

import torch
import triton
from triton import knobs

from dsv4.kernels.errors import UnsupportedInput


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 when Triton was imported)."""
    return bool(knobs.runtime.interpret)


def require_device(name: str, *tensors: torch.Tensor) -> None:
    """Raise UnsupportedInput unless every tensor is where Triton kernels can run: one GPU, or the interpreter's CPU."""
    for t in tensors:
        if t is not None and t.device.type != ("cpu" if interpreting() else "cuda"):
            raise UnsupportedInput(
                f"{name}: the triton backend got a tensor on {t.device}; expected "
                f"{'cpu (TRITON_INTERPRET=1 is set)' if interpreting() else 'a CUDA device'}"
            )


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device: at least this many programs run in parallel."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) in the interpreter."""
    return (0, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


def dot_in_fp32(x: torch.Tensor) -> bool:
    """Whether products must take fp32 operands: in the interpreter, whose bf16 dot returns garbage, and for fp32
    inputs."""
    return interpreting() or x.dtype is torch.float32


def next_power(n: int) -> int:
    return triton.next_power_of_2(n)


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the previous one has ended (programmatic dependent launch, capability 9.0 and
    later).

    A kernel launched so (`launch_pdl=True`) calls `gdc_wait` in every program before it reads results of an earlier
    kernel and before it writes anything; only weights may be read earlier.
    """
    return capability(device) >= (9, 0)
