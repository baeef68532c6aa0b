"""What is as long as the vocabulary, and cut by it between ranks: the token embedding and the output head."""

import torch
import torch.nn.functional as F
from torch import nn

from dsv4.cache.host_tier.memory import HostBuffer, PinnedMemoryError
from dsv4.model.cut_values import CutValues, Logits
from dsv4.model.linear import Linear, Storage, parameter
from dsv4.model.module import Module
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks


class Embedding(Module):
    """Token embedding [vocab, d]; of several ranks each has a part of the vocabulary.

    Its weight may lie in pinned host memory. A step reads a row a token from there, over the link.
    """

    def __init__(self, config, dtype: torch.dtype, ranks: Ranks = ALONE):
        super().__init__()
        self.ranks, self.part = ranks, ranks.slots(config.vocab_size)
        self.host: HostBuffer | None = None  # the pages of the weight, if it lies in host memory
        self.weight = parameter(self.part.size, config.hidden_size, dtype=dtype)
        if self.part.partial:
            self.cuts = {"weight": self.part}

    @property
    def table(self) -> torch.Tensor:
        """The weight [vocab, d], of several ranks this one's part, as kernels read it: always a tensor of the device
        that runs the model."""
        return self.weight if self.host is None else self.host.device

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory that the weight takes."""
        return 0 if self.host is None else self.host.nbytes

    def to_host(self, home: torch.device) -> None:
        """Give the weight pinned host memory that kernels on `home` read; what it held is lost. Raises
        PinnedMemoryError."""
        try:
            self.host = HostBuffer(tuple(self.weight.shape), self.weight.dtype, home)
        except PinnedMemoryError as error:
            raise PinnedMemoryError(
                f"the token embedding takes {self.weight.nbytes} bytes of pinned host memory, which --embedding-memory "
                f"host asks for: {error}"
            ) from error
        self.weight = nn.Parameter(self.host.host, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return F.embedding(ids, self.table)
        self.ranks.same(ids, "token")
        mine = (ids >= self.part.start) & (ids < self.part.stop)
        if not self.part.size:
            found = self.table.new_zeros(*ids.shape, self.table.shape[1])
        else:
            found = F.embedding((ids - self.part.start).clamp(0, self.part.size - 1), self.table)
        return self.ranks.sum(found.masked_fill(~mine.unsqueeze(-1), 0.0))


class Head(Linear):
    """Output projection: logits = W·y in fp32; of several ranks each has a part of the vocabulary."""

    def __init__(self, config, storage: Storage, numerics: Numerics, op, ranks: Ranks = ALONE):
        part = ranks.slots(config.vocab_size)
        super().__init__(part.size, config.hidden_size, storage, numerics, op, cut=part)
        self.ranks, self.vocab = ranks, config.vocab_size

    def forward(self, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # never other than exact
        """y [N, d] → fp32 [N, vocab], on every rank."""
        return self.ranks.joined(super().forward(y, exact=True), self.vocab)

    def own(self, y: torch.Tensor) -> Logits:
        """`forward`, of which each of several ranks keeps its part: to choose a token from."""
        return self(y) if self.ranks.size == 1 else CutValues(super().forward(y, exact=True), self.ranks, self.vocab)
