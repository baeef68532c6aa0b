"""What is as long as the vocabulary, and cut by it between ranks: the token embedding and the output head."""

import torch
import torch.nn.functional as F

from dsv4.model.cut_logits import CutLogits, Logits
from dsv4.model.linear import Linear, Storage, parameter
from dsv4.model.module import Module
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import ALONE, Ranks


class Embedding(Module):
    """Token embedding [vocab, d]; of several ranks each has a part of the vocabulary."""

    def __init__(self, config, dtype: torch.dtype, ranks: Ranks = ALONE):
        super().__init__()
        self.ranks, self.part = ranks, ranks.slots(config.vocab_size)
        self.weight = parameter(self.part.size, config.hidden_size, dtype=dtype)
        if self.part.partial:
            self.cuts = {"weight": self.part}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return F.embedding(ids, self.weight)
        self.ranks.same(ids, "token")
        mine = (ids >= self.part.start) & (ids < self.part.stop)
        if not self.part.size:
            found = self.weight.new_zeros(*ids.shape, self.weight.shape[1])
        else:
            found = F.embedding((ids - self.part.start).clamp(0, self.part.size - 1), self.weight)
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
        return self(y) if self.ranks.size == 1 else CutLogits(super().forward(y, exact=True), self.ranks, self.vocab)
