"""Dense attention over caches in host memory: a whole layer at a time through two buffers on the device."""

from collections.abc import Sequence

import torch

from dsv4.host_tier.grouped import HostRows


class DenseStream:
    """Layers come over the link in turn, by the copy engine: layer i + 1 while layer i is attended to. Two buffers of one layer's
    keys and values. All copies are of fixed size, so that a step can be captured."""

    def __init__(self, layers: Sequence[HostRows]):
        self.layers, first = layers, layers[0]
        self.cuda = first.keys.is_cuda
        make = lambda: torch.empty(first.shape, dtype=first.keys.dtype, device=first.keys.device)
        self.held = [(make(), make()) for _ in range(min(2, len(layers)))]
        self.side = torch.cuda.Stream(first.keys.device) if self.cuda else None
        self.ready: list = [None] * len(layers)

    @property
    def nbytes(self) -> int:
        """Bytes that one step brings."""
        return sum(layer.host_bytes for layer in self.layers)

    def begin(self) -> None:
        """Start on layer 0: at the head of a step, before its first layer has anything to attend with."""
        self._bring(0)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, KV, S, D] of layer i, which is there for the current stream. Layers are asked for in turn; the work
        on layer i − 1 has been issued, whose buffer is given away here."""
        if i + 1 < len(self.layers):
            self._bring(i + 1)
        if self.cuda:
            torch.cuda.current_stream().wait_event(self.ready[i])
        return self.held[i % 2]

    def _bring(self, i: int) -> None:
        pairs = zip(self.held[i % 2], self.layers[i].buffers)
        if not self.cuda:
            for here, there in pairs:
                here.copy_(there.host)
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for here, there in pairs:
                here.copy_(there.host, non_blocking=True)
            self.ready[i] = torch.cuda.Event()
            self.ready[i].record(self.side)
