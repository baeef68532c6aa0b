"""Whole layers of caches in host memory, copied in turn through two buffers on the device, for steps that read every
token."""

from collections.abc import Sequence

import torch

from dsv4.cache.host_tier.grouped import HostRows
from dsv4.errors import CapacityError

WHOLE = slice(None)


class DenseStream:
    """The copy engine copies layers over the link in turn: layer i + 1 while layer i attends. There are two buffers of
    one layer's keys and values, made at once. Copies of whole layers have a fixed size, so a step can be captured.
    Raises CapacityError."""

    def __init__(self, layers: Sequence[HostRows]):
        self.layers, self.first = layers, layers[0]
        self.cuda = self.first.home.type == "cuda"
        self.held = self._made(min(2, len(layers)))
        self.side = torch.cuda.Stream(self.first.home) if self.cuda else None
        self.ready: list = [None] * len(layers)

    @property
    def nbytes(self) -> int:
        """Bytes that one step copies if it copies all."""
        return sum(layer.host_bytes for layer in self.layers)

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.nbytes for pair in self.held for t in pair)

    def layer(self, i: int, rows: slice = WHOLE, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, KV, S, D] of layer i, ready for the current stream: of `rows` the first `tokens` (None:
        all); the rest of the buffer holds anything. Layers must be requested in order, with equal arguments in one
        step. The work on layer i − 1 must have been issued, because its buffer is reused here."""
        if i == 0:
            self._bring(0, rows, tokens)
        if i + 1 < len(self.layers):
            self._bring(i + 1, rows, tokens)
        if self.cuda:
            torch.cuda.current_stream().wait_event(self.ready[i])
        return tuple(t[rows] for t in self.held[i % 2])

    def _made(self, count: int) -> list[tuple[torch.Tensor, ...]]:
        first = self.first
        try:
            return [
                tuple(torch.empty(first.shape, dtype=first.dtype, device=first.home) for _ in range(2))
                for _ in range(count)
            ]
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"to read a cache in host memory whole, {count * first.host_bytes} bytes on {first.home} were needed "
                f"for {count} layers of it, and they could not be had ({str(error).splitlines()[0]}); lower the "
                "context or the batch"
            ) from error

    def _bring(self, i: int, rows: slice, tokens: int | None) -> None:
        if not self.cuda:
            self._copy(i, rows, tokens, False)
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._copy(i, rows, tokens, True)
            self.ready[i] = torch.cuda.Event()
            self.ready[i].record(self.side)

    def _copy(self, i: int, rows: slice, tokens: int | None, piecewise: bool) -> None:
        """piecewise: copy each contiguous range by itself, as a copy engine takes it."""
        for here, there in zip(self.held[i % 2], self.layers[i].buffers):
            here, there = here[rows], there.host[rows]
            if tokens is None or tokens >= here.shape[2]:
                here.copy_(there, non_blocking=True)
            elif not piecewise:
                here[:, :, :tokens].copy_(there[:, :, :tokens])
            elif tokens:
                for to, source in zip(here.flatten(0, 1), there.flatten(0, 1)):
                    to[:tokens].copy_(source[:tokens], non_blocking=True)
