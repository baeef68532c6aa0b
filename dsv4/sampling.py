"""How a token is chosen from logits: greedily, or at a temperature within top_p."""

from dataclasses import dataclass

import torch

from dsv4.errors import InputError, brief
from dsv4.model.cut_logits import Logits, whole

# logits divided by less may overflow; every token is as likely as another long before a larger value
COLDEST, HOTTEST = 1e-6, 1_000_000


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens with that much probability; seed of 64 bits.
    Raises InputError for values with which no token can be drawn."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:  # NaN is neither
            raise InputError(
                f"temperature {brief(self.temperature)} was asked for; expected 0 (greedy), or {COLDEST} to {HOTTEST}"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {brief(self.top_p)} was asked for; expected a number over 0 and up to 1")
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed {brief(self.seed)} was asked for; expected a number of 64 bits, -2^63 to 2^63 - 1")


def weights(logits: Logits, sampling: Sampling) -> torch.Tensor:
    """The weights that tokens are drawn with, fp32 [..., vocab] of logits [..., vocab]: probabilities at this
    temperature (not 0), and 0 outside top_p, so their sum is top_p or a little more. Ranks join their logits for it:
    the last bits of a softmax depend on the order of its sum, and a draw on the last bits."""
    p = torch.softmax(whole(logits).float() / sampling.temperature, -1)
    if sampling.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        kept = ordered.cumsum(-1) - ordered < sampling.top_p  # the token that crosses the bound stays
        p = torch.zeros_like(p).scatter_(-1, index, ordered * kept)
    return p


def distribution(logits: Logits, sampling: Sampling) -> torch.Tensor:
    """`weights`, normalised: the distribution of a token in plain decoding, fp32 [..., vocab]."""
    p = weights(logits, sampling)
    return p if sampling.top_p == 1 else p / p.sum(-1, keepdim=True)


def sample(logits: Logits, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id from logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(weights(whole(logits).cpu(), sampling), 1, generator=generator))
