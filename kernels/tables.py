"""Tables of constants, each made once a device: to make one copies from the host, which no CUDA graph may do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch

_tables: dict[tuple, torch.Tensor] = {}


def table(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """make(device, *sizes), whose result is kept. What it gives must not be written to."""

    @wraps(make)
    def kept(device: torch.device, *sizes: int) -> torch.Tensor:
        key = (make, device, *sizes)
        if (found := _tables.get(key)) is None:
            found = _tables[key] = make(device, *sizes)
        return found

    return kept


@contextmanager
def own_tables() -> Iterator[None]:
    """While it lasts, tables are made anew, and then forgotten: of devices that only bear the names of real ones."""
    global _tables
    before, _tables = _tables, {}
    try:
        yield
    finally:
        _tables = before
