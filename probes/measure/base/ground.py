"""What tasks are made in, and what they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from dsv4.errors import InputError
from dsv4.probes.measure.base.haystack import encode


@dataclass(frozen=True)
class Ground:
    """What a trial is made in: text int64 [tokens], of which a run is used; length: tokens; beyond: tokens between
    the evidence and the question at least; depth: where the evidence stands if it is one piece, 0 … 1 of all places
    that leave so many."""

    rng: Random
    tokenizer: Tokenizer
    text: np.ndarray
    length: int
    depth: float
    beyond: int
    bos: int | None

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    @property
    def start(self) -> list[int]:
        return [] if self.bos is None else [self.bos]

    def run(self, tokens: int) -> list[int]:
        """A random run of the text. Raises InputError for one too short."""
        if tokens < 0 or len(self.text) < tokens:
            raise InputError(
                f"a task of {self.length} tokens leaves {tokens} to fill from a text of {len(self.text)}; expected "
                "none less than 0, and no more than the text has: another context, or a longer --text"
            )
        begin = self.rng.randint(0, len(self.text) - tokens)
        return self.text[begin : begin + tokens].tolist()


def to_generate(answer: Sequence[int]) -> int:
    """Tokens that are generated for an answer: half as many more, and a few."""
    return len(answer) * 3 // 2 + 8


def different(make: Callable[[Random], str], rng: Random, count: int) -> list[str]:
    """Strings none of which is part of another, so that finding one in a text finds no other."""
    found: list[str] = []
    while len(found) < count:
        one = make(rng)
        if not any(one.lower() in other.lower() or other.lower() in one.lower() for other in found):
            found.append(one)
    return found
