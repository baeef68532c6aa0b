"""Position-addressed caches, allocated once.

What a slot holds is a function of the tokens up to that position, and the only state beside
the buffers is each row's length. So prefill in chunks of any size, token-by-token decode and
rewinding are the same code: a rewind sets the length back and copies nothing.

- Raw rows that are needed for a bounded time (window KV, compressor inputs) sit in rings.
- Compressed entries and index keys sit in linear buffers of ceil(max_context / ratio).
"""

from typing import NamedTuple

import torch

from dsv4.cache.rows import Entries, Ring
from dsv4.cache.streams import CHAINED, LayerStreams, cache_streams, zeros
from dsv4.errors import CapacityError, InputError, RewindError
from dsv4.kernels.cache_rows import PAGE, PackedRows, write_rows
from dsv4.kernels.fusions.compositions import Kept, Windows
from dsv4.model.arguments import check_sizes, rewind_counts
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.step import CapturedStep, Step

DEFAULT_MAX_REWIND = 128


class Form(NamedTuple):
    """What a cache must have in common with the model that writes it: the config (which names the family), number
    formats, whether there is a part for the MTP block, and the device of each layer, or the common device."""

    config: object
    formats: tuple
    mtp: bool
    devices: tuple[torch.device, ...]


def form(config, numerics: Numerics, mtp: bool, devices) -> Form:
    """devices: of each layer."""
    formats = (str(numerics.activation), str(numerics.cache), numerics.kv_rows, numerics.index_rows)
    return Form(config, formats, mtp, tuple(dict.fromkeys(devices)) if len(set(devices)) == 1 else tuple(devices))


