"""This project's model on the `training` backend: whole sequences, no cache, differentiable. See
`dsv4.cache.sequence`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dsv4.cache.layer import LayerCache
from dsv4.cache.rows import Tokens
from dsv4.cache.sequence import layer_of, sequences
from dsv4.errors import InputError
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.kernels.quantize import WeightFormat
from dsv4.model.step import Step
from dsv4.probes.subject import Capture
from dsv4.probes.subjects.dump import Timeline, check_points
from dsv4.probes.subjects.ours import OurSubject, _lengths, _Taps

NO_CACHE = "the training backend runs whole sequences and keeps no cache"


class TrainingSubject(OurSubject):
    """`OurSubject` on the training backend: every run is one step over whole rows of equal lengths.

    Raises InputError for quantised weights, which that backend does not take, and for cache formats.
    """

    can = frozenset({"files", "run", "block", "training"})
    without = dict.fromkeys(("layer", "rewind", "batch", "cache", "pages", "drafts", "schedules"), NO_CACHE) | {
        "kernels": "the training backend's operations take whole sequences; the probe `training` has their cases"
    }

    def __init__(self, path: str | Path, numerics="fp32", backend="training", device="cpu", cache="auto", index="auto"):
        if (cache, index) != ("auto", "auto"):
            raise InputError(f"--cache and --index-cache would change nothing: {NO_CACHE}; leave them out")
        super().__init__(path, numerics, backend, device)
        packed = {form.value for form in self.files.formats.values() if form is not WeightFormat.DENSE}
        if packed and numerics != "fp32":
            raise InputError(
                f"the training backend takes dense weights, and the checkpoint holds {', '.join(sorted(packed))}; pass "
                "--numerics fp32, which makes them dense, or convert it to bf16"
            )

    @property
    def training_operations(self) -> dict[str, Callable]:
        """Name → implementation on this backend, of every operation that has one of its own; of GQA models too."""
        every = OPERATIONS | GQA_OPERATIONS
        return {name: op.implementations["training"] for name, op in every.items() if "training" in op.implementations}

    @torch.no_grad()
    def _run(self, ids: torch.Tensor, steps: list, want: frozenset[str], see: Callable | None = None) -> Capture:
        model, (B, T) = self.model, ids.shape
        self._refuse(ids, steps)
        kept, timeline = sequences(self.config, mtp=False), Timeline(B, T)
        with _SequenceTaps(timeline, want) as taps:
            for i, block in enumerate(model.layers):
                taps.block(i, block)
                taps.attention(i, block.attn, kept.layers[i])
                if see is not None:
                    taps.done(block, lambda i=i: _hand_over(see, timeline, i, kept.layers[i], want))
            step = Step(ids.to(model.device), 0, [0] * B, model.rope_frequencies())
            logits = model.head(model.features(model.run(step, kept)))
        for i, layer in enumerate(kept.layers if see is None else ()):
            put_entries(timeline, i, layer, want)
        return timeline.capture(logits.view(B, T, -1).float().cpu())

    @torch.no_grad()
    def block(self, layer: int, streams: torch.Tensor, ids: torch.Tensor, want: Sequence[str] = ()) -> Capture:
        """See `Subject.block`: the layer's module on a whole sequence."""
        want, model, block = check_points(want), self.model, self.model.layers[layer]
        self._refuse(ids, [()])
        held = layer_of(self.config, self.config.layers[layer])
        timeline = Timeline(*ids.shape)
        with _SequenceTaps(timeline, want) as taps:
            taps.block(layer, block)
            taps.attention(layer, block.attn, held)
            step = Step(ids.to(model.device), 0, [0] * len(ids), model.rope_frequencies())
            block(streams.to(model.device, model.numerics.activation).flatten(0, 1), step, held)
        put_entries(timeline, layer, held, want)
        return timeline.capture()

    def attention(self, *args, **kwargs) -> Capture:
        raise InputError(f"one layer's attention in steps cannot be asked for: {NO_CACHE}")

    def _refuse(self, ids: torch.Tensor, steps: list) -> None:
        if len(steps) != 1 or min(_lengths(ids)) < ids.shape[1]:
            raise InputError(f"rows of one length in one step are all there is here: {NO_CACHE}")


class _SequenceTaps(_Taps):
    """Where a window is what the layer has just made."""

    def _window(self, i: int, window: Tokens, step: Step, values: torch.Tensor) -> None:
        self._flat(i, "kv_window", values, step)


def put_entries(timeline: Timeline, i: int, layer: LayerCache, want: frozenset[str]) -> None:
    """compressed_kv and index_keys of the whole sequence."""
    for point, compressor in (("compressed_kv", layer.main), ("index_keys", layer.index)):
        if compressor is not None and point in want:
            timeline.whole(i, point, compressor.entries.rows.buffer.float().cpu())


def _hand_over(see: Callable, timeline: Timeline, i: int, layer: LayerCache, want: frozenset[str]) -> None:
    put_entries(timeline, i, layer, want)
    see(i, timeline.take(i))
