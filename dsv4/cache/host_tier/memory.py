"""Pinned pages of host memory that the device addresses.

A CUDA machine must have unified addressing, and registered pages must have the same address on the device as on the
host (`canUseHostPointerForRegisteredMem`: Linux on 64 bits). Both are tested when a buffer is made, on its first and
last bytes.
"""

import mmap
import resource
import time
from contextlib import suppress

import torch

from dsv4.errors import CapacityError

PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
WAITS, PAUSE = 20, 0.5  # samples of the free memory before it counts as short, and seconds between them


class PinnedMemoryError(CapacityError):
    """Pinned host memory is not available; the message has the bytes requested and available."""


class HostBuffer:
    """A zeroed tensor in host memory: `host` on the CPU, and `device`, the same bytes as a tensor of the device (the
    same tensor where the device is the CPU). Views of either are valid as long as this object lives. Raises
    PinnedMemoryError."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.nbytes, self._registered = dtype.itemsize, None
        for extent in shape:
            self.nbytes *= extent
        flat, cuda = _pages(self.nbytes), device.type == "cuda"
        if cuda:
            _await_room(self.nbytes)
            flat.zero_()  # many threads touch the pages here; pinning would touch them one by one
            self._register(flat, device)
        self.host = flat.view(dtype).view(shape)
        self.device = _mapped(flat, device).view(dtype).view(shape) if cuda else self.host

    def _register(self, flat: torch.Tensor, device: torch.device) -> None:
        torch.cuda.init()
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), PORTABLE_MAPPED))
        if code:
            _clear_error()
            raise PinnedMemoryError(
                f"{_wanted(self.nbytes)} could not be pinned (CUDA error {code}); {_available()}; ask for less "
                "context or fewer layers, or raise the limit (ulimit -l)"
            )
        self._registered = flat.data_ptr()

    def close(self) -> None:
        """Unpin. No view of `device` may be used afterwards."""
        if self._registered is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None
        self.host = self.device = None

    def __del__(self):
        with suppress(Exception):  # at the interpreter's end the runtime for unpinning is gone
            self.close()


def _pages(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] in pages of their own, large ones if the system has them, because those are pinned quickly."""
    try:
        pages = mmap.mmap(-1, max(1, nbytes))
    except (OSError, ValueError, OverflowError) as error:
        raise PinnedMemoryError(
            f"{_wanted(nbytes)} could not be mapped ({error}); {_available()}; ask for less context or fewer layers"
        ) from error
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    check_limit(nbytes)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def check_limit(nbytes: int) -> None:
    """Raise PinnedMemoryError if that is more than the total limit of this process's control group."""
    limit = _limit()
    if limit is not None and nbytes > limit:
        raise PinnedMemoryError(
            f"{_wanted(nbytes)} are more than the {limit} that this control group may have; ask for less context or "
            "fewer layers"
        )


def _await_room(nbytes: int) -> None:
    """Raise PinnedMemoryError if the system stays short of that much memory: it kills processes that take more, without
    a message. A virtual machine's memory may grow as it is used, with a short delay."""
    for _ in range(WAITS):
        free = _free()
        if free is None or nbytes <= free:
            return
        time.sleep(PAUSE)
    raise PinnedMemoryError(f"{_wanted(nbytes)} were needed next; {_available()}; ask for less context or fewer layers")


class _Bytes:
    """An object that `torch.as_tensor` reads as bytes of the device."""

    def __init__(self, pointer: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _mapped(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bytes as a tensor of the device, and a test that they are."""
    with torch.cuda.device(device):
        there = torch.as_tensor(
            _Bytes(flat.data_ptr(), flat.numel()), device=torch.device("cuda", torch.cuda.current_device())
        )
        if there.data_ptr() != flat.data_ptr():
            raise PinnedMemoryError(
                f"{_wanted(flat.numel())} are at another address on the device; expected unified addressing of "
                "registered pages (canUseHostPointerForRegisteredMem)"
            )
        ends = there[:1], there[-1:]
        for end in ends:
            end.fill_(90)
        torch.cuda.synchronize()
        if (flat[0], flat[-1]) != (90, 90):
            raise PinnedMemoryError(
                f"{_wanted(flat.numel())} do not show the host what the device wrote; expected mapped pages"
            )
        for end in ends:
            end.fill_(0)
        torch.cuda.synchronize()
    return there


def _clear_error() -> None:
    """Clear the runtime's last error, which it would otherwise report at the next launch: this one."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _wanted(nbytes: int) -> str:
    return f"{nbytes} bytes of host memory ({nbytes / 1e9:.2f} GB)"


def _limit() -> int | None:
    """The control group's limit in bytes; None if there is none. Free memory is not considered: a virtual machine whose
    memory grows as it is used shows less than it can have."""
    with suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.max") as limit:
            return int(limit.read())
    return None


def _free() -> int | None:
    """Bytes that the system has free for new pages; None if it does not say."""
    with suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    return None


def _available() -> str:
    """The limit of host memory here, in words."""
    free = _free()
    found = [] if free is None else [f"{free} bytes available now"]
    lock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found.append(
        "no limit on locked memory" if lock == resource.RLIM_INFINITY else f"at most {lock} bytes may be locked"
    )
    return ", ".join(found)
