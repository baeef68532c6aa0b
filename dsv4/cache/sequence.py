"""Whole sequences instead of caches: the same modules, differentiable, for training.

In training all tokens of a row are known at once and start at position 0, so nothing is stored: a layer reads what it
writes. The `training` operations take what this form of addressing gives: a `Band` instead of window indices, a mask
instead of entry indices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.cache.layer import CompressorCache, LayerCache, linked
from dsv4.cache.rows import Entries, Rows, Tokens, by_row
from dsv4.model.config import ModelConfig
from dsv4.model.spec import LayerSpec
from dsv4.model.step import Step


@dataclass(frozen=True)
class Band:
    """Each query's window in rows of kv [B·T, D]: the last `window` tokens of its own sequence up to itself."""

    B: int
    T: int
    window: int
    ratio: int = 0  # of the entries that go with it, 0 for none


class Whole(Rows):
    """Number i of batch row b is row b · n + i of what the step itself writes: n values of `width` a row.

    ratio: tokens of one of the layer's entries, 0 without entries.
    """

    def __init__(self, ratio: int, width: int):
        super().__init__(None, None, ("whole",))
        self.ratio, self.width = ratio, width

    def place(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        return numbers + by_row(step, numbers, step.T)

    def extend(self, step: Step, slots: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        self.buffer = values.view(step.B, -1, values.shape[-1])
        self.flat = values
        return values

    def view(self, step: Step, n: int | None) -> torch.Tensor:
        """None: all."""
        if self.buffer is None:  # the sequence is shorter than an entry
            return torch.empty(step.B, 0, self.width, device=step.device)
        return self.buffer[:, :n]

    def chosen(self, step: Step, numbers: torch.Tensor, op) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All [B, n, D] and a mask uint8 [B, T, n] of the selected ones; None stands for all that are visible."""
        if numbers.shape[-1] == 0:
            return self.view(step, None), None
        mask = torch.zeros(step.B, step.T, self.buffer.shape[1], dtype=torch.uint8, device=numbers.device)
        # If something is absent every visible entry was chosen, so entry 0 is either chosen already or not visible.
        return self.buffer, mask.scatter_(2, numbers.clamp(min=0), 1)


class WholeTokens(Tokens):
    """Tokens of a whole sequence, whose windows need no indices."""

    rows: Whole

    def last(self, step: Step, window: int) -> Band:
        return Band(step.B, step.T, window, self.rows.ratio)


class WholeEntries(Entries):
    """Entries of a whole sequence, all of which need no indices."""

    def all_visible(self, step: Step) -> torch.Tensor:
        """None by number: `chosen` then gives all."""
        return torch.empty(step.B, step.T, 0, dtype=torch.int64, device=step.device)


def compressor_of(spec: LayerSpec, width: int) -> CompressorCache:
    """Of whole sequences: what a compressor whose entries are `width` wide writes and pools."""
    raw = WholeTokens(Whole(spec.ratio, 2 * spec.overlap * width))
    return CompressorCache(raw, WholeEntries(Whole(spec.ratio, width), spec.ratio), spec.overlap)


def layer_of(config: ModelConfig, spec: LayerSpec) -> LayerCache:
    """In the place of one layer's cache."""
    return LayerCache(
        spec,
        WholeTokens(Whole(spec.ratio, config.head_dim)),
        compressor_of(spec, config.head_dim) if spec.compresses else None,
        compressor_of(spec, config.index_head_dim) if spec.selects else None,
    )


class Sequences(NamedTuple):
    """In the place of `Cache`, for one forward over whole sequences."""

    layers: list[LayerCache]
    mtp_layers: list[LayerCache]


def sequences(config: ModelConfig, mtp: bool) -> Sequences:
    of = lambda specs: linked([layer_of(config, spec) for spec in specs])
    return Sequences(of(config.layers), of(config.mtp_layers if mtp else ()))


def whole(model, ids: torch.Tensor) -> tuple[torch.Tensor, Step, Sequences]:
    """Streams [B·T, n, d] of ids int64 [B, T] from an empty context, differentiable.

    model: a Model bound to the `training` backend. Also the step and what its layers kept.
    """
    step = Step(ids, 0, [0] * ids.shape[0], model.rope_frequencies())
    kept = sequences(model.config, len(model.mtp) > 0)
    return model.run(step, kept), step, kept


def drafts(
    model, streams: torch.Tensor, next_ids: torch.Tensor, step: Step, kept: Sequences, block: int = 0
) -> torch.Tensor:
    """Features [B·T, d] of MTP block `block` for the shared head: entry t drafts the token after next_ids[t]."""
    return model.mtp[block](streams, model.embed(next_ids.flatten()).to(streams.dtype), step, kept.mtp_layers[block])[0]
