"""Whole sequences instead of caches: the same modules, differentiable, for training.

In training all tokens of a row are known at once and start at position 0, so nothing is stored: a layer reads what it
writes. These classes replace `LayerCache` and its parts; the `training` operations take what they return (a `Band`
instead of window indices, a mask instead of entry indices).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

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


class SequenceWindow:
    """Window rows of a whole sequence."""

    def __init__(self, ratio: int):
        self.ratio = ratio

    def extend(self, step: Step, values: torch.Tensor) -> torch.Tensor:
        return values

    def last(self, step: Step, window: int) -> Band:
        return Band(step.B, step.T, window, self.ratio)


class SequenceEntries:
    """Compressed entries of a whole sequence, [B, ⌊T / ratio⌋, D] once written."""

    def __init__(self, ratio: int):
        self.ratio = ratio
        self.values: Any = None  # a tensor once written

    def write(self, step: Step, values: torch.Tensor) -> None:
        self.values = values.view(step.B, -1, values.shape[-1])

    def visible(self, step: Step) -> torch.Tensor:
        return self.values[:, : step.max_visible(self.ratio)]

    def chosen(self, step: Step, selection: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Entries [B, n, D] and a mask uint8 [B, T, n] of the selected ones; None stands for all that are visible.

        selection int64 [B, T, K], −1 absent.
        """
        if selection is None or selection.shape[-1] == 0:
            return self.values, None
        mask = torch.zeros(step.B, step.T, self.values.shape[1], dtype=torch.uint8, device=selection.device)
        # If something is absent every visible entry was chosen, so entry 0 is either chosen already or not visible.
        return self.values, mask.scatter_(2, selection.clamp(min=0), 1)

    def all_visible(self, step: Step) -> torch.Tensor:
        return torch.empty(step.B, step.T, 0, dtype=torch.int64, device=step.device)


class SequenceCompressor:
    """Pools the windows of a whole sequence."""

    def __init__(self, ratio: int, overlap: int):
        self.entries = SequenceEntries(ratio)
        self.ratio, self.overlap = ratio, overlap

    def pool(self, step: Step, raw: torch.Tensor, ape: torch.Tensor, op) -> torch.Tensor | None:
        """raw [N, 2·c·D] (kv ‖ gate), ape [ratio, c·D] → [B·n, D], as `CompressorCache.pool`."""
        r, c, n = self.ratio, self.overlap, step.T // self.ratio
        D = ape.shape[1] // c
        if n == 0:
            self.entries.values = raw.new_zeros(step.B, 0, D)
            return None
        raw = raw.view(step.B, step.T, 2, c * D)[:, : n * r].view(step.B, n, r, 2, c * D)
        kv, gate = raw[:, :, :, 0], raw[:, :, :, 1] + ape
        if c == 2:  # the window before, in its first columns; window 0 has none before it
            before = lambda x, fill: F.pad(x[:, :-1, :, :D], (0, 0, 0, 0, 1, 0), value=fill)
            kv = torch.cat((before(kv, 0.0), kv[..., D:]), 2)
            gate = torch.cat((before(gate, float("-inf")), gate[..., D:]), 2)
        return op.gated_pool(kv.flatten(0, 1), gate.flatten(0, 1))


class SequenceLayer:
    """One layer's view of a whole sequence; replaces `LayerCache`."""

    def __init__(self, spec: LayerSpec):
        self.window = SequenceWindow(spec.ratio)
        self.main = SequenceCompressor(spec.ratio, spec.overlap) if spec.compresses else None
        self.index = SequenceCompressor(spec.ratio, spec.overlap) if spec.selects else None


class Sequences:
    """Replaces `Cache`, for one forward over whole sequences."""

    def __init__(self, config: ModelConfig, mtp: bool):
        self.layers = [SequenceLayer(spec) for spec in config.layers]
        self.mtp_layers = [SequenceLayer(spec) for spec in (config.mtp_layers if mtp else ())]


def whole(model, ids: torch.Tensor) -> tuple[torch.Tensor, Step, Sequences]:
    """Streams [B·T, n, d] of ids int64 [B, T] from an empty context, differentiable.

    model: a Model bound to the `training` backend. Also the step and what its layers kept.
    """
    step = Step(ids, 0, [0] * ids.shape[0], model.rope_frequencies())
    sequences = Sequences(model.config, len(model.mtp) > 0)
    return model.run(step, sequences), step, sequences


def drafts(
    model, streams: torch.Tensor, next_ids: torch.Tensor, step: Step, sequences: Sequences, block: int = 0
) -> torch.Tensor:
    """Features [B·T, d] of MTP block `block` for the shared head: entry t drafts the token after next_ids[t]."""
    return model.mtp[block](
        streams, model.embed(next_ids.flatten()).to(streams.dtype), step, sequences.mtp_layers[block]
    )[0]
