"""The number of host threads that torch computes with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SMALL = 1024  # hidden size below which a second thread only waits: matrices are too small to share out


def usable_processors(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors this process may use, at least 1: those it may be scheduled on, and no more than its container's share
    of time.

    `os.cpu_count` counts those of the whole host. That many processes, each with a CUDA context, take longer than their
    compilation.
    """
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # cgroup v2: "max 100000", or microseconds in each period of so many
        share, period = map(int, quota.read_text().split())
        here = min(here, share // period)
    return max(here, 1)


def thread_count(hidden_size: int | None, asked: int | None = None, default: int | None = None) -> int:
    """Threads for a model of that hidden size (None: not known).

    asked: what the user set (--threads); it decides. Else OMP_NUM_THREADS decides, which torch has read: `default`,
    torch's own number, is kept. Else a small model gets one thread: on a busy machine two threads that wait for each
    other decode ten times slower than one. Any other model gets at most one thread per processor that this process
    may use, since torch counts the whole host's and a container may have fewer.
    """
    import torch

    default = torch.get_num_threads() if default is None else default
    if asked is not None:
        return asked
    if os.environ.get("OMP_NUM_THREADS"):
        return default
    if hidden_size is not None and hidden_size < SMALL:
        return 1
    return min(default, usable_processors())


@contextmanager
def limited_threads(hidden_size: int | None, asked: int | None = None) -> Iterator[int]:
    """Within this context torch computes with `thread_count` threads; after it with as many as before."""
    import torch

    before = torch.get_num_threads()
    count = thread_count(hidden_size, asked, before)
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
