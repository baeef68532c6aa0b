"""Rows of one stream of a cache in a pool: which row holds which position (`TokenRows`, in a ring) or which entry
(`EntryRows`)."""

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, decode_rows, read_rows, write_rows
from dsv4.model.step import CapturedStep, Step


class TokenRows:
    """One row a token in a pool `flat` [rows, width]; subclasses say which row holds which position.

    They give `address(step)` (layers with equal addresses share indices), `index(step, positions)` and `slots(step)`.
    """

    flat: torch.Tensor | PackedRows

    def store(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """values [M, width] to rows `slots` int64 [M] of the pool."""
        if isinstance(self.flat, PackedRows):
            self._write(self.flat, slots, values)
        else:
            self.flat.index_copy_(0, slots, values.to(self.flat.dtype))

    def fetch(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `slots` int64 [M] of the pool: [M, width] in `dtype`."""
        return (
            read_rows(self.flat, slots).to(dtype)
            if isinstance(self.flat, PackedRows)
            else self.flat.index_select(0, slots)
        )

    def last(self, step: Step, window: int) -> torch.Tensor:
        """Rows of the pool that hold the last `window` positions of each query, int64 [N, window], −1 before position
        0."""

        def rows():
            positions = step.pos.unsqueeze(-1) + torch.arange(1 - window, 1, device=step.device)
            return torch.where(positions < 0, -1, self.index(step, positions)).flatten(0, 1)

        return step.memo(("window", window, *self.address(step)), rows)


class Ring(TokenRows):
    """A ring of rows [batch, R, width]; position p of row b sits in slot p mod R.

    `keep` rows before a step's first token are readable during the step, also after rewinding
    by up to `max_rewind`: R = keep + 1 + max_rewind. `flat` is the pool [batch · R, width]; packed rows are
    given as that, with R.
    """

    def __init__(self, buffer: torch.Tensor | PackedRows, keep: int, R: int = 0, write=write_rows):
        self.buffer, self.keep, self._write = buffer, keep, write
        packed = isinstance(buffer, PackedRows)
        self.flat, self.R = (buffer, R) if packed else (buffer.flatten(0, 1), buffer.shape[1])

    def extend(self, step: Step, values: torch.Tensor) -> torch.Tensor | PackedRows:
        """Write values [N, width] at the step's positions; return the pool that `index` addresses.

        The pool holds positions start − keep … start + T − 1 of each row. It is the ring itself
        while the step fits beside the kept rows; a longer step is staged in a workspace of
        keep + T rows, of which the ring keeps the last R.
        """
        if self._in_place(step):
            self.store(self.slots(step), values)
            return self.flat
        values = values if isinstance(self.flat, PackedRows) else values.to(self.flat.dtype)
        before = self._slots(
            step,
            ("before", self.keep),
            lambda: step.start.unsqueeze(1) + torch.arange(-self.keep, 0, device=step.device),
        )
        shape = step.B, -1, values.shape[-1]
        before, values = self.fetch(before, values.dtype).view(shape), values.view(shape)  # a window of 1 keeps none
        staged = torch.cat((before, values), 1).flatten(0, 1)
        last = min(step.T, self.R)
        self.store(self._slots(step, ("last", last), lambda: step.pos[:, -last:]), values[:, -last:].flatten(0, 1))
        return self._packed(staged) if isinstance(self.flat, PackedRows) else staged

    def _packed(self, values: torch.Tensor) -> PackedRows:
        """A pool of values [M, width]. All steps, short and long, read rows of one kind, so their sums run in one
        order."""
        pages = -(-len(values) // PAGE)
        pool = self.flat._replace(data=self.flat.data.new_empty(pages, self.flat.data.shape[1]), count=PAGE * pages)
        self._write(pool, torch.arange(len(values), device=values.device), values)
        return pool

    def index(self, step: Step, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the pool that hold `positions` int64 [B, ...]."""
        shape = (step.B,) + (1,) * (positions.dim() - 1)
        if self._in_place(step):
            return positions % self.R + (step.row * self.R).view(shape)
        first = torch.arange(step.B, device=step.device) * (self.keep + step.T) + self.keep
        return positions + (first - step.start).view(shape)

    def address(self, step: Step) -> tuple:
        """The inputs of `index` besides the positions: layers with equal addresses share indices."""
        return (self.R, self.keep, self._in_place(step))

    def _in_place(self, step: Step) -> bool:
        return step.T <= self.R - self.keep

    def slots(self, step: Step) -> torch.Tensor:
        """Rows of the pool for the step's own positions, int64 [N]."""
        return self._slots(step, "pos", lambda: step.pos)

    def _slots(self, step: Step, key, positions) -> torch.Tensor:
        return step.memo(("slots", self.R, key), lambda: (positions() % self.R + step.row * self.R).flatten())


class EntryRows:
    """Compressed entries, one every `ratio` tokens, in a pool `flat`; subclasses say which row holds which entry
    (`slots`)."""

    flat: torch.Tensor | PackedRows
    ratio: int

    def write(self, step: Step, values: torch.Tensor) -> None:
        """Write values [B·completed, width] at the step's new windows."""
        slots = self.slots(step)
        if isinstance(self.flat, PackedRows):
            self._write(self.flat, slots, values)
        else:
            self.flat.index_copy_(0, slots, values.to(self.flat.dtype))

    def all_visible(self, step: Step) -> torch.Tensor:
        """Every entry that each query sees, int64 [B, T, n], −1 for those it does not."""
        n = step.max_visible(self.ratio)

        def entries():
            entry = torch.arange(n, device=step.device).expand(step.B, step.T, n)
            return torch.where(entry < step.visible(self.ratio).unsqueeze(-1), entry, -1)

        return step.memo(("all entries", self.ratio), entries)


class Entries(EntryRows):
    """Compressed entries [batch, n, width], one every `ratio` tokens: n = ceil(max_context / ratio), or the next
    multiple of a page when they are packed."""

    def __init__(self, buffer: torch.Tensor | PackedRows, ratio: int, write=write_rows):
        self.buffer, self.ratio, self._write = buffer, ratio, write
        self.packed = isinstance(buffer, PackedRows)
        self.n = PAGE * buffer.data.shape[1] if self.packed else buffer.shape[1]
        self.flat = (
            buffer._replace(data=buffer.data.flatten(0, 1), count=buffer.data.shape[0] * self.n)
            if self.packed
            else buffer.flatten(0, 1)
        )

    def slots(self, step: Step) -> torch.Tensor:
        """Rows of the pool for the step's new windows, int64 [B·completed]."""
        return step.memo(
            ("entry_slots", self.ratio, self.n), lambda: (step.new_windows(self.ratio) + step.row * self.n).flatten()
        )

    def visible(self, step: Step) -> torch.Tensor | PackedRows:
        """View [B, n, width] of the entries that the step's last query may see."""
        if self.packed:
            return self.buffer._replace(data=self.buffer.data[step.rows], count=step.max_visible(self.ratio))
        return self.buffer[step.rows, : step.max_visible(self.ratio)]

    def held(self) -> torch.Tensor:
        """All entries [batch, n, width], in fp32 where they are packed."""
        return decode_rows(self.buffer) if self.packed else self.buffer

    def chosen(self, step: Step, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """entry int64 [B, T, K] (−1 absent) → a pool of rows and its rows int64 [B·T, K] (−1 absent)."""
        if step.first == 0 and step.B == 1:
            return self.flat, entry.flatten(0, 1)
        base = (step.row * self.n).unsqueeze(-1)
        return self.flat, torch.where(entry < 0, entry, entry + base).flatten(0, 1)

    def chosen_captured(self, entry: torch.Tensor, step: CapturedStep, op) -> tuple[torch.Tensor, torch.Tensor]:
        """`chosen` for a captured step, in one kernel if the backend has it."""
        return self.flat, op.chosen_rows(entry, self.n)
