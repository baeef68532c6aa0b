"""What this process may use of the machine: processors and GPUs to share out among others."""

import os

from dsv4.runtime.threads import usable_processors

__all__ = ["gpu_names", "usable_processors"]


def gpu_names(count: int) -> tuple[str, ...]:
    """Names of the first `count` GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(given.split(",")[:count] if given is not None else map(str, range(count)))
