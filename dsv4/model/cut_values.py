"""Values that stay cut by the vocabulary: ranks choose a token without sending each other one for every token."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsv4.loaders.cuts import Cut
from dsv4.model.ranks import ALONE, Ranks


@dataclass(frozen=True)
class CutValues:
    """Values [..., vocab] of several ranks, one for each token: logits, weights or probabilities. Each rank holds `own`
    [..., part], those of its part of the vocabulary (`Ranks.slots`).

    Whoever chooses a token uses it as a tensor: leading dimensions can be indexed and split, and `argmax`, `max` and
    `sum` over the vocabulary have the same bits on every rank. What needs all values takes `whole`. All ranks must ask
    the same in the same order.
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

    @property
    def part(self) -> Cut:
        """The tokens that `own` has values of."""
        return self.ranks.slots(self.vocab)

    # ---- along the leading dimensions ----------------------------------------------------

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index) -> "CutValues":
        """index: of the leading dimensions."""
        return replace(self, own=self.own[index])

    def __setitem__(self, index, values: "CutValues") -> None:
        """index: of the leading dimensions."""
        self.own[index] = values.own

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "CutValues":
        """dim: a leading dimension, from the left."""
        return replace(self, own=self.own.unflatten(dim, sizes))

    def expand(self, *sizes: int) -> "CutValues":
        """sizes: as `shape` shows them, so the last is the vocabulary's."""
        return replace(self, own=self.own.expand(*sizes[:-1], self.own.shape[-1]))

    def new_zeros(self, *sizes: int) -> "CutValues":
        """sizes: as `shape` shows them, so the last is the vocabulary's."""
        return replace(self, own=self.own.new_zeros(*sizes[:-1], self.own.shape[-1]))

    def clone(self) -> "CutValues":
        return replace(self, own=self.own.clone())

    # ---- of each token -------------------------------------------------------------------

    def map(self, of_each: Callable[..., torch.Tensor], *others: "CutValues") -> "CutValues":
        """of_each: computes new values from those of a token in self and others, [..., part] each. It must compute each
        by itself, so that its bits do not depend on how the vocabulary is cut."""
        return replace(self, own=of_each(self.own, *(other.own for other in others)))

    def mine(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [...] → bool [...]: whether this rank has their values."""
        return (tokens >= self.part.start) & (tokens < self.part.stop)

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """The values [...] of tokens int64 [...] that are `mine`; of others anything."""
        if not self.part.size:
            return self.own.new_zeros(tokens.shape)
        place = (tokens - self.part.start).clamp(0, self.part.size - 1)
        return self.own.gather(-1, place.unsqueeze(-1)).squeeze(-1)

    def indicator(self, tokens: torch.Tensor) -> "CutValues":
        """1 for tokens int64 [...], 0 for all others: [..., vocab]."""
        ids = torch.arange(self.part.start, self.part.stop, device=self.device)
        return replace(self, own=(ids == tokens.unsqueeze(-1)).to(self.own.dtype))

    # ---- over the vocabulary -------------------------------------------------------------

    def argmax(self, dim: int = -1) -> torch.Tensor:
        """int64 [...], as torch.argmax of `whole`; dim is the last. A rank sends 8 bytes for each of them."""
        assert dim == -1, "values are cut along their last dimension"
        return self.ranks.argmax(self.own, self.vocab)

    def finite(self) -> torch.Tensor:
        """bool [...]: whether all values are finite. A rank sends a byte for each of them."""
        return self.ranks.every(self.own.isfinite().all(-1))

    def max(self) -> torch.Tensor:
        """[...]; NaN where one of them is. A rank sends one value for each of them."""
        if self.part.size:
            mine = self.own.amax(-1)
        else:  # the last ranks may have nothing
            mine = self.own.new_full(self.own.shape[:-1], float("-inf"))
        return torch.stack(list(self.ranks.gathered(mine))).amax(0)

    def sum(self) -> torch.Tensor:
        """fp64 [...], of parts in the order of ranks. A rank sends 8 bytes for each of them."""
        return self.ranks.through(self.own.sum(-1, dtype=torch.float64))[-1]

    def whole(self) -> torch.Tensor:
        """[..., vocab], on every rank. A rank sends its part."""
        return self.ranks.joined(self.own.unsqueeze(0).flatten(0, -2), self.vocab).view(self.shape)


Values = torch.Tensor | CutValues  # [..., vocab]
Logits = Values


def whole(values: Values) -> torch.Tensor:
    """[..., vocab]."""
    return values.whole() if isinstance(values, CutValues) else values


def finite(values: Values) -> torch.Tensor:
    """bool [...]: whether all values of a place are finite."""
    return values.finite() if isinstance(values, CutValues) else values.isfinite().all(-1)


def in_parts(values: Values) -> CutValues:
    """A tensor as the one part that a process alone has, so that one algorithm serves any number of ranks."""
    return values if isinstance(values, CutValues) else CutValues(values, ALONE, values.shape[-1])


def joined_along(parts: tuple[Values, ...], dim: int) -> Values:
    """Values side by side along a leading dimension, from the left."""
    first = parts[0]
    if isinstance(first, CutValues):
        return replace(first, own=torch.cat([part.own for part in parts], dim))
    return torch.cat(parts, dim)


def stacked_along(parts: list[Values], dim: int) -> Values:
    """Values behind each other along a new leading dimension, from the left."""
    first = parts[0]
    if isinstance(first, CutValues):
        return replace(first, own=torch.stack([part.own for part in parts], dim))
    return torch.stack(parts, dim)


def cut(own: torch.Tensor, ranks: Ranks, vocab: int) -> Values:
    """own [..., part], as `CutValues`; the tensor itself for a process alone, which has all of them."""
    return own if ranks.size == 1 else CutValues(own, ranks, vocab)
