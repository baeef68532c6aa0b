"""Dequantised weights, kept while several tokens run through a model one after another.

Dequantising gives the same numbers every time, so sharing it changes no bit of a step.
"""

from collections import OrderedDict
from contextlib import contextmanager

import torch

from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat, expert, to_float

LIMIT = 1 << 30  # bytes; above this the least recently used weights are dropped

_kept: OrderedDict[tuple, torch.Tensor] | None = None


@contextmanager
def keeping():
    """While this context is entered, `dequantised` keeps its results. Weights must not change meanwhile."""
    global _kept
    before, _kept = _kept, OrderedDict() if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def dequantised(w: PackedWeight, rows: slice | None = None) -> torch.Tensor:
    """`to_float`, kept unless the matrix is in a slot; the result must not be written to."""
    if _kept is None or w.format is WeightFormat.DENSE or w.of is not None:
        return to_float(w, rows)
    span = (rows or slice(None)).indices(w.out_features)
    key = (w.weight.data_ptr(), w.weight.shape, span)
    if key not in _kept:
        _kept[key] = to_float(w, rows)
        while sum(t.nbytes for t in _kept.values()) > LIMIT and len(_kept) > 1:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def dequantised_stack(w: PackedWeight, index: torch.Tensor) -> torch.Tensor:
    """fp32 [len(index), O, K]: matrices of the stack w, dequantised when first used."""
    if _kept is None:
        return to_float(expert(w, index))
    return torch.stack([dequantised(expert(w, e)) for e in index.tolist()])
