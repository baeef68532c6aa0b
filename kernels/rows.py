"""Passes of several tokens in which each token is computed as if it were alone, on a host processor.

BLAS sums one row of a product in another order than one of several, so a pass that verifies drafted tokens gives logits that differ
in the last bits from those of single steps; where numbers are rounded to bf16, FP8 or FP4 afterwards that can move a choice, and
greedy text with it. Within `alone()` products of rows are products of one row each, over weights that are dequantised once, and
operations that treat a single token in a way of their own do so for every token.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps

import torch
import torch.nn.functional as F

_now = False


@contextmanager
def alone():
    """While it is entered, the `cpu` and `reference` backends give each token of a pass the bits that it has in a pass of its own."""
    global _now
    before, _now = _now, True
    try:
        yield
    finally:
        _now = before


def apart(rows: int) -> bool:
    """Whether so many rows have to be computed one by one."""
    return _now and rows > 1


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, K] times weight [O, K] transposed, [N, O]: `F.linear`."""
    return torch.cat([F.linear(row, weight) for row in x.split(1)]) if apart(len(x)) else F.linear(x, weight)


def by_row(*places: int) -> Callable:
    """For an operation whose results, and whose arguments at `places`, hold one row a token: tokens one by one where they have to be."""
    def decorate(operation: Callable) -> Callable:
        @wraps(operation)
        def call(*given):
            rows = given[places[0]].shape[0]
            if not apart(rows):
                return operation(*given)
            each = [operation(*(a[i:i + 1] if at in places else a for at, a in enumerate(given))) for i in range(rows)]
            return torch.cat(each) if isinstance(each[0], torch.Tensor) else tuple(map(torch.cat, zip(*each)))
        return call
    return decorate
