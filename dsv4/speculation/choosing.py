"""How rounds choose tokens: greedily, or drawn with counter-based noise. All of it runs inside a captured round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from dsv4.model.cut_values import Logits, Values
from dsv4.sampling import Sampling, distribution, draw, weights
from dsv4.speculation.accept import Accepted, accept_chosen, accept_greedy, accept_sampled
from dsv4.speculation.noise import DRAFT, KEEP, OWN, row_seeds, uniforms


class Choice(ABC):
    """The interface. `at` int64 [B]: the position, in each row's text, of the token that the first place of logits
    predicts."""

    def take(self, other: "Choice") -> None:
        """Choose as `other` does, which is of this kind, temperature and top_p."""

    @abstractmethod
    def own(self, logits: Logits, at: torch.Tensor) -> torch.Tensor:
        """The choice of decoding without drafts, int64 [B, W], from logits fp32 [B, W, V]."""

    @abstractmethod
    def draft(self, logits: Logits, at: torch.Tensor) -> tuple[torch.Tensor, Values | None]:
        """Drafts int64 [B] from a drafting model's logits fp32 [B, V], and the distribution they were drawn from fp32
        [B, V]; None if they were chosen."""

    @abstractmethod
    def accept(
        self, logits: Logits, drafts: torch.Tensor, q: Values | None, sizes: torch.Tensor, at: torch.Tensor
    ) -> Accepted:
        """logits fp32 [B, W + 1, V] after the last token and after each draft; drafts int64 [B, W]; q [B, W, V] as
        `draft` gave it;
        sizes int64 [B]: drafts that each row has."""


class Greedy(Choice):
    def own(self, logits, at):
        return logits.argmax(-1)

    def draft(self, logits, at):
        return logits.argmax(-1), None

    def accept(self, logits, drafts, q, sizes, at):
        return accept_greedy(logits, drafts, sizes)


class Sampled(Choice):
    """At a temperature over 0. Row b's noise is that of seeds[b], by default sampling.seed + b.

    A draft that was chosen is accepted if decoding without drafts draws it with the same noise. That has probability
    p(x), as in rejection sampling, and the text does not depend on the drafts. Drafts that were drawn go through
    rejection sampling, which accepts more of them than any rule whose text does not depend on drafts (Daliri et al.
    2024, arXiv 2408.07978). The token that a round adds to them is drawn with the number of the round's first position;
    no other round begins there.
    """

    def __init__(self, sampling: Sampling, batch: int, device: torch.device | str, seeds: Sequence[int] | None = None):
        self.sampling, self.seeds = sampling, row_seeds(sampling.seed, batch, device)
        if seeds is not None:
            self.seeds.copy_(torch.tensor(seeds))

    def take(self, other):
        self.seeds.copy_(other.seeds)

    def own(self, logits, at):
        return draw(weights(logits, self.sampling), self._noise(at, logits.shape[1], OWN))

    def draft(self, logits, at):
        q = distribution(logits, self.sampling)
        return draw(q, uniforms(self.seeds, at, DRAFT)), q

    def accept(self, logits, drafts, q, sizes, at):
        if q is None:
            return accept_chosen(self.own(logits, at), drafts, sizes)
        u, u_last = self._noise(at, drafts.shape[1], KEEP), uniforms(self.seeds, at, OWN)
        return accept_sampled(distribution(logits, self.sampling), q, drafts, sizes, u, u_last)

    def _noise(self, at: torch.Tensor, width: int, role: int) -> torch.Tensor:
        return uniforms(self.seeds, at.unsqueeze(1) + torch.arange(width, device=at.device), role)


def choice_of(sampling: Sampling, batch: int, device: torch.device | str, seeds: Sequence[int] | None = None) -> Choice:
    """For `batch` rows on a device: `Greedy` at temperature 0. seeds: as for `Sampled`."""
    return Greedy() if sampling.temperature == 0 else Sampled(sampling, batch, device, seeds)
