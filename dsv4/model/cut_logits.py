"""Logits that stay cut by vocabulary, so that ranks choose a token without sending each other all of them."""

from dataclasses import dataclass, replace

import torch

from dsv4.model.ranks import Ranks


@dataclass(frozen=True)
class CutLogits:
    """Logits fp32 [..., vocab] of several ranks, of which each holds `own` [..., part], those of its part of the
    vocabulary (`Ranks.slots`).

    Whoever chooses a token uses it as a tensor of logits: leading dimensions can be indexed and split, and `argmax`
    gives the token on every rank. What needs more of them takes `whole`. All ranks must ask the same in the same order.
    """

    own: torch.Tensor
    ranks: Ranks
    vocab: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.own.shape[:-1], self.vocab))

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def is_cuda(self) -> bool:
        return self.own.is_cuda

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index) -> "CutLogits":
        """index: of the leading dimensions."""
        return replace(self, own=self.own[index])

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "CutLogits":
        """dim: a leading dimension, from the left."""
        return replace(self, own=self.own.unflatten(dim, sizes))

    def expand(self, *sizes: int) -> "CutLogits":
        """sizes: as `shape` shows them, so the last is the vocabulary's."""
        return replace(self, own=self.own.expand(*sizes[:-1], self.own.shape[-1]))

    def argmax(self, dim: int = -1) -> torch.Tensor:
        """int64 [...], as torch.argmax of `whole`; dim is the last. A rank sends 8 bytes for each of them."""
        assert dim == -1, "logits are cut along their last dimension"
        return self.ranks.argmax(self.own, self.vocab)

    def finite(self) -> torch.Tensor:
        """bool [...]: whether all logits are finite. A rank sends a byte for each of them."""
        return self.ranks.every(self.own.isfinite().all(-1))

    def whole(self) -> torch.Tensor:
        """fp32 [..., vocab], on every rank. A rank sends its part, 4 bytes a logit."""
        return self.ranks.joined(self.own.unsqueeze(0).flatten(0, -2), self.vocab).view(self.shape)


Logits = torch.Tensor | CutLogits  # [..., vocab]


def whole(logits: Logits) -> torch.Tensor:
    """fp32 [..., vocab]."""
    return logits.whole() if isinstance(logits, CutLogits) else logits


def finite(logits: Logits) -> torch.Tensor:
    """bool [...]: whether all logits of a place are finite."""
    return logits.finite() if isinstance(logits, CutLogits) else logits.isfinite().all(-1)


def joined_along(parts: tuple[Logits, ...], dim: int) -> Logits:
    """Logits side by side along a leading dimension."""
    first = parts[0]
    if isinstance(first, CutLogits):
        return replace(first, own=torch.cat([part.own for part in parts], dim))
    return torch.cat(parts, dim)


def cut(own: torch.Tensor, ranks: Ranks, vocab: int) -> Logits:
    """own fp32 [..., part], as `CutLogits`; the tensor itself for a process alone, which has all of them."""
    return own if ranks.size == 1 else CutLogits(own, ranks, vocab)
