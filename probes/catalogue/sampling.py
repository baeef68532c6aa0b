"""P33: tokens that are drawn have the distribution that temperature and top_p define. See sampling.md."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from dsv4 import sampling as rules
from dsv4.engine import acceptance, generate, steppers
from dsv4.model.cut_values import whole
from dsv4.probes.compare import agreeing, tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.patching import replaced
from dsv4.probes.subject import Subject
from dsv4.speculation import choosing
from dsv4.speculation.draft import LookupDrafter

PROMPT, SHORT, NEW = 12, 3, 16  # tokens of a prompt, of those of a batch, of a text
SPREADS = (6, 24)  # exp(entropy) at the temperatures that are asked: no fixed one moves every model's distribution
REACHED = 0.6  # the kept tokens of top-p have at least this probability
OF_TEXTS = (200, 0.9)  # spread and such a probability: two seeds then do not write one text by chance
OF_DRAFTS = (6, 0.9)  # kept tokens of very different probabilities
DRAWS, ALONE = 2000, 100  # of a setting; of these as `generate` makes them, one by one
ROWS, PIECE = 128, 500  # requests of a batch; rows of one call
ALPHA = 1e-6  # probability that a sound decoder fails one check, over seeds
CELLS = 12
ALMOST = 1e-5  # of probability: what fp32 sums over a vocabulary may err by
RUNS = "tokens can be drawn"
BOUND = f"Hoeffding over all sets of {CELLS} cells: a right distribution exceeds it with probability {ALPHA}"


class Setting(NamedTuple):
    """A temperature and top_p for one logits vector. wanted fp64 [vocab]: the distribution by definition; crossing: the
    token that takes the sum over top_p, None without top_p."""

    spread: float
    temperature: float
    top_p: float
    wanted: torch.Tensor
    crossing: int | None

    def sampling(self, seed: int) -> rules.Sampling:
        return rules.Sampling(self.temperature, self.top_p, seed)

    @property
    def label(self) -> str:
        return f"spread of {self.spread} tokens" + (", top-p" if self.top_p < 1 else "")

    @property
    def part(self) -> str:
        return "temperature" if self.crossing is None else "top-p"


@dataclass(frozen=True)
class Sampling(Probe):
    """Many draws from the model's own logits, by plain decoding and by both speculative decoders; texts and their
    seeds."""

    name: ClassVar[str] = "sampling"
    title: ClassVar[str] = "drawn tokens follow temperature, top_p and seed"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "batch", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        if PROMPT + NEW > subject.config.max_position_embeddings:
            why = f"{PROMPT + NEW} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [vacuous(self.title, why, part="generation")]
        ids = tokens(subject, PROMPT, self.seed)
        logits = subject.run(ids).logits[0].float()
        asked = [s for spread in SPREADS for s in settings(logits[-1], spread)]
        checks = []
        for s in asked:
            checks += attempted_all(RUNS, s.label, s.part, lambda: plainly(logits[-1], s, self.seed, self.effort))
        prompt, wide = ids[0].tolist(), settings(logits[-1], *OF_TEXTS)[-1]
        checks += attempted_all(RUNS, "texts", "generation", lambda: texts(subject, prompt, wide, self.seed))
        checks += attempted_all(RUNS, "temperature 0", "greedy choice", lambda: greedily(subject, prompt, logits))
        graded = settings(logits[-1], *OF_DRAFTS)[-1]
        make = lambda: drafted(logits, graded, self.seed, self.effort)
        checks += attempted_all(RUNS, "drafts", "rejection sampling", make)
        s = settings(logits[SHORT - 1], SPREADS[-1])[-1]
        return checks + attempted_all(RUNS, "a batch", "seed", lambda: of_rows(subject, prompt[:SHORT], s, self.seed))


# ---- the definition, in fp64 --------------------------------------------------------------


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """exp(z / T) / Σ exp(z / T) in fp64, of logits [vocab]."""
    z = logits.double().cpu() / temperature
    p = (z - z.max()).exp()
    return p / p.sum()


def kept_tokens(p: torch.Tensor, top_p: float) -> list[int]:
    """The fewest tokens, from the likeliest on, whose probabilities sum to top_p (Holtzman et al. 2020, arXiv
    1904.09751, section 3.1); the last of them crosses it."""
    kept, total, held = [], 0.0, p.tolist()
    for token in sorted(range(len(held)), key=lambda i: -held[i]):
        kept.append(token)
        total += held[token]
        if total >= top_p:
            break
    return kept


def within(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """p restricted to the kept tokens, normalised."""
    found, kept = torch.zeros_like(p), kept_tokens(p, top_p)
    found[kept] = p[kept]
    return found / found.sum()


def temperature_of(logits: torch.Tensor, spread: float) -> float:
    """The temperature at which exp(entropy) is `spread`, by bisection: entropy rises with it."""
    low, high = math.log(1e-4), math.log(1e4)
    for _ in range(60):
        middle = (low + high) / 2
        p = probabilities(logits, math.exp(middle))
        entropy = -torch.special.xlogy(p, p).sum().item()
        low, high = (middle, high) if entropy < math.log(spread) else (low, middle)
    return math.exp(high)


def settings(logits: torch.Tensor, spread: float, reached: float = REACHED) -> list[Setting]:
    """All tokens, and a top_p that falls in the middle of a token's probability: no rounding then moves it to
    another."""
    T = temperature_of(logits, spread)
    p = probabilities(logits, T)
    *before, crossing = kept_tokens(p, reached)
    top_p = p[before].sum().item() + p[crossing].item() / 2
    return [
        Setting(spread, T, 1.0, p, None),
        Setting(spread, T, top_p, within(p, top_p), crossing),
    ]


# ---- many draws ---------------------------------------------------------------------------


def distributed(drawn: torch.Tensor, s: Setting, wanted: torch.Tensor, where: str, part: str) -> Iterator[Check]:
    """drawn int64 [n] against wanted fp64 [vocab]: total variation over the likeliest tokens and all others together,
    and tokens that cannot be drawn."""
    n, order = len(drawn), wanted.argsort(descending=True, stable=True)
    found = torch.bincount(drawn.cpu(), minlength=len(wanted)).double()
    one = order[: CELLS - 1]
    cells = lambda p: torch.cat((p[one], (p.sum() - p[one].sum()).view(1)))
    limit = math.sqrt((CELLS * math.log(2) + math.log(1 / ALPHA)) / (2 * max(n, 1)))
    away = lambda p: 0.5 * (cells(p) - cells(wanted)).abs().sum().item()
    yield compare(
        "total variation distance of what was drawn from softmax(logits / T) within top_p",
        away(found / max(n, 1)),
        "<=",
        limit,
        BOUND,
        n,
        chance=away(torch.full_like(wanted, 1 / len(wanted))),
        where=where,
        part=part,
        found=f"temperature {s.temperature:.3g}, top_p {s.top_p:.3g}",
    )
    if (wanted == 0).any():
        beyond = int(found[wanted == 0].sum())
        yield compare("draws of tokens that are not kept", beyond, "==", 0, "no draw", n, where=where, part=part)


def plainly(logits: torch.Tensor, s: Setting, seed: int, effort: float) -> Iterator[Check]:
    """As `generate` draws: with one generator. Its first draws are made one after another, and all of them at once."""
    sampling, n, where = s.sampling(seed), math.ceil(DRAWS * effort), f"plain decoding, {s.label}"
    g, again = (torch.Generator().manual_seed(seed) for _ in range(2))
    u = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for _ in range(n)]).to(logits.device)
    many = lambda u: rules.draw(rules.weights(logits.expand(len(u), -1), sampling), u)
    drawn = torch.cat([many(part) for part in u.split(PIECE)]).cpu()
    alone = torch.tensor([steppers.sample(logits, sampling, again) for _ in range(min(ALONE, n))])
    off = int((alone != drawn[: len(alone)]).sum())
    name, about = "draws of one token that are not those of many", dict(where=where, part=s.part)
    yield compare(name, off, "==", 0, "same numbers", len(alone), **about)
    yield from distributed(drawn, s, s.wanted, where, s.part)
    if s.crossing is None:
        return
    name, about = "draws of the token that crosses top_p", dict(where=where, part="top-p")
    missed = (1 - s.wanted[s.crossing].item()) ** len(drawn)
    if missed > ALPHA:
        yield vacuous(name, f"a right decoder would draw it never with probability {missed:.2g}", **about)
    else:
        hits = int((drawn == s.crossing).sum())
        yield compare(
            name, hits, ">=", 1, f"it is kept; never drawn with probability {missed:.1g}", len(drawn), **about
        )


def drafted(logits: torch.Tensor, s: Setting, seed: int, effort: float) -> Iterator[Check]:
    """One draft a row, accepted as either speculative decoder does: the token in its place, and the one after an
    accepted draft."""
    # after the prompt; after the draft, spread as much
    other = logits[-2] * (s.temperature / temperature_of(logits[-2], s.spread))
    target = torch.stack((logits[-1], other))
    after = within(probabilities(target[1], s.temperature), s.top_p)
    # the kept tokens with their probabilities in the other order: far from the target, and so is the residual
    kept = kept_tokens(probabilities(target[0], s.temperature), s.top_p)
    proposal = target[0].clone()
    proposal[kept] = target[0][kept[::-1]]
    for decoder, decide in (("generate_speculative", by_generator), ("Rounds", by_counted_noise)):
        first, second, left = [], [], math.ceil(DRAWS * effort)
        for number in range(0, left, PIECE):
            count, out = decide(target, proposal, s, min(PIECE, left - number), seed + number)
            first.append(out[:, 0])
            second.append(out[count > 0, 1])
        where = f"{decoder}, {s.label}"
        yield from distributed(torch.cat(first), s, s.wanted, f"{where}, in place of a draft", "rejection sampling")
        yield from distributed(torch.cat(second), s, after, f"{where}, after a draft", "rejection sampling")


def by_generator(target: torch.Tensor, proposal: torch.Tensor, s: Setting, rows: int, seed: int):
    """(accepted drafts [rows], tokens [rows, 2]), of logits [2, vocab] and [vocab]."""
    g, sampling = torch.Generator().manual_seed(seed), s.sampling(seed)
    u = torch.rand(rows, 3, generator=g, dtype=torch.float64)
    q = acceptance.distribution(proposal, sampling).expand(rows, 1, -1)
    drafts, p = acceptance.draw(q, u[:, :1]), acceptance.distribution(target, sampling).expand(rows, -1, -1)
    return acceptance.accept_sampled(p, q, drafts, torch.ones(rows, dtype=torch.int64), u[:, 1:2], u[:, 2])


def by_counted_noise(target: torch.Tensor, proposal: torch.Tensor, s: Setting, rows: int, seed: int):
    """As `by_generator`, of `rows` neighbouring seeds."""
    choice, at = choosing.Sampled(s.sampling(seed), rows, "cpu"), torch.zeros(rows, dtype=torch.int64)
    drafts, q = choice.draft(proposal.expand(rows, -1), at)
    sizes = torch.ones(rows, dtype=torch.int64)
    return choice.accept(target.expand(rows, -1, -1), drafts.unsqueeze(1), q.unsqueeze(1), sizes, at)


# ---- texts and seeds ----------------------------------------------------------------------


class Text(NamedTuple):
    """tokens: what `generate` gave; wrong: places where that is not what `sample` drew, by the settings that were asked
    and among the tokens that they keep; alike: the probability that another text of these distributions is the same."""

    tokens: list[int]
    wrong: int
    alike: float


def text_of(subject: Subject, prompt: list[int], s: Setting, seed: int) -> Text:
    """A text of `generate`; what it draws from is looked at on the way."""
    asked, drawn, wrong, alike, real = s.sampling(seed), [], 0, 1.0, steppers.sample

    def watched(logits, sampling, generator):
        nonlocal wrong, alike
        p = probabilities(whole(logits), s.temperature)
        kept, token = kept_tokens(p, s.top_p + ALMOST), real(logits, sampling, generator)
        alike *= within(p, s.top_p).square().sum().item()
        wrong += token not in kept or (sampling.temperature, sampling.top_p) != (asked.temperature, asked.top_p)
        drawn.append(token)
        return token

    with replaced([steppers], "sample", watched):
        out = generate.generate(subject.model, prompt, NEW, asked)
    return Text(out.token_ids, wrong + sum(a != b for a, b in zip(out.token_ids, drawn, strict=True)), alike)


def texts(subject: Subject, prompt: list[int], s: Setting, seed: int) -> Iterator[Check]:
    """A seed twice, and two others."""
    one, again, *others = (text_of(subject, prompt, s, n) for n in (seed, seed, seed + 1, seed + 4096))
    about = dict(where="texts of generate")
    wrong = one.wrong + sum(text.wrong for text in others)
    name = "tokens of texts that are not drawn by the settings that were asked"
    yield compare(name, wrong, "==", 0, "definition of temperature and top_p", 3 * NEW, part="generation", **about)
    off = sum(a != b for a, b in zip(one.tokens, again.tokens, strict=True))
    yield compare("tokens that a seed does not repeat", off, "==", 0, "same numbers", NEW, part="seed", **about)
    name, same = "other seeds that write the same text", sum(text.tokens == one.tokens for text in others)
    if 2 * one.alike > ALPHA:
        yield vacuous(name, f"two seeds write one text with probability {one.alike:.2g}", part="seed", **about)
    else:
        yield compare(name, same, "==", 0, "independent draws", 2, part="seed", **about)


def greedily(subject: Subject, prompt: list[int], logits: torch.Tensor) -> Iterator[Check]:
    """Temperature 0: the largest logit, alone and in a text, whose logits are computed again from its tokens."""
    g, sampling = torch.Generator().manual_seed(0), rules.Sampling(0.0)
    off = sum(bool(row[steppers.sample(row, sampling, g)] < row.max()) for row in logits)
    about = dict(where="temperature 0", part="greedy choice")
    yield compare("choices of less than the largest logit", off, "==", 0, "definition", len(logits), **about)
    text = generate.generate(subject.model, prompt, NEW, sampling).token_ids
    again = subject.run(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :].double()
    lost = again.amax(1) - again.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
    value, source, limit = agreeing(lost / (2 * again.norm(dim=1)), subject.numerics)
    name = "what tokens of a text lose to the largest logit, over twice the logits' norm"
    yield compare(name, value, "<=", limit, source, NEW, **about)


def of_rows(subject: Subject, prompt: list[int], s: Setting, seed: int) -> Iterator[Check]:
    """Rows of one prompt in `generate_speculative`: each draws by its own seed, and a text is its seed's again."""
    write: Callable = lambda rows, new: [
        out.token_ids
        for out in generate.generate_speculative(subject.model, [prompt] * rows, new, LookupDrafter(), s.sampling(seed))
    ]
    first = torch.tensor([text[0] for text in write(ROWS, 1)])
    yield from distributed(first, s, s.wanted, "first tokens of rows of generate_speculative", "seed")
    off = sum(a != b for texts in zip(write(2, NEW), write(2, NEW), strict=True) for a, b in zip(*texts, strict=True))
    name, about = "tokens that a seed does not repeat", dict(where="texts of generate_speculative", part="seed")
    yield compare(name, off, "==", 0, "same numbers", 2 * NEW, **about)


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Sampling)
