"""Rows of one stream of a cache in a pool, and which row holds which token or entry.

A form of addressing (`Linear` and `Ring` here, `Paged` in `page_tables`, `Staged` in `host_tier.entries`, `Whole` in
`sequence`) knows the pool and the row of a number; `Tokens` and `Entries` know what is numbered: positions, or
compressed entries.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, decode_rows, read_rows, write_rows
from dsv4.model.step import Step


class ChosenRows(NamedTuple):
    """Entries that were chosen, as rows int64 [N, K] of their pool, −1 absent."""

    rows: torch.Tensor


class Rows:
    """A form of addressing: a pool `flat` [rows, width], a tensor or `PackedRows`, and the row of number n of each
    batch row.

    buffer: the pool in the shape in which it was allocated. name: forms with equal names have equal rows, so layers
    share indices. spare: a row of the pool that takes what no batch row keeps (None: that lies beyond what is read).
    far: whether the pool is in host memory; tensors are then those that it has on the device.
    """

    flat: Any  # a tensor or PackedRows, as `packed` says
    spare: int | None = None
    far = False
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({})

    def __init__(self, buffer, flat: torch.Tensor | PackedRows, name: tuple, write: Callable = write_rows):
        self.buffer, self.flat, self.name, self._write = buffer, flat, name, write
        self.packed = isinstance(flat, PackedRows)

    def place(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of `flat` that keep `numbers` int64 [B, ...] of the step's batch rows."""
        raise NotImplementedError

    def index(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        """Rows, of the pool that `extend` returns, that hold `numbers` during the step."""
        return self.place(step, numbers)

    def key(self, step: Step) -> tuple:
        """The inputs of `index` beside the numbers."""
        return self.name

    def slots(self, step: Step, key, numbers: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`place` of numbers() int64 [M], which the step knows by `key`: int64 [M]."""
        return step.memo(("slots", *self.name, key), lambda: self.place(step, numbers()).flatten())

    def extend(self, step: Step, slots: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor | PackedRows:
        """Write values [M, width] of the step to rows slots() int64 [M]; return the pool that `index` addresses."""
        self.store(slots(), values)
        return self.flat

    def view(self, step: Step, n: int) -> torch.Tensor | PackedRows:
        """The first n numbers of each of the step's batch rows: [B, n, width]."""
        raise NotImplementedError

    def chosen(self, step: Step, numbers: torch.Tensor, op) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        """numbers int64 [B, T, K] (−1 absent) → a pool and its rows int64 [B·T, K] (−1 absent). op: the operations of
        the model's backend."""
        return self.flat, torch.where(numbers < 0, -1, self.index(step, numbers)).flatten(0, 1)

    def run(self, step: Step) -> int | None:
        """Row b · run + i of the pool holds number i of the step's row b, one of several; None: another does, or
        `chosen` has more to do."""
        return None

    def held(self) -> torch.Tensor:
        """All rows of a pool that batch rows do not share, [batch, n, width], in fp32 where they are packed."""
        raise NotImplementedError

    def store(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """values [M, width] to rows `slots` int64 [M] of the pool."""
        if self.packed:
            self._write(self.flat, slots, values)
        else:
            self.flat.index_copy_(0, slots, values.to(self.flat.dtype))

    def fetch(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `slots` int64 [M] of the pool: [M, width], of packed rows in `dtype`."""
        return read_rows(self.flat, slots).to(dtype) if self.packed else self.flat.index_select(0, slots)


def by_row(step: Step, numbers: torch.Tensor, n: int) -> torch.Tensor:
    """First row of the pool of each of the step's batch rows, n rows each, in the shape of `numbers`."""
    return (step.row * n).view((step.B,) + (1,) * (numbers.dim() - 1))


class Linear(Rows):
    """Number i of batch row b is row b · n + i: a buffer [batch, n, width], or packed pages [batch, pages, bytes]."""

    def __init__(self, buffer: torch.Tensor | PackedRows, write: Callable = write_rows):
        if isinstance(buffer, PackedRows):
            self.n, data = PAGE * buffer.data.shape[1], buffer.data.flatten(0, 1)
            flat = buffer._replace(data=data, count=buffer.data.shape[0] * self.n)
        else:
            self.n, flat = buffer.shape[1], buffer.flatten(0, 1)
        super().__init__(buffer, flat, (self.n,), write)

    def place(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        return numbers + by_row(step, numbers, self.n)

    def view(self, step: Step, n: int) -> torch.Tensor | PackedRows:
        if self.packed:
            return self.buffer._replace(data=self.buffer.data[step.rows], count=n)
        return self.buffer[step.rows, :n]

    def chosen(self, step: Step, numbers: torch.Tensor, op) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        if step.captured:
            return self.flat, op.chosen_rows(numbers, self.n)
        if step.first == 0 and step.B == 1:
            return self.flat, numbers.flatten(0, 1)
        return super().chosen(step, numbers, op)

    def run(self, step: Step) -> int | None:
        return self.n if step.captured and step.B > 1 else None

    def held(self) -> torch.Tensor:
        return decode_rows(self.buffer) if self.packed else self.buffer


class Ring(Rows):
    """Number i of batch row b is row b · R + i mod R: a buffer [batch, R, width].

    `keep` rows before a step's first token are readable during the step, also after rewinding
    by up to `max_rewind`: R = keep + 1 + max_rewind. Packed rows are given as the pool, with R.
    """

    def __init__(self, buffer: Any, keep: int, R: int = 0, write: Callable = write_rows):
        packed, self.keep = isinstance(buffer, PackedRows), keep
        self.R = R if packed else buffer.shape[1]
        super().__init__(buffer, buffer if packed else buffer.flatten(0, 1), (self.R,), write)

    def place(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        return numbers % self.R + by_row(step, numbers, self.R)

    def index(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        if self.fits(step):
            return self.place(step, numbers)
        first = torch.arange(step.B, device=step.device) * (self.keep + step.T) + self.keep
        return numbers + (first - step.start).view((step.B,) + (1,) * (numbers.dim() - 1))

    def key(self, step: Step) -> tuple:
        return (self.R, self.keep, self.fits(step))

    def fits(self, step: Step) -> bool:
        """Whether the step's tokens fit beside the kept rows."""
        return step.T <= self.R - self.keep

    def extend(self, step: Step, slots: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor | PackedRows:
        """The pool holds positions start − keep … start + T − 1 of each row. It is the ring itself while the step fits;
        a longer step is laid out in a workspace of keep + T rows, of which the ring keeps the last R."""
        if self.fits(step):
            return super().extend(step, slots, values)
        values = values if self.packed else values.to(self.flat.dtype)
        before = self.slots(
            step,
            ("before", self.keep),
            lambda: step.start.unsqueeze(1) + torch.arange(-self.keep, 0, device=step.device),
        )
        shape = step.B, -1, values.shape[-1]
        before, values = self.fetch(before, values.dtype).view(shape), values.view(shape)  # a window of 1 keeps none
        laid_out = torch.cat((before, values), 1).flatten(0, 1)
        last = min(step.T, self.R)
        self.store(self.slots(step, ("last", last), lambda: step.pos[:, -last:]), values[:, -last:].flatten(0, 1))
        return self._packed(laid_out) if self.packed else laid_out

    def _packed(self, values: torch.Tensor) -> PackedRows:
        """A pool of values [M, width]. All steps, short and long, read rows of one kind, so their sums run in one
        order."""
        pages = -(-len(values) // PAGE)
        pool = self.flat._replace(data=self.flat.data.new_empty(pages, self.flat.data.shape[1]), count=PAGE * pages)
        self._write(pool, torch.arange(len(values), device=values.device), values)
        return pool


class Numbered:
    """A stream whose rows are numbered in one way or the other."""

    def __init__(self, rows: Rows):
        self.rows = rows

    @property
    def flat(self) -> torch.Tensor | PackedRows:
        """The pool [rows, width]."""
        return self.rows.flat

    @property
    def buffer(self) -> torch.Tensor | PackedRows:
        """The pool as it was allocated."""
        return self.rows.buffer


class Tokens(Numbered):
    """One row a token, numbered by its position."""

    def extend(self, step: Step, values: torch.Tensor) -> torch.Tensor | PackedRows:
        """Write values [N, width] at the step's positions; return the pool that `index` and `last` address."""
        return self.rows.extend(step, lambda: self.slots(step), values)

    def slots(self, step: Step) -> torch.Tensor:
        """Rows of the pool for the step's own positions, int64 [N]."""
        return self.rows.slots(step, "pos", lambda: step.pos)

    def last(self, step: Step, window: int) -> torch.Tensor:
        """Rows of the pool that hold the last `window` positions of each query, int64 [N, window], −1 before position
        0."""

        def found():
            positions = step.pos.unsqueeze(-1) + torch.arange(1 - window, 1, device=step.device)
            return torch.where(positions < 0, -1, self.rows.index(step, positions)).flatten(0, 1)

        return step.memo(("window", window, *self.rows.key(step)), found)


class Entries(Numbered):
    """Compressed entries, one every `ratio` tokens."""

    def __init__(self, rows: Rows, ratio: int):
        super().__init__(rows)
        self.ratio = ratio

    def write(self, step: Step, values: torch.Tensor) -> None:
        """Write values [B·completed, width] at the step's new windows."""
        self.rows.extend(step, lambda: self.slots(step), values)

    def slots(self, step: Step) -> torch.Tensor:
        """Rows of the pool for the step's new windows, int64 [B·completed].

        Windows that a row does not complete go to the spare row of a pool that rows share: their entries could hit a
        page that the row shares with the donor of its prefix, which has an entry of its own there. A captured step
        knows which windows are complete and writes no others.
        """

        def found():
            rows = self.rows.place(step, step.new_windows(self.ratio)).flatten()
            spare = None if step.captured else self.rows.spare
            return rows if spare is None else torch.where(step.completes(self.ratio), rows, spare)

        return step.memo(("entry_slots", self.ratio, *self.rows.name), found)

    def visible(self, step: Step) -> torch.Tensor | PackedRows:
        """[B, n, width]: the entries that the step's last query may see."""
        return self.rows.view(step, step.max_visible(self.ratio))

    def all_visible(self, step: Step) -> torch.Tensor:
        """Every entry that each query sees, int64 [B, T, n], −1 for those it does not."""
        n = step.max_visible(self.ratio)

        def entries():
            entry = torch.arange(n, device=step.device).expand(step.B, step.T, n)
            return torch.where(entry < step.visible(self.ratio).unsqueeze(-1), entry, -1)

        return step.memo(("all entries", self.ratio), entries)

    def held(self) -> torch.Tensor:
        """All entries [batch, n, width], in fp32 where they are packed."""
        return self.rows.held()

    def run(self, step: Step) -> int | None:
        """`Rows.run`, by which `ChosenRows` of the step may be made."""
        return self.rows.run(step)

    def chosen(
        self, step: Step, entry: torch.Tensor | ChosenRows, op=None
    ) -> tuple[torch.Tensor | PackedRows, torch.Tensor]:
        """entry int64 [B, T, K] (−1 absent) → a pool of rows and its rows int64 [B·T, K] (−1 absent)."""
        if isinstance(entry, ChosenRows):
            return self.rows.flat, entry.rows
        return self.rows.chosen(step, entry, op)
