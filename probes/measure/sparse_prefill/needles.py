"""Needles and facts, asked after a prompt that was read sparsely: many needles in one context, each asked by itself.

The context is read once for each way of reading; a question is appended, answered by teacher forcing, and forgotten
again.
"""

import torch
from tokenizers import Tokenizer

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base.asking import Asked, Limits
from dsv4.probes.measure.base.haystack import chance_of_a_guess, encode
from dsv4.probes.measure.base.needles import counted, depths
from dsv4.probes.measure.base.planting import Planted as Planted
from dsv4.probes.measure.base.planting import planted as planted
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
