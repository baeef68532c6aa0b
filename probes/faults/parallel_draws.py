"""Section 1.20: tokens that several ranks choose together, each from its part of the vocabulary."""

import torch

from dsv4 import sampling
from dsv4.engine.steppers import SingleTokens
from dsv4.model.cut_values import whole
from dsv4.model.ranks import Ranks
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.parallel import RANKS


@mutation("1.20", bugs=(), parts=("tokens of ranks",), **RANKS)
def each_rank_draws_by_another_seed(site: Site) -> None:
    """Ranks add their number to the seed, and go on with different tokens."""

    def prepare(stepper):
        for row in stepper.rows:
            row.generator.manual_seed(row.request.sampling.seed + stepper.model.ranks.rank)
        real(stepper)

    real = site.patch(SingleTokens, "prepare", prepare)


def totalled(site: Site, total) -> None:
    """Sums of what ranks have of the vocabulary, from the first rank to each, end in total(those sums, a rank's
    own)."""

    def through(ranks, x):
        found = real(ranks, x)
        return found if ranks.size == 1 else torch.cat((found[:-1], total(found, x).unsqueeze(0)))

    real = site.patch(Ranks, "through", through)


@mutation("1.20", bugs=(), parts=("drawn tokens",), **RANKS)
def the_last_ranks_sum_is_left_out_of_the_total(site: Site) -> None:
    """The weights of the last rank's tokens are not in the total that a draw takes a share of: they are never drawn."""
    totalled(site, lambda sums, own: sums[-2])


@mutation("1.20", bugs=(), parts=("drawn tokens", "tokens of ranks"), **RANKS)
def a_rank_takes_its_own_sum_for_the_total(site: Site) -> None:
    """Each rank draws a share of the sum of its own weights, as if there were no others."""
    totalled(site, lambda sums, own: own)


@mutation("1.20", bugs=(), parts=("drawn tokens",), **RANKS)
def top_p_is_a_share_of_a_ranks_own_sum(site: Site) -> None:
    """Each rank keeps the tokens that sum to top_p of its own weights, as if there were no others."""
    own = lambda weights, top_p: top_p * weights.own.sum(-1, dtype=torch.float64)
    site.patch(sampling, "share", own)


@mutation("1.20", bugs=(), parts=("tokens of ranks",), **RANKS)
def one_rank_chooses_the_second_best_token(site: Site) -> None:
    """Ranks are not asked whether they run the same token, and rank 1 goes on with another one than the others."""
    site.patch(Ranks, "same", lambda ranks, x, what: None)

    def give(stepper, logits):
        logits = whole(logits)
        if stepper.model.ranks.rank == 1:
            logits = logits.scatter(-1, logits.argmax(-1, keepdim=True), float("-inf"))
        return real(stepper, logits)

    real = site.patch(SingleTokens, "_give", give)
