"""Needles and facts, asked after a prompt that was read sparsely: many needles in one context, each asked by itself.

The context is read once for each way of reading; a question is appended, answered by teacher forcing, and forgotten
again.
"""

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from dsv4.errors import InputError
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base.haystack import (
    NEAR,
    TEMPLATES,
    any_name,
    any_value,
    boundaries,
    chance_of_a_guess,
    encode,
)
from dsv4.probes.measure.base.needles import Asked, Limits, counted, depths
from dsv4.probes.measure.sparse_prefill.reading import Reading, cut_by

FACT = "\nThe capital of {0} is"
FACTS = {  # what a model may know by heart; single words, each the capital of one country
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Denmark": "Copenhagen",
    "Sweden": "Stockholm",
    "Norway": "Oslo",
    "Finland": "Helsinki",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Greece": "Athens",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Canada": "Ottawa",
    "Cuba": "Havana",
    "Peru": "Lima",
}


@dataclass(frozen=True)
class Planted:
    """context: ids, BOS first; questions: prompts without the context, answers, depths 0 … 1 of what states them."""

    context: list[int]
    questions: list[Asked]


def planted(
    tokenizer: Tokenizer, text: np.ndarray, length: int, count: int, beyond: int, bos: int | None, seed: int
) -> Planted:
    """`count` needles of different names, at depths spread evenly, in a context of exactly `length` tokens; at least
    `beyond` tokens follow the last. Each stands at a sentence's end, if there is one nearby. Raises InputError for a
    context or a text too short for that."""
    rng, ends = Random(f"{seed}:{length}:{count}"), boundaries(tokenizer)
    names: dict[str, None] = {}
    while len(names) < count:
        names.setdefault(any_name(rng))
    stated = [(rng.choice(TEMPLATES), name, any_value(rng)) for name in names]
    needles = [encode(tokenizer, template.statement(name, value)) for template, name, value in stated]
    room = length - sum(map(len, needles)) - (bos is not None)
    if room <= beyond or len(text) < room:
        raise InputError(
            f"{count} needles in {length} tokens leave {room} to fill from a text of {len(text)}; expected more than "
            f"the {beyond} behind the last needle, and no more than the text has: fewer --needles, other "
            "--asked-context, or a longer --text"
        )
    begin = rng.randint(0, len(text) - room)
    words = text[begin : begin + room].tolist()
    context, done, depths = [] if bos is None else [bos], 0, []
    for i, needle in enumerate(needles):
        place = round((i + 0.5) / count * (room - beyond))
        place = next((p for p in range(place, max(done, place - NEAR), -1) if ends[words[p - 1]]), place)
        context += [*words[done:place], *needle]
        depths.append((len(context) - len(needle)) / length)
        done = place
    questions = [
        Asked(encode(tokenizer, template.prompt(name)), encode(tokenizer, f" {value}"), depth)
        for (template, name, value), depth in zip(stated, depths)
    ]
    return Planted([*context, *words[done:]], questions)


def facts(tokenizer: Tokenizer) -> list[Asked]:
    return [Asked(encode(tokenizer, FACT.format(key)), encode(tokenizer, f" {value}")) for key, value in FACTS.items()]


def answers(model: CausalLM, reading: Reading, questions: list[Asked], chunk: int) -> list[bool]:
    """Whether greedy decoding would give each answer after the context in the cache. Questions are decoded: they read
    all of it."""
    found = []
    with cut_by(model, None):
        for asked in questions:
            ids = torch.tensor([asked.prompt + asked.answer[:-1]])
            logits = model.append(ids, reading.cache, chunk=chunk, prompt=False)[0]
            found.append(logits[len(asked.prompt) - 1 :].argmax(-1).tolist() == asked.answer)
            reading.cache.rewind(ids.shape[1])
    return found


def answers_in_prompt(
    model: CausalLM, context: list[int], questions: list[Asked], cut: Chunking | None, limits: Limits
) -> list[bool]:
    """Whether greedy decoding gives each answer where the question ends the prompt and is read as the rest of it is.

    This is what `generate` does. As many rows run at once as limits.tokens holds."""
    found: list[bool] = []
    size = max(1, limits.tokens // (len(context) + max(map(len, questions))))
    for at in range(0, len(questions), size):
        batch = questions[at : at + size]
        with cut_by(model, cut):
            cache = model.new_cache(len(batch), len(context) + max(map(len, batch)))
            ids, counts = ragged([context + asked.prompt for asked in batch])
            piece = limits.chunk if cut is None else cut.chunks(ids.shape[1]) * cut.chunk
            first = model.append(ids, cache, counts, logits="last", chunk=piece, prompt=True)[:, 0].argmax(-1).tolist()
            rest, counts = ragged([asked.answer[:-1] for asked in batch])
            said = (
                model.append(rest, cache, counts, prompt=False).argmax(-1).tolist()
                if any(counts)
                else [[]] * len(batch)
            )
        found += [[token, *more[:n]] == asked.answer for asked, token, more, n in zip(batch, first, said, counts)]
    return found


def ragged(rows: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """ids int64 [B, T] padded to the longest row, and each row's count."""
    counts = [len(row) for row in rows]
    return torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows], dtype=torch.int64), counts


def row(way: dict, kind: str, context: int, questions: list[Asked], hits: list[bool]) -> dict:
    """As JSON values, see `counted`. chance: of the best constant guess."""
    facts = kind == "facts"
    return (
        way
        | {"kind": kind, "context": context}
        | counted(hits)
        | {
            "chance": 1 / len(FACTS) if facts else chance_of_a_guess(),
            "depths": [] if facts else depths(questions, hits),
        }
    )