class CompressorCache:
    """Raw rows of one compressor (kv ‖ gate + ape, fp32) and the entries it has pooled."""

    def __init__(
        self,
        raw: torch.Tensor,
        entries: torch.Tensor | PackedRows | Entries,
        ratio: int,
        overlap: int,
        write=write_rows,
    ):
        self.raw = Ring(raw, overlap * ratio - 1)
        self.entries = entries if isinstance(entries, Entries) else Entries(entries, ratio, write)
        self.ratio, self.overlap = ratio, overlap

    def pool(self, step: Step, raw: torch.Tensor, ape: torch.Tensor, op) -> torch.Tensor | None:
        """Store this step's raw rows; return fp32 [B·completed, D] of the windows it completes, or None.

        raw fp32 [N, 2·c·D] (kv ‖ gate), ape [ratio, c·D]. With overlap (c = 2), entry w pools 2·ratio slots: the tokens
        of window w − 1 by their columns [:D] and those of window w by their columns [D:]. Window −1 does not exist: its
        slots get no part.
        """
        width, rows_of = raw.shape[1] // 2, self._store(step, raw, ape)
        M = step.B * step.completed(self.ratio)
        if M == 0:
            return None
        rows, absent = step.memo(
            ("slots of windows", self.ratio, self.overlap, *self.raw.address(step)), lambda: self._window_slots(step)
        )
        D = width // self.overlap
        kv, gate = rows_of.view(-1, D).index_select(0, rows).view(2, M, self.overlap * self.ratio, D).unbind()
        kv = kv.masked_fill_(absent, 0)  # a slot that was never written may hold anything, and 0 · NaN is NaN
        return op.gated_pool(kv, gate.masked_fill_(absent, float("-inf")))

    def completed(self, step: Step, raw: torch.Tensor, ape: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Store this step's raw rows; return a pool and its rows of each window that the step completes, as
        `pool_entries` takes them, or None."""
        pool = self._store(step, raw, ape)
        return (pool, self._rows(step)) if step.completed(self.ratio) else None

    def _store(self, step: Step, raw: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
        """The step's rows, with the position bias on their gates, into the ring: the pool that the ring's `index`
        addresses."""
        raw[:, ape.shape[1] :].add_(ape.index_select(0, self._phase(step)))
        return self.raw.extend(step, raw)

    def windows(
        self,
        step: CapturedStep,
        raw: torch.Tensor,
        ape: torch.Tensor,
        weight: torch.Tensor,
        base: str,
        simulate: str | None,
    ) -> Windows:
        """Store and pool the rows of a captured step, as a part of the composition `attention_inputs`.

        weight: of the norm of entries.

        Every window that the step may complete has a slot. Incomplete windows lie beyond what any query sees.
        """
        return Windows(
            raw,
            ape,
            self._phase(step),
            self.raw.flat,
            self.raw.slots(step),
            self._rows(step),
            step.completes(self.ratio),
            self.overlap,
            weight,
            step.window_cis(self.ratio, base),
            simulate,
            self.entries.flat,
            self.entries.slots(step),
        )

    def _phase(self, step: Step) -> torch.Tensor:
        """Place of each token in its window, int64 [N]."""
        return step.memo(("phase", self.ratio), lambda: (step.pos % self.ratio).flatten())

    def _rows(self, step: Step) -> torch.Tensor:
        return step.memo(
            ("rows of windows", self.ratio, self.overlap, *self.raw.address(step)), lambda: self._window_rows(step)
        )

    def _window_rows(self, step: Step) -> torch.Tensor:
        """Row of the pool of each token of each new window, int64 [M, c·ratio]; −1 before position 0 and in incomplete
        windows."""
        offset = torch.arange(-(self.overlap - 1) * self.ratio, self.ratio, device=step.device)
        tokens = (step.new_windows(self.ratio) * self.ratio).unsqueeze(-1) + offset
        absent = (tokens < 0) | ~step.completes(self.ratio).view(*tokens.shape[:2], 1)
        return torch.where(absent, -1, self.raw.index(step, tokens)).flatten(0, 1)

    def _window_slots(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the slots of each new window are, and which hold no token yet.

        A row of the ring is c pieces of kv, then c of gate, D wide each. Returns pieces int64 [2·M·c·ratio], all of kv
        before all of gate, and bool [M, c·ratio, 1].
        """
        ratio, c = self.ratio, self.overlap
        offset = torch.arange(-(c - 1) * ratio, ratio, device=step.device)
        tokens = (step.new_windows(ratio) * ratio).unsqueeze(-1) + offset  # [B, windows, c·ratio]
        end = (step.start + step.T).view(-1, 1, 1)
        absent = (tokens < 0) | (tokens >= end)
        half = (offset >= 0).long() if c == 2 else torch.zeros_like(offset)
        kv = torch.where(absent, 0, self.raw.index(step, tokens)) * (2 * c) + half
        return torch.stack((kv, kv + c)).flatten(), absent.flatten(0, 1).unsqueeze(-1)


class LayerCache:
    """Buffers of one layer. `main` is None of layers without entries, `index` of those without an indexer.
    entries(stream, ratio): makes the `Entries` of a main compressor whose stream the plan has in host memory
    (dsv4.cache.host_tier)."""

    def __init__(self, plan: LayerStreams, sliding_window: int, device: torch.device, write=write_rows, entries=None):
        away = {s.name: entries(s, plan.ratio) for s in plan.streams if s.place == "pinned"}
        tensors = {s.name: zeros(s, device) for s in plan.streams if s.place == "cache"}
        self.tensors = tensors | {name: t for kept in away.values() for name, t in kept.tensors.items()}
        held = away | {
            s.name: tensors[s.name]
            if s.rows is None
            else PackedRows(s.rows[0], tensors[s.name], s.rows[1], s.rows[2], PAGE * s.shape[-2])
            for s in plan.streams
            if s.name in tensors
        }
        self.window = Ring(held["window"], sliding_window - 1, plan.window_rows, write)
        self.main = self.index = None
        made = lambda raw, entries: CompressorCache(held[raw], held[entries], plan.ratio, plan.spec.overlap, write)
        if plan.spec.compresses:
            self.main = made("main raw rows", "entries")
        if plan.spec.selects:
            self.index = made("index raw rows", "index keys")


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
    """Caches of all layers for `batch` rows of up to `max_context` tokens.

    `lengths` are the tokens each row holds. The MTP block's own window follows the main model
    at its own length (`mtp_lengths`): its entry at position t needs the token at t + 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        batch: int,
        max_context: int,
        max_rewind: int,
        devices: list[torch.device],
        mtp: bool,
        write=write_rows,
    ):
        batch, max_context, max_rewind = check_sizes(batch=batch, max_context=max_context, max_rewind=max_rewind)
        if max_context > config.max_position_embeddings:
            raise InputError(
                f"max_context {max_context} exceeds the checkpoint's max_position_embeddings "
                f"{config.max_position_embeddings}; ask for at most that"
            )
        self.batch, self.max_context, self.max_rewind = batch, max_context, max_rewind
        self.made_for = form(config, numerics, mtp, devices)
        self.plan = self._planned(cache_streams(config, batch, max_context, max_rewind, numerics, mtp))
        try:
            layers = [
                LayerCache(p, config.sliding_window, d, write, self._entries)
                for p, d in zip(self.plan, devices, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            wanted = sum(s.nbytes for p in self.plan for s in p.streams if s.place != "pinned")
            raise CapacityError(
                f"the cache needs {wanted} bytes for batch {batch} and max_context {max_context}, and they "
                f"could not be allocated ({str(error).splitlines()[0]}); lower one of them"
            ) from error
        n = config.num_hidden_layers
        self.layers, self.mtp_layers = layers[:n], layers[n:]
        self._main, self._mtp = Lengths(batch, max_rewind), Lengths(batch, max_rewind + CHAINED)

    _entries = None  # see LayerCache

    def _planned(self, streams: list[LayerStreams]) -> list[LayerStreams]:
        """The device of each stream."""
        return streams

    def place(self, step: CapturedStep, op) -> None:
        """Compute once what layers need from the step's positions, if the backend has a kernel for that."""
        if "place" not in op.fused:
            return
        window, kept = self.layers[0].window, {}
        for layer in self.layers:
            if layer.main is not None:
                pools = dict.fromkeys(c.entries.n for c in (layer.main, layer.index) if c is not None)
                kept[layer.main.ratio] = Kept(layer.main.ratio, layer.main.overlap, layer.main.raw.R, tuple(pools))
        step.place(op.place, (window.keep + 1, window.R), tuple(kept.values()))

    def make_room(self, rows: slice, tokens: int, mtp: bool = False) -> None:
        """Called before `tokens` tokens are written to each of `rows`. Here all room was allocated at once; a
        PagedCache takes pages."""

    @property
    def lengths(self) -> list[int]:
        return list(self._main.now)

    @property
    def mtp_lengths(self) -> list[int]:
        return list(self._mtp.now)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, summed over the buffers."""
        return sum(
            t.untyped_storage().nbytes() for layer in self.layers + self.mtp_layers for t in layer.tensors.values()
        )

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
