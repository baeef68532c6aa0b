"""Dequantised weights, kept while several tokens run through a model one after another, or a kernel through cases.

Dequantising gives the same numbers every time, so sharing it changes no bit of a step.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat, expert, to_float

LIMIT = 1 << 30  # bytes; above this the least recently used weights are dropped

# (parts of the packed matrix, its values) by their addresses. The parts are held, because memory of one that is freed
# becomes another's: layers that are read from disk for each step come and go. A thread has its own, because threads
# that run ranks enter and leave in any order.
_kept: ContextVar[OrderedDict[tuple, tuple[list[torch.Tensor], torch.Tensor]] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping():
    """While this context is entered, the functions below keep their results in this thread. Weights must not be written
    to meanwhile."""
    before = _kept.set(OrderedDict() if (kept := _kept.get()) is None else kept)
    try:
        yield
    finally:
        _kept.reset(before)


def dequantised(w: PackedWeight, rows: slice | None = None) -> torch.Tensor:
    """`to_float`, kept unless the matrix is in a slot; the result must not be written to."""
    if w.format is WeightFormat.DENSE:
        return to_float(w, rows)
    return once(w, (dequantised, (rows or slice(None)).indices(w.out_features)), lambda: to_float(w, rows))


def once(w: PackedWeight, what: tuple, made: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What is made of a matrix, kept under the name `what` unless the matrix is in a slot or the result takes more than
    all that may be kept; it must not be written to."""
    kept = _kept.get()
    if kept is None or w.of is not None:
        return made()
    parts = [t for t in w if isinstance(t, torch.Tensor)]
    rest = [t for t in w if not isinstance(t, torch.Tensor)]
    key = (*((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in parts), *rest, *what)
    if key not in kept:
        values = made()
        if values.nbytes > LIMIT:
            return values
        kept[key] = parts, values
        while sum(values.nbytes for _, values in kept.values()) > LIMIT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key][1]


def dequantised_stack(w: PackedWeight, index: torch.Tensor) -> torch.Tensor:
    """fp32 [len(index), O, K]: matrices of the stack w, dequantised when first used."""
    if _kept.get() is None:
        return to_float(expert(w, index))
    return torch.stack([dequantised(expert(w, e)) for e in index.tolist()])
