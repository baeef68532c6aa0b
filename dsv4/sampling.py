"""How a token is chosen from logits: greedily, or at a temperature within top_p.

Several ranks draw from logits of which each has a part, and one process has one part: the algorithm is the same. What a
rank sends for a token are a few numbers, not its logits. With equal logits the token and all distributions have the
same bits for any number of ranks, because each step is either elementwise or a sum that is exact. Weights are rounded
to multiples of a power of two, so that fp64 holds every sum of them exactly, whatever its order.
"""

from dataclasses import dataclass

import torch

from dsv4.errors import InputError, NotFinite, brief
from dsv4.model.cut_values import CutValues, Logits, Values, in_parts

# logits divided by less may overflow; every token is as likely as another long before a larger value
COLDEST, HOTTEST = 1e-6, 1_000_000

# A weight is at most 1, so fp32 has 30 bits for it. They are found in four rounds: shift of the bits, values to try.
ROUNDS = {22: 256, 14: 256, 6: 256, 0: 64}


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


def weights(logits: Logits, sampling: Sampling) -> Values:
    """The weights that tokens are drawn with, fp32 [..., vocab] of logits [..., vocab]: exp((logit − greatest) / T) at
    this temperature (not 0), and 0 outside top_p. They are `rounded`: for 65,537 to 131,072 tokens to multiples of
    2^−35, so a token that is less than 2^−36 times as likely as the likeliest one is never drawn."""
    scaled = in_parts(logits).map(lambda own: own.float() / sampling.temperature)
    greatest = scaled.max().unsqueeze(-1)
    found = scaled.map(lambda own: rounded((own - greatest).exp().double(), scaled.vocab).float())
    return _as(logits, found if sampling.top_p == 1 else within(found, sampling.top_p))


def distribution(logits: Logits, sampling: Sampling) -> Values:
    """`weights`, normalised: the distribution of a token in plain decoding, fp32 [..., vocab] in multiples of 2^−52."""
    found = in_parts(weights(logits, sampling))
    total = found.sum().unsqueeze(-1)
    return _as(logits, found.map(lambda own: rounded(own.double() / total, 1).float()))


def rounded(x: torch.Tensor, n: int) -> torch.Tensor:
    """x fp64 in [0, 1], to the nearest multiples of 2^−52 times a power of two that is at least n. So fp64 holds every
    sum of such numbers exactly that is at most 2n."""
    above = float(1 << (n - 1).bit_length())  # from here to its double fp64 has these multiples and nothing between
    return (x + above) - above


def within(weights: CutValues, top_p: float) -> CutValues:
    """Weights of which those outside top_p are 0. What stays is the smallest set of tokens with that share of the sum,
    of equal weights the lower tokens; the token that crosses the bound stays. A rank sends 6,680 bytes for each row."""
    own, ranks, bound = weights.own, weights.ranks, share(weights, top_p).unsqueeze(-1)
    least = _least(weights, bound)
    above, ties = own > least, own == least
    # of each rank: the sum of its weights above the least one, and how many equal that
    given = torch.stack((own.where(above, 0.0).sum(-1, dtype=torch.float64), ties.sum(-1).double()))
    through = ranks.through(given)
    greater, earlier = through[-1, 0].unsqueeze(-1), (through[ranks.rank, 1] - given[1]).unsqueeze(-1)
    kept = greater + (earlier + ties.cumsum(-1) - 1) * least.double() < bound
    return weights.map(lambda own: own.where(above | (ties & kept), 0.0))


def share(weights: CutValues, top_p: float) -> torch.Tensor:
    """top_p of the sum of weights, fp64 [...]."""
    return top_p * weights.sum()


def _least(weights: CutValues, bound: torch.Tensor) -> torch.Tensor:
    """The smallest weight within top_p, fp32 [..., 1]: the greatest x for which the weights ≥ x sum to `bound` [..., 1]
    or more. Its bits are found from the highest on: each round tries all values of the next few, and ranks send each
    other the sum of their own weights from each on. The host does not wait."""
    ordered = weights.own.sort(-1).values
    sums = torch.nn.functional.pad(ordered.double().cumsum(-1), (1, 0))
    bits = torch.zeros_like(bound, dtype=torch.int32)
    for shift, ways in ROUNDS.items():
        tried = bits + (torch.arange(ways, dtype=torch.int32, device=bits.device) << shift)
        fewer = torch.searchsorted(ordered, tried.view(torch.float32))  # weights below each
        reached = weights.ranks.through(sums[..., -1:] - sums.gather(-1, fewer))[-1]
        last = (reached >= bound).sum(-1, keepdim=True) - 1
        bits = tried.gather(-1, last.clamp(min=0))  # sums of NaN reach nothing
    return bits.view(torch.float32)


def draw(weights: Values, u: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [...] from weights [..., vocab] ≥ 0 by inverting their sum at u fp64 [...] in [0, 1). Never one
    of weight 0; vocab where all are 0 or one is NaN.

    The rank in whose part the sum passes u times the total finds the token. A rank sends its sum and a token, 16 bytes
    for each that is drawn."""
    parts = in_parts(weights)
    sums = torch.nn.functional.pad(parts.own.double().cumsum(-1), (1, 0))
    through = parts.ranks.through(sums[..., -1])
    total, before = through[-1], through[parts.ranks.rank - 1] if parts.ranks.rank else torch.zeros_like(through[0])
    point = torch.minimum(u.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums[..., 1:] + before.unsqueeze(-1), point.unsqueeze(-1), right=True).squeeze(-1)
    found = torch.stack(list(parts.ranks.gathered(parts.part.start + place)))
    owner = (through[:-1] > point).logical_not().sum(0, keepdim=True)
    return found.gather(0, owner).squeeze(0)


def sample(logits: Logits, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id from logits [vocab]; not greedily, it takes one number of the generator. Raises NotFinite where no
    token can be drawn."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    u = torch.rand((), dtype=torch.float64, generator=generator)
    token = int(draw(weights(logits, sampling), u.to(logits.device)))
    if token == logits.shape[-1]:
        raise NotFinite("no token can be drawn: logits are not finite; audit the checkpoint and numerics")
    return token


def _as(given: Values, found: CutValues) -> Values:
    """found, as a tensor where `given` is one."""
    return found if isinstance(given, CutValues) else found.own
