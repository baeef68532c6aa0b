"""Tokens that ranks draw from logits of which each has a part, against those that one process draws from all."""

from collections.abc import Iterator

import torch

from dsv4.model.cut_values import Values, cut, stacked_along
from dsv4.model.ranks import Ranks
from dsv4.parallel.threads import together
from dsv4.probes.catalogue.sampling import temperature_of
from dsv4.probes.result import Check, compare
from dsv4.sampling import Sampling, sample
from dsv4.speculation.choosing import choice_of

ROWS, DRAFTS, SPREAD = 40, 2, 24  # rows that draw; drafts of each; exp(entropy) at the temperature
DEFINITION = "a seed gives the same tokens for any number of ranks: sums over the vocabulary are exact"


def drawn_tokens(logits: torch.Tensor, ranks: int, seed: int, where: str) -> Iterator[Check]:
    """logits fp32 [N, vocab], of at least ROWS + 1 places: plain draws, draws of rounds, drafts that are drawn, and
    which of these stay, with all tokens and within top_p."""
    target = logits[: ROWS * (DRAFTS + 1)]
    target = target.repeat(-(-ROWS * (DRAFTS + 1) // len(target)), 1)[: ROWS * (DRAFTS + 1)].unflatten(0, (ROWS, -1))
    proposal = target.roll(1, 0)[:, :DRAFTS]  # of another row, so that some drafts stay and some do not
    temperature = temperature_of(logits[0], min(SPREAD, logits.shape[1] / 2))
    for top_p in (1.0, 0.9):
        one, other = (Sampling(temperature, top_p, n) for n in (seed, seed + ROWS))
        wanted, others = chosen(target, proposal, one), chosen(target, proposal, other)
        found = together(ranks, lambda own: chosen(part(target, own), part(proposal, own), one))
        differ = [int((mine != wanted).sum()) for mine in found]
        worst = max(range(ranks), key=differ.__getitem__)
        yield compare(
            "tokens that ranks draw and one process with the same logits and seed does not",
            differ[worst],
            "==",
            0,
            DEFINITION,
            wanted.numel(),
            chance=int((others != wanted).sum()),
            where=f"{where}, top_p {top_p}",
            part="parallel, drawn tokens",
            found=f"rank {worst}" if differ[worst] else "",
        )


def part(logits: torch.Tensor, ranks: Ranks) -> Values:
    """What one of several ranks has of logits [..., vocab]."""
    mine = ranks.slots(logits.shape[-1])
    return cut(logits[..., mine.start : mine.stop].contiguous(), ranks, logits.shape[-1])


def chosen(target: Values, proposal: Values, sampling: Sampling) -> torch.Tensor:
    """int64 [n]: what plain decoding draws from target [ROWS, DRAFTS + 1, vocab] and what rounds do; drafts from
    proposal [ROWS, DRAFTS, vocab], how many of them stay, and the tokens of each row; −1 in places without meaning."""
    generator, at = torch.Generator().manual_seed(sampling.seed), torch.arange(ROWS)
    plain = [sample(target[b, 0], sampling, generator) for b in range(ROWS)]
    choice = choice_of(sampling, ROWS, "cpu")
    drafts, q = zip(*(choice.draft(proposal[:, i], at + i) for i in range(DRAFTS)))
    count, tokens = choice.accept(
        target, torch.stack(drafts, 1), stacked_along(list(q), 1), torch.full((ROWS,), DRAFTS), at
    )
    tokens = tokens.where(torch.arange(DRAFTS + 1) <= count.unsqueeze(1), -1)
    every = torch.tensor(plain), choice.own(target, at), *drafts, count, tokens
    return torch.cat([numbers.flatten() for numbers in every])
