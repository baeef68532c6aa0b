"""Needles: whether greedy decoding finds a value that was stated once, further back than sliding windows reach.

An answer counts when each of its tokens is the argmax after the prompt and the tokens before it, by teacher forcing:
what greedy decoding would have generated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM
from dsv4.probes.bounds import lower_bound, upper_bound
from dsv4.probes.measure.base.haystack import chance_of_a_guess, filler, needle_trial
from dsv4.probes.measure.base.models import Say, reach, reads_by_policy
from dsv4.probes.measure.base.settings import QUESTION, Settings
from dsv4.probes.measure.base.text import Text
from dsv4.probes.measure.base.variants import Variant

Way = Callable[[Cache], AbstractContextManager]
PASS = 16  # tokens of a pass that still counts as decoding
PIECE = 1024  # tokens of a GQA model's prompts that run at once: no layer of it holds logits of them all
# last tokens of a prompt that run as decoding: more than a question has, so that none of it is read exactly
DECODED = 32


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
    """A prompt (BOS first), the answer that counts, and where in the context it stands (needles)."""

    prompt: list[int]
    answer: list[int]
    depth: float = 0.0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


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
    return replies_by(model, asked, limits, {"": lambda cache: nullcontext()}, say, decoded)[""]


def replies_by(
    model: CausalLM,
    asked: list[Asked],
    limits: Limits,
    ways: Mapping[str, Way],
    say: Say = lambda text: None,
    decoded: int = 0,
) -> dict[str, list[list[int]]]:
    """`replies` for each way to decode. Prompts are prefilled once, so all ways must be the same in what they do to
    prompts; `decoded` of their tokens, and the answer, run within a way's context manager, which is given the cache."""
    found: dict[str, dict[int, list[int]]] = {name: {} for name in ways}
    order = sorted(range(len(asked)), key=lambda i: (len(asked[i].prompt), len(asked[i].answer)))
    size = max(1, limits.tokens // max(map(len, asked)))
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        for name, said in _replies(model, [asked[i] for i in batch], limits.chunk, decoded, ways).items():
            found[name] |= zip(batch, said)
        right = [sum(of[i] == asked[i].answer for i in of) for of in found.values()]
        say(f"{start + len(batch)} of {len(asked)} asked, {', '.join(map(str, right))} right")
    return {name: [of[i] for i in range(len(asked))] for name, of in found.items()}


def _replies(
    model: CausalLM, asked: list[Asked], chunk: int, decoded: int, ways: Mapping[str, Way]
) -> dict[str, list[list[int]]]:
    """One batch. Rows in order of length, so that those that run together are neighbours; no logits of the context."""
    # of each prompt; its last token is the first that gives logits
    tail = min([max(1, decoded), *(len(a.prompt) for a in asked)])
    after, found = tail + max(len(a.answer) for a in asked), {}
    cache = model.new_cache(len(asked), max(map(len, asked)), max_rewind=after if len(ways) > 1 else 0)
    if any(len(a.prompt) > tail for a in asked):
        model.append(*_ragged([a.prompt[:-tail] for a in asked], cache), logits="none", chunk=chunk, prompt=True)
    before = cache.lengths
    for name, way in ways.items():
        cache.rewind([now - then for now, then in zip(cache.lengths, before)])
        with way(cache):
            found[name] = _decoded(model, cache, asked, chunk, decoded, tail)
    return found


def _decoded(model: CausalLM, cache, asked: list[Asked], chunk: int, decoded: int, tail: int) -> list[list[int]]:
    """What follows the prompts, whose last `tail` tokens have not yet run."""
    for s in range(-tail, -1, PASS):
        model.append(*_ragged([a.prompt[s : min(s + PASS, -1)] for a in asked], cache), logits="none", chunk=chunk)
    last = [a.prompt[-1:] + a.answer[:-1] for a in asked]
    each = PASS if decoded else max(map(len, last))
    chosen = torch.cat(
        [
            model.append(*_ragged([row[s : s + each] for row in last], cache), logits="all", chunk=chunk)
            .argmax(-1)
            .cpu()
            for s in range(0, max(map(len, last)), each)
        ],
        1,
    )
    best = [row[: len(a.answer)].tolist() for row, a in zip(chosen, asked)]
    right = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row, a.answer))) for row, a in zip(best, asked)
    ]
    return [row[: n + 1] for row, n in zip(best, right)]


