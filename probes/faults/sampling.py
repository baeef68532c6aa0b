"""Section 1.20: how tokens are drawn: temperature, top_p, seeds, and drafts that are accepted by them."""

import time
from dataclasses import replace

import torch

from dsv4 import sampling as rules
from dsv4.engine import acceptance, generate, steppers
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.accepting import of_rejected, sampled
from dsv4.sampling import Sampling
from dsv4.speculation import choosing

SECTION = "1.20", "Sampling"
PLAIN = ("temperature", "top-p", "crosses top_p")


def weighing(site: Site, change) -> None:
    """The weights of plain decoding, and what is normalised to be a distribution, are change(what they were, logits,
    sampling)."""
    real = rules.weights
    site.patch(rules, "weights", lambda logits, sampling: change(real, logits, sampling))


def kept(change):
    """Weights by another rule of which tokens stay: change(ordered probabilities, their sums, top_p) → bool."""

    def weigh(real, logits, sampling):
        p = real(logits, replace(sampling, top_p=1.0))
        if sampling.top_p == 1:
            return p
        p = p / p.sum(-1, keepdim=True)
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        return torch.zeros_like(p).scatter_(-1, index, ordered * change(ordered, ordered.cumsum(-1), sampling.top_p))

    return weigh


# ---- temperature and top_p ----------------------------------------------------------------


@mutation("1.20", bugs=(), parts=("temperature",), probes=("sampling",))
def temperature_forgotten(site: Site) -> None:
    """Tokens are drawn from softmax(logits), at whatever temperature."""
    weighing(site, lambda real, logits, s: real(logits, replace(s, temperature=1.0)))


@mutation("1.20", bugs=(), parts=("temperature",), probes=("sampling",))
def logits_multiplied_by_the_temperature(site: Site) -> None:
    """The temperature multiplies logits instead of dividing them: a hotter one draws more narrowly."""
    weighing(site, lambda real, logits, s: real(logits, replace(s, temperature=1 / s.temperature)))


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def top_p_ignored(site: Site) -> None:
    """Every token can be drawn."""
    weighing(site, lambda real, logits, s: real(logits, replace(s, top_p=1.0)))


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def crossing_token_dropped(site: Site) -> None:
    """Only tokens whose sum stays below top_p are kept, and the likeliest one."""
    weighing(site, kept(lambda p, sums, top_p: (sums < top_p) | (torch.arange(p.shape[-1], device=p.device) == 0)))


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def one_token_too_many_kept(site: Site) -> None:
    """The token after the one that crosses top_p stays as well."""
    weighing(site, kept(lambda p, sums, top_p: (sums - p - p.roll(1, -1) < top_p) | (sums <= p)))


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def top_p_of_the_least_likely(site: Site) -> None:
    """Probabilities are summed from the smallest on."""

    def weigh(real, logits, s):
        p = real(logits, replace(s, top_p=1.0))
        if s.top_p == 1:
            return p
        p = p / p.sum(-1, keepdim=True)
        ordered, index = p.sort(dim=-1, stable=True)
        return torch.zeros_like(p).scatter_(-1, index, ordered * (ordered.cumsum(-1) - ordered < s.top_p))

    weighing(site, weigh)


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def top_p_before_the_temperature(site: Site) -> None:
    """The kept tokens are those of softmax(logits), and the temperature comes afterwards."""

    def weigh(real, logits, s):
        return real(logits, replace(s, top_p=1.0)) * (real(logits, replace(s, temperature=1.0)) > 0)

    weighing(site, weigh)


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def kept_tokens_equally_likely(site: Site) -> None:
    """Of the kept tokens each is drawn as often as the others."""
    weighing(site, lambda real, logits, s: (real(logits, s) > 0).float() if s.top_p < 1 else real(logits, s))


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def places_of_the_order_taken_for_tokens(site: Site) -> None:
    """With top_p, what is drawn is a place in the order of probabilities, not the token there."""

    def weigh(real, logits, s):
        p = real(logits, s)
        return p.sort(dim=-1, descending=True).values if s.top_p < 1 else p

    weighing(site, weigh)


@mutation("1.20", bugs=(), parts=("greedy choice",), probes=("sampling",))
def temperature_0_draws(site: Site) -> None:
    """Temperature 0 is taken for none given: tokens are drawn at 1."""

    def sample(logits, sampling, generator):
        return real(logits, sampling if sampling.temperature else replace(sampling, temperature=1.0), generator)

    real = site.patch(steppers, "sample", sample)


