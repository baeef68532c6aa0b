"""What one layer of a DeepSeek-V4 model remembers: its window, and the raw rows and entries of its compressors."""

from collections.abc import Sequence

import torch

from dsv4.cache.rows import Entries, Tokens
from dsv4.kernels.fusions.compositions import Windows
from dsv4.model.spec import LayerSpec
from dsv4.model.step import CapturedStep, Step


class CompressorCache:
    """Raw rows of one compressor (kv ‖ gate + ape, fp32) and the entries it has pooled, `overlap` windows each."""

    def __init__(self, raw: Tokens, entries: Entries, overlap: int):
        self.raw, self.entries, self.ratio, self.overlap = raw, entries, entries.ratio, overlap

    def completed(self, step: Step, raw: torch.Tensor, ape: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Store this step's raw rows, fp32 [N, 2·c·D] (kv ‖ gate), with the position bias ape [ratio, c·D] on their
        gates. Returns a pool and its rows of each window that the step completes, as `pool_windows` takes them, or
        None.

        With overlap (c = 2), entry w pools 2·ratio tokens: those of window w − 1 by their columns [:D] and those of
        window w by their columns [D:]. Window −1 does not exist: its tokens get no part.
        """
        raw[:, ape.shape[1] :].add_(ape.index_select(0, self._phase(step)))
        pool = self.raw.extend(step, raw)
        return (pool, self._rows(step)) if step.completed(self.ratio) else None

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
            ("rows of windows", self.ratio, self.overlap, *self.raw.rows.key(step)), lambda: self._window_rows(step)
        )

    def _window_rows(self, step: Step) -> torch.Tensor:
        """Row of the pool of each token of each new window, int64 [M, c·ratio]; −1 before position 0 and in incomplete
        windows."""
        offset = torch.arange(-(self.overlap - 1) * self.ratio, self.ratio, device=step.device)
        tokens = (step.new_windows(self.ratio) * self.ratio).unsqueeze(-1) + offset
        absent = (tokens < 0) | ~step.completes(self.ratio).view(*tokens.shape[:2], 1)
        return torch.where(absent, -1, self.raw.rows.index(step, tokens)).flatten(0, 1)


class LayerCache:
    """window: of every layer; main, index: None of layers without entries, without an indexer.

    tensors: the buffers of its streams on the device, by name; groups: of a paged cache, the group of pages of each.
    """

    def __init__(
        self,
        spec: LayerSpec,
        window: Tokens,
        main: CompressorCache | None,
        index: CompressorCache | None,
        tensors: dict[str, torch.Tensor] | None = None,
        groups: dict[str, str] | None = None,
    ):
        self.spec, self.window, self.main, self.index = spec, window, main, index
        self.tensors, self.groups = tensors or {}, groups or {}

    @property
    def far(self) -> list:
        """The rows in host memory."""
        return [c.entries.rows for c in (self.main, self.index) if c is not None and c.entries.rows.far]


def linked(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """The layers, each of which reads the entries of the layer that its spec names as their source."""
    by_label = {layer.spec.label: layer for layer in layers}
    for layer in layers:
        source = layer.spec.entries_of
        if source is not None and not layer.spec.compresses:
            layer.main = by_label[source].main
    return list(layers)
