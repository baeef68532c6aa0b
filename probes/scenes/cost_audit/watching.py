"""Records a model's calls of operations, layer by layer, and finds which of their inputs their outputs depend on."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows

NAN_E4M3, SIGNS_E2M1 = 0x7F, 0x88  # a byte that is NaN; the sign bits of two FP4 numbers


@dataclass(frozen=True)
class Called:
    """One call of an operation by one layer."""

    layer: int
    name: str
    given: tuple
    out: object


class Calls:
    """Calls of the named operations while the `with` block lasts. attentions: the attention module of each layer."""

    def __init__(self, model, attentions: Iterable, *names: str):
        self.op, self.attentions, self._undo = model.op, list(attentions), ExitStack()
        self._layer, self._calls = -1, []
        self.real = {name: getattr(model.op, name) for name in names}

    def __enter__(self) -> "Calls":
        for i, attn in enumerate(self.attentions):
            self._undo.callback(attn.register_forward_pre_hook(lambda _, args, i=i: setattr(self, "_layer", i)).remove)
        for name, real in self.real.items():
            self._undo.callback(setattr, self.op, name, real)
            setattr(self.op, name, partial(self._call, name, real))
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def _call(self, name: str, real: Callable, *given):
        out = real(*given)
        self._calls.append(Called(self._layer, name, given, out))
        return out

    def taken(self) -> list[Called]:
        """Calls since the last `taken`."""
        found, self._calls = self._calls, []
        return found


def changed(given: tuple, at: int, value) -> tuple:
    return (*given[:at], value, *given[at + 1 :])


def row_bytes(pool: torch.Tensor | PackedRows) -> int:
    """Bytes of one row as its pool holds it."""
    if isinstance(pool, PackedRows):
        return pool.payload.shape[-1] + pool.scales.shape[-1]
    return pool.shape[-1] * pool.element_size()


def copied(pool: torch.Tensor | PackedRows) -> torch.Tensor | PackedRows:
    return (
        pool._replace(data=pool.data.clone())
        if isinstance(pool, PackedRows)
        else pool.clone(memory_format=torch.contiguous_format)
    )


def rows_of(pool: torch.Tensor | PackedRows) -> torch.Tensor:
    """[rows, numbers] of a pool, of packed rows [pages, 64, bytes] without their scales: of a contiguous pool a
    view."""
    return pool.payload.flatten(0, -3) if isinstance(pool, PackedRows) else pool.reshape(-1, pool.shape[-1])


def spoiled(pool: torch.Tensor | PackedRows) -> torch.Tensor | PackedRows:
    """A copy in which every row is different: NaN, or FP4 numbers with the other sign."""
    pool = copied(pool)
    if not isinstance(pool, PackedRows):
        return pool.fill_(float("nan"))
    if pool.format.bits == 4:
        pool.payload.bitwise_xor_(SIGNS_E2M1)
    else:
        pool.payload.fill_(NAN_E4M3)
    return pool


def read_rows(pool: torch.Tensor | PackedRows, listed: torch.Tensor, run: Callable[[object], torch.Tensor]) -> int:
    """How many rows of a pool the output run(pool) depends on: rows whose loss alone changes a bit of it.

    listed: numbers of the rows that may matter. All others are destroyed from the start; if that changes a bit, the
    result is −1. Of PackedRows of a batch rows are numbered over all its pages.
    """
    bad, right = spoiled(pool), run(pool)
    good, lost = rows_of(pool), rows_of(bad)
    place = (lambda r: (r // PAGE, r % PAGE)) if isinstance(pool, PackedRows) else (lambda r: r)
    spoilt = lost[place(0)].clone() if len(lost) else None
    other = lambda: bool((run(bad) != right).any())  # NaN is another number than any
    for r in listed.tolist():
        lost[place(r)] = good[place(r)]
    if other():
        return -1
    count = 0
    for r in listed.tolist():
        lost[place(r)] = spoilt
        count += other()
        lost[place(r)] = good[place(r)]
    return count