@mutation("1.20", bugs=(), parts=("generation",), probes=("sampling",))
def generation_asks_for_no_top_p(site: Site) -> None:
    """A text is drawn with the default top_p, whatever was asked; the draw itself is right."""

    def write(model, ids, n, sampling=Sampling(), *rest, **more):
        return real(model, ids, n, replace(sampling, top_p=1.0), *rest, **more)

    real = site.patch(generate, "generate", write)


# ---- seeds --------------------------------------------------------------------------------


def seeded(site: Site, change) -> None:
    """Texts of both decoders are written from change(seed)."""
    for name in ("generate", "generate_speculative"):
        real = getattr(generate, name)

        def write(*args, real=real):
            return real(*(replace(a, seed=change(a.seed)) if isinstance(a, Sampling) else a for a in args))

        site.patch(generate, name, write)


@mutation("1.20", bugs=(), parts=("seed",), probes=("sampling",))
def every_seed_is_0(site: Site) -> None:
    """The seed is not handed on."""
    seeded(site, lambda seed: 0)


@mutation("1.20", bugs=(), parts=("seed",), probes=("sampling",))
def seed_of_the_clock(site: Site) -> None:
    """The generator is seeded by the time: no text can be repeated."""
    seeded(site, lambda seed: time.perf_counter_ns() % 2**31)


@mutation("1.20", bugs=(), parts=PLAIN, probes=("sampling",))
def generator_seeded_at_every_token(site: Site) -> None:
    """Each token is drawn with the first random number of the seed."""
    real = steppers.sample
    site.patch(
        steppers,
        "sample",
        lambda logits, sampling, generator: real(logits, sampling, generator.manual_seed(sampling.seed)),
    )


@mutation("1.20", bugs=(), parts=("seed",), probes=("sampling",))
def rows_share_a_seed(site: Site) -> None:
    """All rows of a batch draw with one generator's numbers: rows of one prompt write one text."""

    def rows(*args):
        found = real(*args)
        for row in found:
            row.generator.manual_seed(found[0].generator.initial_seed())
        return found

    real = site.patch(generate, "_rows", rows)


# ---- drafts -------------------------------------------------------------------------------


def targets(site: Site, change) -> None:
    """Both speculative decoders take distributions by change(the settings)."""
    for module in (acceptance, choosing):
        real = module.distribution
        site.patch(module, "distribution", lambda logits, s, real=real: real(logits, change(s)))


@mutation("1.20", bugs=(), parts=("rejection sampling",), probes=("sampling",))
def drafts_accepted_at_temperature_1(site: Site) -> None:
    """Speculative decoders know no temperature: drafts are held against softmax(logits)."""
    targets(site, lambda s: replace(s, temperature=1.0))


@mutation("1.20", bugs=(), parts=("rejection sampling",), probes=("sampling",))
def drafts_accepted_outside_top_p(site: Site) -> None:
    """Speculative decoders know no top_p: every token can be accepted, and drawn after a rejection."""
    targets(site, lambda s: replace(s, top_p=1.0))


@mutation("1.20", bugs=(), parts=("rejection sampling",), probes=("sampling",))
def every_draft_stays(site: Site) -> None:
    """The uniform number that decides is always 0: a draft stays if the target can draw it at all."""
    sampled(site, lambda real, p, q, drafts, sizes, u, u_last: real(p, q, drafts, sizes, 0 * u, u_last))


@mutation("1.20", bugs=(), parts=("rejection sampling",), probes=("sampling",))
def rejected_place_drawn_from_the_drafts_distribution(site: Site) -> None:
    """After a rejection the token is drawn from q again, not from the residual."""

    def accept(real, p, q, drafts, sizes, u, u_last):
        return of_rejected(real(p, q, drafts, sizes, u, u_last), p, q, drafts, sizes, u_last, lambda last, q: q)

    sampled(site, accept)


@mutation("1.20", bugs=(), parts=("rejection sampling",), probes=("sampling",))
def residual_not_normalised(site: Site) -> None:
    """The residual is drawn from as if it summed to 1: numbers beyond its sum give the vocabulary's last token."""

    def residual(last, q):
        left = (last - q).clamp(min=0)
        left[..., -1] += 1 - left.sum(-1)
        return left

    def accept(real, p, q, drafts, sizes, u, u_last):
        return of_rejected(real(p, q, drafts, sizes, u, u_last), p, q, drafts, sizes, u_last, residual)

    sampled(site, accept)
