"""Needles: whether greedy decoding finds a value that was stated once, further back than sliding windows reach.

An answer counts when each of its tokens is the argmax after the prompt and the tokens before it, by teacher forcing:
what greedy decoding would have generated.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM
from dsv4.probes.bounds import lower_bound
from dsv4.probes.measure.recall.haystack import filler, needle_trial
from dsv4.probes.measure.recall.mass import window_only

Say = Callable[[str], None]
Way = Callable[[Cache], AbstractContextManager]
PASS = 16  # tokens of a pass that still counts as decoding
NEAR = 512  # tokens between needle and question at least, where a model has no sliding windows: the reach of the demo's


@dataclass(frozen=True)
class Limits:
    """How much work at once: `tokens` over all rows of a batch, `chunk` of a row in one step."""

    tokens: int
    chunk: int

    @classmethod
    def of(cls, device: str) -> "Limits":
        return cls(20_000, 256) if torch.device(device).type == "cpu" else cls(300_000, 1024)


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


def reach(model: CausalLM) -> int:
    """Tokens that information cannot cross through sliding windows alone, over all layers; NEAR for a model without
    windows."""
    windows = getattr(model.config, "windows", None)  # of a GQA model, a layer each
    if windows is not None:
        return sum(w for w in windows if w is not None) or NEAR
    return model.config.num_hidden_layers * model.config.sliding_window


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


HAYSTACKS = (Haystack("prose", True), Haystack("looped filler", False), Haystack("prose, window only", True, True))


def found(
    model: CausalLM,
    tokenizer: Tokenizer,
    prose: np.ndarray,
    lengths: list[int],
    trials: int,
    limits: Limits,
    say: Say,
    seed: int = 0,
) -> list[dict]:
    """Needles found by haystack and length, as JSON values; the same trials whatever the numerics. Lengths beyond
    `reach`."""
    rows = []
    for haystack in HAYSTACKS:
        for length in lengths:
            text = prose if haystack.prose else filler(tokenizer, length)
            asked = hidden(model, tokenizer, text, length, trials, seed)
            note = lambda text: say(f"needles, {haystack.name}, {length} tokens: {text}")
            with window_only(model) if haystack.window_only else nullcontext():
                hits = answered(model, asked, limits, note)
            rows.append(
                {
                    "haystack": haystack.name,
                    "window_only": haystack.window_only,
                    "context": length,
                    "trials": trials,
                    "hits": sum(hits),
                    "share": sum(hits) / trials,
                    "at_least": lower_bound(sum(hits), trials),
                    "depths": [{"depth": round(a.depth, 4), "hit": hit} for a, hit in zip(asked, hits)],
                }
            )
    return rows