def _ragged(rows: list[list[int]], cache) -> tuple:
    """Arguments of `append`: ids int64 [B, T] padded to the longest row, the cache, each row's count."""
    counts = [len(row) for row in rows]
    ids = torch.zeros((len(rows), max(counts)), dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return ids, cache, counts


def hidden(model: CausalLM, tokenizer: Tokenizer, text: np.ndarray, length: int, trials: int, seed: int) -> list[Asked]:
    """Needles at depths spread evenly over all places that are further from the question than windows alone reach."""
    beyond, asked = reach(model), []
    for i in range(trials):
        depth = (i + 0.5) / trials * (length - beyond) / length
        rng = Random(f"{seed}:{length}:{i}")
        asked.append(
            Asked(*needle_trial(rng, tokenizer, text, length, depth, beyond, model.config.bos_token_id), depth=depth)
        )
    return asked


@dataclass(frozen=True)
class Haystack:
    """Where needles are hidden, and how the model may look for them."""

    name: str
    prose: bool
    window_only: bool = False


HAYSTACKS = (Haystack("prose", True), Haystack("looped filler", False))


def trials(
    model: CausalLM,
    tokenizer: Tokenizer,
    prose: np.ndarray,
    contexts: Iterable[int],
    count: int,
    seed: int,
    say: Say,
    haystacks: tuple[Haystack, ...] = HAYSTACKS,
) -> Iterator[tuple[Haystack, int, list[Asked], Say]]:
    """(haystack, context, `count` needles in it, a `say` that names both): the same needles whatever is measured."""
    for haystack in haystacks:
        for context in contexts:
            text = prose if haystack.prose else filler(tokenizer, context)
            asked = hidden(model, tokenizer, text, context, count, seed)
            where = f"needles, {haystack.name}, {context} tokens"
            yield haystack, context, asked, lambda text, where=where: say(f"{where}: {text}")


def found(
    model: CausalLM,
    variants: list[Variant],
    tokenizer: Tokenizer,
    prose: np.ndarray,
    contexts: Iterable[int],
    count: int,
    limits: Limits,
    say: Say = lambda text: None,
    seed: int = 0,
) -> list[dict]:
    """Needles found by variant, haystack and context, as JSON values; the same `count` trials for every variant."""
    rows = []
    for haystack, context, asked, note in trials(model, tokenizer, prose, contexts, count, seed, say):
        hits = answers(model, variants, asked, limits, note)
        rows += [row(v, haystack.name, context, asked, hits[v.name]) for v in variants]
    return rows


def answers(
    model: CausalLM, variants: list[Variant], asked: list[Asked], limits: Limits, say: Say
) -> dict[str, list[bool]]:
    """Whether each answer was given, by variant. Where all act in decoding alone, prompts are prefilled once for those
    that need not see them. A policy that chooses once runs its prompts with their questions, as published: its window
    is the question."""
    if not all(v.decode_only for v in variants):
        found = {}
        for variant in variants:
            with variant.on(model):
                found[variant.name] = answered(model, asked, limits, lambda text: say(f"{variant.name}: {text}"))
        return found
    ways = {v.name: lambda cache, v=v: v.resumed(model, cache) for v in variants if v.resumable}
    said = replies_by(model, asked, limits, ways, say, DECODED) if ways else {}
    for variant in variants:
        if not variant.resumable:
            with variant.on(model):
                said[variant.name] = replies(model, asked, limits, lambda text: say(f"{variant.name}: {text}"), 1)
    return {name: [reply == a.answer for a, reply in zip(asked, of)] for name, of in said.items()}


def row(variant: Variant, haystack: str, context: int, asked: list[Asked], hits: list[bool]) -> dict:
    """One row of the document. at_least, at_most: one-sided 97.5 % bounds each (Clopper-Pearson); chance: of the best
    guess. Vacuous where the variant leaves nothing out of any prompt and answer, which together are longer than the
    context."""
    longest = max(map(len, asked))
    return {
        "variant": variant.name,
        "haystack": haystack,
        "context": context,
        **counted(hits),
        "chance": chance_of_a_guess(),
        "status": "VACUOUS" if variant.keeps_all(longest) and not variant.exact else "MEASURED",
        "depths": depths(asked, hits),
    }


def counted(hits: list[bool]) -> dict:
    """Figures of the trials. at_least, at_most: one-sided 97.5 % bounds each (Clopper-Pearson)."""
    count, trials = sum(hits), len(hits)
    return {
        "trials": trials,
        "hits": count,
        "share": count / trials,
        "at_least": lower_bound(count, trials),
        "at_most": upper_bound(count, trials),
    }


def depths(asked: list[Asked], hits: list[bool]) -> list[dict]:
    return [{"depth": round(a.depth, 4), "hit": hit} for a, hit in zip(asked, hits)]


def why_none(settings: Settings, text: Text) -> str | None:
    """Why no needle can be asked for; None where some can."""
    if not settings.needles:
        return "needles were turned off (--needles 0)"
    return "no needles without a tokenizer: they are sentences" if text.tokenizer is None else None


def fitting(model: CausalLM, contexts: Iterable[int], most: int, why: str = "") -> tuple[list[int], list[str]]:
    """(contexts in which needles can be hidden, notes on the others): longer than windows alone reach, and up to `most`
    tokens. why: where `most` comes from."""
    beyond = reach(model)
    fits = [n for n in contexts if beyond + QUESTION < n <= most]
    asked = f"from {beyond + QUESTION + 1:,} (windows alone reach {beyond:,}) to {most:,} tokens{why}"
    return fits, [f"no needles at {n:,} tokens: they are asked in contexts {asked}" for n in contexts if n not in fits]


def best_bound(count: int, of: str) -> str:
    """A note: what `count` needles can show at best. of: what they are of, such as 'a length'."""
    return (
        f"{count} needles {of} bound the rate below by {lower_bound(count, count):.1%} at best; --needles 100 by 96.4 %"
    )
