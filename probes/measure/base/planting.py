"""One context with many needles, each asked by itself."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
from tokenizers import Tokenizer

from dsv4.errors import InputError
from dsv4.probes.measure.base.asking import Asked
from dsv4.probes.measure.base.haystack import TEMPLATES, any_name, any_value, chance_of_a_guess, encode, plant


@dataclass(frozen=True)
class Planted:
    """context: ids, BOS first; questions: prompts without the context, answers, depths 0 … 1 of what states them, and
    where in `context` that stands."""

    context: list[int]
    questions: list[Asked]

    def asked(self, number: int) -> list[Asked]:
        """Whole prompts, which share this context under a number."""
        shared = number, len(self.context)
        return [replace(q, prompt=self.context + q.prompt, context=shared) for q in self.questions]


def planted(
    tokenizer: Tokenizer, text: np.ndarray, length: int, count: int, beyond: int, bos: int | None, seed: int | str
) -> Planted:
    """`count` needles of different names, at depths spread evenly, in a context of exactly `length` tokens; at least
    `beyond` tokens follow the last. Each stands at a sentence's end, if there is one nearby. Raises InputError for a
    context or a text too short for that."""
    rng = Random(f"{seed}:{length}:{count}")
    names: dict[str, None] = {}
    while len(names) < count:
        names.setdefault(any_name(rng))
    stated = [(rng.choice(TEMPLATES), name, any_value(rng)) for name in names]
    needles = [encode(tokenizer, template.statement(name, value)) for template, name, value in stated]
    room = length - sum(map(len, needles)) - (bos is not None)
    if room <= beyond or len(text) < room:
        raise InputError(
            f"{count} needles in {length} tokens leave {room} to fill from a text of {len(text)}; expected more than "
            f"the {beyond} behind the last needle, and no more than the text has: fewer --needles, another "
            "context, or a longer --text"
        )
    begin = rng.randint(0, len(text) - room)
    places = [round((i + 0.5) / count * (room - beyond)) for i in range(count)]
    start = [] if bos is None else [bos]
    found, spans = plant(tokenizer, text[begin : begin + room].tolist(), needles, places, len(start))
    questions = []
    for (template, name, value), (at, end) in zip(stated, spans):
        prompt, answer = encode(tokenizer, template.prompt(name)), encode(tokenizer, f" {value}")
        questions.append(
            Asked(
                prompt,
                answer,
                at / length,
                (value,),
                chance=chance_of_a_guess(),
                evidence=((at, end),),
                question=len(prompt),
            )
        )
    return Planted([*start, *found], questions)
