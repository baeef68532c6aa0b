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
            ("slots of windows", self.ratio, self.overlap, *self.raw.rows.key(step)), lambda: self._window_slots(step)
        )
        D = width // self.overlap
        both = rows_of.view(-1, D).index_select(0, rows).view(2, M, self.overlap * self.ratio, D)
        kv, gate = both[0], both[1]  # `unbind` would give views that autograd lets nobody fill
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
            ("rows of windows", self.ratio, self.overlap, *self.raw.rows.key(step)), lambda: self._window_rows(step)
        )

    def _window_rows(self, step: Step) -> torch.Tensor:
        """Row of the pool of each token of each new window, int64 [M, c·ratio]; −1 before position 0 and in incomplete
        windows."""
        offset = torch.arange(-(self.overlap - 1) * self.ratio, self.ratio, device=step.device)
        tokens = (step.new_windows(self.ratio) * self.ratio).unsqueeze(-1) + offset
        absent = (tokens < 0) | ~step.completes(self.ratio).view(*tokens.shape[:2], 1)
        return torch.where(absent, -1, self.raw.rows.index(step, tokens)).flatten(0, 1)

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
        kv = torch.where(absent, 0, self.raw.rows.index(step, tokens)) * (2 * c) + half
        return torch.stack((kv, kv + c)).flatten(), absent.flatten(0, 1).unsqueeze(-1)


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
