"""Position-addressed caches, allocated once.

What a slot holds is a function of the tokens up to that position, and the only state beside
the buffers is each row's length. So prefill in chunks of any size, token-by-token decode and
rewinding are the same code: a rewind sets the length back and copies nothing.

Which streams there are and how each is addressed is the `Layout` of the model's family (`dsv4.cache.layout`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from dsv4.cache.layout import Layout
from dsv4.cache.streams import CHAINED
from dsv4.errors import CapacityError, InputError, RewindError
from dsv4.kernels.fusions.compositions import Kept
from dsv4.model.arguments import check_sizes, rewind_counts
from dsv4.model.numerics import Numerics
from dsv4.model.step import CapturedStep, Step

DEFAULT_MAX_REWIND = 128


class Form(NamedTuple):
    """What a cache must have in common with the model that writes it: the config (which names the family), number
    formats, whether there is a part for the MTP block, the device of each layer, or the common device, and which heads
    it holds, where ranks share them."""

    config: object
    formats: tuple
    mtp: bool
    devices: tuple[torch.device, ...]
    heads: object


def form(config, numerics: Numerics, mtp: bool, devices, heads) -> Form:
    """devices: of each layer. heads: as in `Layout`."""
    formats = (str(numerics.activation), str(numerics.cache), numerics.kv_rows, numerics.index_rows)
    devices = tuple(dict.fromkeys(devices)) if len(set(devices)) == 1 else tuple(devices)
    return Form(config, formats, mtp, devices, heads)


class Traffic(NamedTuple):
    """Counts of fetches from host memory: blocks (or entries) found staged, blocks copied, and the bytes copied."""

    hits: int
    misses: int
    nbytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class Lengths:
    """Tokens held by each row (`now`), and how far each row may still be rewound: to `max_rewind` before the furthest
    position ever written (`high`), but not below the tokens that it got at once (`low`).

    A captured step writes all its tokens to every row, also to rows at rest. There they lie beyond the row's length,
    and in a ring they overwrite the oldest, so they count for `high`.
    """

    def __init__(self, batch: int, max_rewind: int):
        self.now, self.high, self.low = [0] * batch, [0] * batch, [0] * batch
        self.max_rewind = max_rewind

    def advance(self, rows: slice, tokens: int) -> None:
        for b in range(rows.start, rows.stop):
            self.now[b] += tokens
            self.high[b] = max(self.high[b], self.now[b])

    def wrote(self, b: int, end: int) -> None:
        """Positions of row b before `end` have been written, whether the row holds them or not."""
        self.high[b] = max(self.high[b], end)

    def check(self, counts: list[int]) -> None:
        """Raises RewindError unless row b can forget its last counts[b] tokens, for every row."""
        for b, n in enumerate(counts):
            left = self.now[b] - n
            if n < 0 or left < 0:
                raise RewindError(f"row {b} holds {self.now[b]} tokens; cannot rewind it by {n}")
            if left and left < self.high[b] - self.max_rewind:
                raise RewindError(
                    f"row {b} was filled to {self.high[b]} tokens and keeps {self.max_rewind} to rewind; it cannot go "
                    f"back to {left}; build the cache with max_rewind >= {self.high[b] - left}, or rewind to 0"
                )
            if left and left < self.low[b]:
                raise RewindError(
                    f"row {b} was grafted at {self.low[b]} tokens and cannot go back to {left}; rewind to 0 and "
                    "append the tokens again"
                )

    def set_back(self, counts: list[int]) -> None:
        """Forget the last counts[b] tokens of row b. Raises as `check`, and then changes nothing."""
        self.check(counts)
        for b, n in enumerate(counts):
            self.now[b] -= n
            if self.now[b] == 0:
                self.high[b] = self.low[b] = 0  # an empty row reads nothing that was written before


class Cache:
    """Caches of all layers for `batch` rows of up to `max_context` tokens, as `layout` says.

    `lengths` are the tokens each row holds. The MTP block's own window follows the main model
    at its own length (`mtp_lengths`): its entry at position t needs the token at t + 1.
    devices: of each layer. shared: buffers on the device that layers use in turn.
    """

    shared: tuple[torch.Tensor, ...] = ()
    piece: int | None = None  # tokens that a row has room for in one step, if that is less than the model's chunk

    def __init__(self, layout: Layout, batch: int, max_context: int, max_rewind: int, devices: Sequence[torch.device]):
        self._settle(layout, batch, max_context, max_rewind, devices)
        self.plan = layout.plan(self.batch, self.max_context, self.max_rewind)
        with self._room():
            layers, self.shared = layout.allocate(self.plan, devices)
        self.layers, self.mtp_layers = layers[: layout.backbone], layers[layout.backbone :]

    def _settle(self, layout: Layout, batch: int, max_context: int, max_rewind: int, devices) -> None:
        """What every cache is made of beside its buffers. Raises InputError."""
        batch, max_context, max_rewind = check_sizes(batch=batch, max_context=max_context, max_rewind=max_rewind)
        if max_context > layout.positions:
            raise InputError(
                f"max_context {max_context} exceeds the checkpoint's max_position_embeddings {layout.positions}; ask "
                "for at most that"
            )
        self.layout, self.batch, self.max_context, self.max_rewind = layout, batch, max_context, max_rewind
        self.made_for = form(layout.config, layout.numerics, layout.mtp, devices, layout.heads)
        self._main, self._mtp = Lengths(batch, max_rewind), Lengths(batch, max_rewind + CHAINED)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Raises CapacityError where the body runs out of memory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            wanted = sum(s.nbytes for p in self.plan for s in p.streams if s.place != "pinned")
            raise CapacityError(
                f"the cache needs {wanted} bytes for batch {self.batch} and max_context {self.max_context}, and they "
                f"could not be allocated ({str(error).splitlines()[0]}); lower one of them"
            ) from error

    def place(self, step: CapturedStep, op) -> None:
        """Compute once what layers need from the step's positions, if the backend has a kernel for that."""
        if "place" not in op.fused:
            return
        window, kept = self.layers[0].window.rows, {}
        for layer in self.layers:
            if layer.main is not None:
                pools = dict.fromkeys(c.entries.rows.n for c in (layer.main, layer.index) if c is not None)
                ring = layer.main.raw.rows.R
                kept[layer.main.ratio] = Kept(layer.main.ratio, layer.main.overlap, ring, tuple(pools))
        step.place(op.place, (window.keep + 1, window.R), tuple(kept.values()))

    def guess(self, layers, i: int, step: Step) -> Callable[[torch.Tensor], None] | None:
        """Work to run in parallel with the rest of layer i, given the stream after its attention: a fetch for the next
        layer, if its rows are elsewhere. layers: the model's. None: nothing."""
        return None

    def make_room(self, rows: slice, tokens: int, mtp: bool = False) -> None:
        """Called before `tokens` tokens are written to each of `rows`. Here all room was allocated at once; a
        PagedCache takes pages."""

    def fits(self, rows: Iterable[int], tokens: int, mtp: bool = False) -> bool:
        """Whether `make_room` would succeed."""
        return True

    def speculate(self, b: int, final: int = 0) -> None:
        """Tokens appended to row b after the next `final` ones are drafts, until `commit`."""

    def commit(self, b: int) -> None:
        """Accept every token that row b holds; rewind the others first."""

    def pressed(self, start: torch.Tensor, more: torch.Tensor | int, done: torch.Tensor) -> torch.Tensor | None:
        """`under_pressure` when rows hold start + more tokens, int64 [B], and some are done, bool [B]: a bool scalar on
        the device; None where it never is, as on rings, which have no pages."""
        return None

    @property
    def under_pressure(self) -> bool:
        """Whether room is so short that rows should draft less."""
        return False

    @property
    def lengths(self) -> list[int]:
        return list(self._main.now)

    @property
    def mtp_lengths(self) -> list[int]:
        return list(self._mtp.now)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated on the device, summed over the buffers."""
        of_layers = (t for layer in self.layers + self.mtp_layers for t in layer.tensors.values())
        return sum(t.untyped_storage().nbytes() for t in (*of_layers, *self.shared))

    @property
    def widths(self) -> tuple[int, ...]:
        """Sizes of what a captured step reads, where a prompt decides them."""
        return ()

    @property
    def far(self) -> list:
        """The rows that are in host memory, over all layers."""
        return [rows for layer in self.layers for rows in layer.far]

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(rows.host_bytes for rows in self.far)

    def traffic(self, guessed: bool = False) -> Traffic:
        """Counts of the fetches of choices (or of guesses) from host memory so far, over all layers. Waits for the
        device."""
        counts = [rows.traffic(guessed) for rows in self.far]
        return Traffic(*map(sum, zip(*counts))) if counts else Traffic(0, 0, 0)

    def rewind(self, n: int | list[int]) -> None:
        """Forget the last n tokens of every row (or n[b] of row b). Copies nothing.

        MTP entries that consumed a forgotten token go too. A row may go back by `max_rewind` tokens from the furthest
        that was written to it, also after up to 8 chained drafts of its MTP block. Raises RewindError, and then
        changes nothing.
        """
        counts = rewind_counts(n, self.batch)
        after = [now - c for now, c in zip(self._main.now, counts)]
        mtp = [max(0, m - max(0, left - 1)) if c else 0 for m, left, c in zip(self._mtp.now, after, counts)]
        self._main.check(counts)
        self._mtp.check(mtp)
        self._main.set_back(counts)
        self._mtp.set_back(mtp)

    def rewind_mtp(self, n: int | list[int]) -> None:
        """Forget the last n MTP entries only, of every row or n[b] of row b (drafts that were not accepted). Raises
        RewindError, and then changes nothing."""
        self._mtp.set_back(rewind_counts(n, self.batch))

    def reset(self) -> None:
        """Forget everything."""
        self._mtp.set_back(self.mtp_lengths)
        self._main.set_back(self.lengths)
