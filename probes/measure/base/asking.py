"""What a model answers to prompts: by teacher forcing, and as it generates.

An answer counts when each of its tokens is the argmax after the prompt and the tokens before it: what greedy decoding
would have generated. Prompts that share their first tokens are read once (`Asked.context`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

import torch

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base.models import Say, reads_by_policy

Way = Callable[[Cache], AbstractContextManager]
PASS = 16  # tokens of a pass that still counts as decoding
PIECE = 1024  # tokens of a GQA model's prompts that run at once: no layer of it holds logits of them all
# last tokens of a prompt that run as decoding: more than a question has, so that none of it is read exactly
DECODED = 32
AS_IT_IS: Mapping[str, Way] = {"": lambda cache: nullcontext()}


@dataclass(frozen=True)
class Limits:
    """How much work at once: `tokens` over all rows of a batch, `chunk` of a row in one step."""

    tokens: int
    chunk: int

    @classmethod
    def of(cls, device: str) -> "Limits":
        return cls(20_000, 256) if torch.device(device).type == "cpu" else cls(300_000, 1024)

    @classmethod
    def of_model(cls, model: CausalLM) -> "Limits":
        """For prompts that are prefilled densely."""
        found = cls.of(str(model.device))
        return replace(found, chunk=max(found.chunk, PIECE)) if reads_by_policy(model) else found


@dataclass(frozen=True)
class Asked:
    """A prompt (BOS first), the answer that counts, and where in the context it stands (needles).

    answers: strings that what is generated is searched for, each by itself; new: tokens that are generated for that;
    chance: that one of `answers` is found by chance. evidence: [start, end) of the prompt's tokens that state them;
    question: tokens of the prompt's end that ask for them (0: not said).
    context: (number of a context, tokens): prompts of one number start with the same tokens, so many at least.
    """

    prompt: list[int]
    answer: list[int]
    depth: float = 0.0
    answers: tuple[str, ...] = ()
    new: int = 0
    chance: float = 0.0
    evidence: tuple[tuple[int, int], ...] = ()
    question: int = 0
    context: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + max(len(self.answer), self.new)


@dataclass(frozen=True)
class Said:
    """forced: the argmax tokens by teacher forcing, up to the answer's length or to the first that is wrong. generated:
    greedy tokens after the prompt, `Asked.new` of them."""

    forced: list[int]
    generated: list[int]


def answered(
    model: CausalLM, asked: list[Asked], limits: Limits, say: Say = lambda text: None, decoded: int = 0
) -> list[bool]:
    """Whether greedy decoding would give each answer in full, by teacher forcing. decoded: see `replies`."""
    return [reply == a.answer for a, reply in zip(asked, replies(model, asked, limits, say, decoded))]


def replies(
    model: CausalLM, asked: list[Asked], limits: Limits, say: Say = lambda text: None, decoded: int = 0
) -> list[list[int]]:
    """What greedy decoding generates for each prompt up to the answer's length, or to its first token that is wrong.

    decoded: so many of a prompt's last tokens, and the answer, run in passes of at most PASS tokens, which models that
    decode by another attention than they prefill by take for decoding. 0: the context as one append, the rest as
    another.
    """
    return replies_by(model, asked, limits, AS_IT_IS, say, decoded)[""]


def replies_by(
    model: CausalLM,
    asked: list[Asked],
    limits: Limits,
    ways: Mapping[str, Way],
    say: Say = lambda text: None,
    decoded: int = 0,
) -> dict[str, list[list[int]]]:
    """`replies` for each way to decode, see `said_by`."""
    return {
        name: [said.forced for said in found]
        for name, found in said_by(model, asked, limits, ways, say, decoded).items()
    }


def said_by(
    model: CausalLM,
    asked: list[Asked],
    limits: Limits,
    ways: Mapping[str, Way],
    say: Say = lambda text: None,
    decoded: int = 0,
    again: int = 0,
) -> dict[str, list[Said]]:
    """What each way to decode says. Prompts are prefilled once, so all ways must be the same in what they do to
    prompts; `decoded` of their tokens, and the answer, run within a way's context manager, which is given the cache.

    again: so many last tokens of a shared context are prefilled before each of its questions, for a policy that chooses
    by the queries of a prompt's last tokens. Prompts without a shared context are prefilled whole.
    """
    found: dict[str, dict[int, Said]] = {name: {} for name in ways}
    done = 0
    for batch in _batches(asked, limits.tokens):
        rows = [asked[i] for i in batch]
        ask = _one_by_one if rows[0].context is not None else _at_once
        for name, said in ask(model, rows, limits.chunk, decoded, ways, again).items():
            found[name] |= zip(batch, said)
        done += len(batch)
        right = [sum(of[i].forced == asked[i].answer for i in of) for of in found.values()]
        say(f"{done} of {len(asked)} asked, {', '.join(map(str, right))} right")
    return {name: [of[i] for i in range(len(asked))] for name, of in found.items()}


def _batches(asked: list[Asked], tokens: int) -> list[list[int]]:
    """Indices of what is asked together: those of one context; of the others rows in order of length, so that those
    that run together are neighbours, of `tokens` at most."""
    alone = [i for i, a in enumerate(asked) if a.context is None]
    order = sorted(alone, key=lambda i: (len(asked[i].prompt), len(asked[i].answer), asked[i].new))
    size = max(1, tokens // max((len(asked[i]) for i in alone), default=1))
    shared = sorted((i for i, a in enumerate(asked) if a.context is not None), key=lambda i: (asked[i].context, i))
    return [order[at : at + size] for at in range(0, len(order), size)] + [
        list(group) for _, group in groupby(shared, key=lambda i: asked[i].context)
    ]


def _at_once(
    model: CausalLM, asked: list[Asked], chunk: int, decoded: int, ways: Mapping[str, Way], again: int
) -> dict[str, list[Said]]:
    """One batch, a prompt a row; no logits of the context."""
    # of each prompt; its last token is the first that gives logits
    tail = min([_tail(asked, decoded), *(len(a.prompt) for a in asked)])
    after, found = tail + max(max(len(a.answer), a.new) for a in asked), {}
    rewinds = len(ways) > 1 or any(a.new for a in asked)
    cache = model.new_cache(len(asked), max(map(len, asked)), max_rewind=after if rewinds else 0)
    if any(len(a.prompt) > tail for a in asked):
        model.append(*_ragged([a.prompt[:-tail] for a in asked], cache), logits="none", chunk=chunk, prompt=True)
    before = cache.lengths
    for name, way in ways.items():
        cache.rewind([now - then for now, then in zip(cache.lengths, before)])
        with way(cache):
            found[name] = _said(model, cache, asked, chunk, decoded, tail)
    return found


def _one_by_one(
    model: CausalLM, asked: list[Asked], chunk: int, decoded: int, ways: Mapping[str, Way], again: int
) -> dict[str, list[Said]]:
    """Prompts of one context, which is prefilled once; each is asked of that cache, which is rewound between them."""
    tail, shared = _tail(asked, decoded), min(a.context[1] for a in asked if a.context)
    cut = max(0, min(shared - again, min(len(a.prompt) for a in asked) - tail))
    rewind = max(len(a) for a in asked) - cut
    cache, found = model.new_cache(1, max(map(len, asked)), max_rewind=rewind), {}
    if cut:
        ids = torch.tensor([asked[0].prompt[:cut]], dtype=torch.int64)
        model.append(ids, cache, logits="none", chunk=chunk, prompt=True)
    for name, way in ways.items():
        found[name] = []
        with way(cache):
            for a in asked:
                between = torch.tensor([a.prompt[cut:-tail]], dtype=torch.int64)
                if between.numel():
                    model.append(between, cache, logits="none", chunk=chunk, prompt=True)
                found[name] += _said(model, cache, [a], chunk, decoded, min(tail, len(a.prompt)))
                cache.rewind(cache.lengths[0] - cut)
    return found


def _tail(asked: list[Asked], decoded: int) -> int:
    """Last tokens of the prompts that run as decoding: `decoded`, or whole questions where some are longer; without
    `decoded` tokens the last one alone, which gives the first logits."""
    return max(1, decoded) if decoded <= 1 else max(decoded, *(a.question for a in asked))


def _said(model: CausalLM, cache: Cache, asked: list[Asked], chunk: int, decoded: int, tail: int) -> list[Said]:
    """What follows the prompts, whose last `tail` tokens have not yet run."""
    first, forced = _decoded(model, cache, asked, chunk, decoded, tail)
    if not any(a.new for a in asked):
        return [Said(row, []) for row in forced]
    cache.rewind([length - len(a.prompt) for length, a in zip(cache.lengths, asked)])
    return [Said(row, more) for row, more in zip(forced, _generated(model, cache, asked, first))]


def _generated(model: CausalLM, cache: Cache, asked: list[Asked], first: torch.Tensor) -> list[list[int]]:
    """Greedy tokens after the prompts, which have run; first int64 [B, 1]: those after their last tokens."""
    token, found = first, [first]
    for i in range(1, max(a.new for a in asked)):
        counts = [int(i < a.new) for a in asked]  # rows that are done have no room in the cache
        token = model.append(token, cache, counts, logits="last").argmax(-1).cpu()
        found.append(token)
    return [row[: a.new].tolist() for row, a in zip(torch.cat(found, 1), asked)]


def _decoded(
    model: CausalLM, cache: Cache, asked: list[Asked], chunk: int, decoded: int, tail: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """The tokens after the prompts int64 [B, 1], whose last `tail` tokens have not yet run, and what follows by teacher
    forcing. A policy that chooses once sees whole prompts, the last token too: then the first answer is exact."""
    for s in range(-tail, -1, PASS):
        model.append(*_ragged([a.prompt[s : min(s + PASS, -1)] for a in asked], cache), logits="none", chunk=chunk)
    said = lambda rows, **how: model.append(*_ragged(rows, cache), logits="all", chunk=chunk, **how).argmax(-1).cpu()
    last, chosen = [a.prompt[-1:] + a.answer[:-1] for a in asked], []
    if model.attention is not None and model.attention.policy.once:
        chosen.append(said([row[:1] for row in last], prompt=True))
        last = [row[1:] for row in last]
    longest = max(map(len, last))
    each = PASS if decoded else max(1, longest)
    chosen += [said([row[s : s + each] for row in last]) for s in range(0, longest, each)]
    chosen = torch.cat(chosen, 1)
    best = [row[: len(a.answer)].tolist() for row, a in zip(chosen, asked)]
    right = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row, a.answer))) for row, a in zip(best, asked)
    ]
    return chosen[:, :1], [row[: n + 1] for row, n in zip(best, right)]


def _ragged(rows: list[list[int]], cache) -> tuple:
    """Arguments of `append`: ids int64 [B, T] padded to the longest row, the cache, each row's count."""
    counts = [len(row) for row in rows]
    ids = torch.zeros((len(rows), max(counts)), dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return ids, cache, counts
