"""What this process may use of the machine: processors and GPUs to share out among others."""

import os
from contextlib import suppress
from pathlib import Path


def usable_processors(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors this process may use, at least 1: those it may be scheduled on, and no more than its container's share
    of time.

    `os.cpu_count` counts the whole host's: as many processes, each with a CUDA context, take longer than what they
    compile."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # cgroup v2: "max 100000", or microseconds in each period of so many
        share, period = map(int, quota.read_text().split())
        here = min(here, share // period)
    return max(here, 1)


def gpu_names(count: int) -> tuple[str, ...]:
    """Names of the first `count` GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(given.split(",")[:count] if given is not None else map(str, range(count)))
