"""The CUDA driver's library, without torch. It takes a third of a second to start, and other things may be done
meanwhile."""

import ctypes
from functools import cache
from threading import Thread

CAPABILITY, PROCESSORS, MPS = (75, 76), 16, 133  # attributes of a device

_started: list[Thread] = []


def start(device: str) -> None:
    """Start the driver in a thread, if a command names a CUDA device. `library` waits for it, so that no process is
    forked meanwhile."""
    if device.partition(":")[0] == "cuda" and not _started:
        _started.append(Thread(target=_loaded, daemon=True))
        _started[0].start()


def library() -> ctypes.CDLL | None:
    """The driver's library, started; None where there is none, or no device."""
    for thread in _started:
        thread.join()
    return _loaded()


def attribute(number: int, index: int = 0) -> int | None:
    """A property of GPU `index` of this process, by its number in cuda.h; None where there is no such GPU, 0 where the
    driver does not know it."""
    driver, device, value = library(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


@cache
def _loaded() -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if found.cuInit(0) else found
