"""Training rows: plain text, and text with things to find again (needles, employers, spans), at every distance.

A row is ids uint16 [length + 1] and weight float32 [length + 1]; weight[i] belongs to ids[i] as a target, so a trainer
reads ids[:-1], predicts ids[1:] and weighs with weight[1:]. Row `index` of a seed is the same wherever and whenever it
is made.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from dsv4.probes.measure.base.haystack import TEMPLATES, Template, any_name, any_value, boundaries, person, thing
from scripts.training.facts import sentences
from scripts.training.tokenizer import BOS_ID, EOS_ID

VALUE_WEIGHT, SPAN_WEIGHT = 6.0, 3.0
CHUNK = re.compile(r" ?\S+|\s")
EMPTY = np.zeros(0, np.uint16)


@dataclass(frozen=True)
class Hop:
    """An employer's attribute, stated by `prompt` and the value, and asked by way of an employee in `question`."""

    prompt: str
    question: str


EMPLOYMENTS = [" {a} works for {b}.", " {a} is employed by {b}.", " The employer of {a} is {b}."]
HOPS = [
    Hop(" The door code of {b} is", " The door code of {a}'s employer is"),
    Hop(" The account number of {b} is", " The account number of {a}'s employer is"),
    Hop(" The password of {b} is", " The password of {a}'s employer is"),
    Hop(" The key for {b} is", "\nQ: What is the key for {a}'s employer?\nA:"),
]


def distinct(make: Callable[[Random], str], count: int, rng: Random) -> list[str]:
    """`count` different results of `make`."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(make(rng))
    return list(found)


@dataclass(frozen=True)
class Mixture:
    """Probabilities of the kinds of row, then choices within a kind."""

    text: float = 0.45
    needles: float = 0.40
    facts: float = 0.05
    hops: float = 0.05
    copies: float = 0.05
    prose_in_text: float = 0.3
    facts_first: float = 0.5  # text rows that open with a few facts
    prose_in_haystack: float = 0.4
    asked_early: float = 0.3  # share of needles that are asked once more between the needle and the row's end
    question_form: float = 0.3  # "Q: ...?\nA:" rather than the needle's own words


@dataclass(frozen=True)
class Piece:
    """Tokens that belong together, and each one's weight as a target."""

    ids: list[int]
    weight: list[float]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Item:
    """Something planted in a row: what states it (one piece or two), and the questions that ask for it."""

    statements: list[Piece]
    early: list[Piece]
    late: list[Piece]

    def __len__(self) -> int:
        return sum(map(len, self.statements + self.early + self.late))


class Encoder:
    """Encodes short texts from cached chunks that the tokenizer never merges across: a word with its space, a line
    break."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for chunk in CHUNK.findall(text):
            ids += self.known.get(chunk) or self._learn(chunk)
        return ids

    def _learn(self, chunk: str) -> list[int]:
        if len(self.known) > 100_000:  # values seldom come again, and a run sees millions
            self.known.clear()
        self.known[chunk] = self.tokenizer.encode(chunk, add_special_tokens=False).ids
        return self.known[chunk]

    def piece(self, *parts: tuple[str, float]) -> Piece:
        """A piece from (text, weight) parts. Parts must start where a chunk does, or at punctuation."""
        ids, weight = [], []
        for text, value in parts:
            new = self(text)
            ids += new
            weight += [value] * len(new)
        return Piece(ids, weight)


def plain(ids: list[int], weight: float = 1.0) -> Piece:
    return Piece(ids, [weight] * len(ids))


class Rows:
    """Rows of `length` + 1 tokens from a corpus folder (see scripts.training.corpus)."""

    def __init__(self, corpus_dir: Path, seed: int, length: int, split: str = "train", mixture: Mixture = Mixture()):
        self.seed, self.length, self.split, self.mixture = seed, length, split, mixture
        self.tokenizer = load_tokenizer(corpus_dir)
        self.encode = Encoder(self.tokenizer)
        with np.load(Path(corpus_dir) / "tokens.npz") as stored:
            self.streams = {kind: stored[f"{kind}_{split}_tokens"] for kind in ("prose", "code")}
            self.starts = {kind: stored[f"{kind}_{split}_starts"] for kind in ("prose", "code")}
        self.boundary = boundaries(self.tokenizer)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids uint16 [length + 1], weight float32 [length + 1]) of row `index`."""
        rng = Random(f"{self.seed}:{self.split}:{index}")
        mixture = self.mixture
        kinds = {
            "text": mixture.text,
            "needles": mixture.needles,
            "facts": mixture.facts,
            "hops": mixture.hops,
            "copies": mixture.copies,
        }
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        return self.row_of(kind, rng)

    def row_of(self, kind: str, rng: Random) -> tuple[np.ndarray, np.ndarray]:
        """A row of one kind: text, needles, facts, hops or copies."""
        if kind == "text":
            kind = "prose" if rng.random() < self.mixture.prose_in_text else "code"
            opening = self._opening(rng) if rng.random() < self.mixture.facts_first else EMPTY
            return self._finish([opening, self.span(kind, self.length - len(opening), rng)], [])
        if kind == "facts":
            return self._facts_row(rng)
        return self._planted_row(kind, rng)

    def span(self, kind: str, n: int, rng: Random) -> np.ndarray:
        """n tokens of `kind`: runs of neighbouring documents (EOS between them), from random places.

        Documents are stored in the order of their names, so that a run goes on in the same package. Half of the spans
        are one run, which is where long-range structure comes from; the others change the subject every 200 to 2,000
        tokens.
        """
        stream, starts = self.streams[kind], self.starts[kind]
        if not len(stream):
            kind = "code" if kind == "prose" else "prose"
            stream, starts = self.streams[kind], self.starts[kind]
        longest = n if rng.random() < 0.5 else rng.randint(200, 2000)
        parts, left = [], n
        while left > 0:
            begin = rng.randrange(len(stream))
            if rng.random() < 0.5:
                begin = int(starts[np.searchsorted(starts, begin, side="right") - 1])
            part = stream[begin : begin + min(left, longest)]
            parts.append(part)
            left -= len(part)
            if left > 0 and part[-1] != EOS_ID:
                parts.append(np.array([EOS_ID], np.uint16))
                left -= 1
        return np.concatenate(parts)

    def haystack(self, n: int, rng: Random) -> np.ndarray:
        """n tokens, of prose or code."""
        return (
            self.span("prose" if rng.random() < self.mixture.prose_in_haystack else "code", n, rng) if n > 0 else EMPTY
        )

    def _planted_row(self, kind: str, rng: Random) -> tuple[np.ndarray, np.ndarray]:
        """Text with items at random places, each asked at the row's end, and some of them before."""
        count = item_count(self.length, rng)
        if kind == "needles":
            items = self._needles(count, rng)
        elif kind == "hops":
            people, employers = (distinct(make, max(1, count // 2), rng) for make in (person, thing))
            items = [self._hop(a, b, rng) for a, b in zip(people, employers)]
        else:
            items = [self._copy(name, rng) for name in distinct(any_name, max(1, count // 2), rng)]
        while sum(map(len, items)) > 0.9 * self.length and items:
            items.pop()
        room = self.length - sum(map(len, items))
        text = self.haystack(room, rng)
        cuts = [i + 1 for i in np.flatnonzero(self.boundary[text]).tolist()]
        inserts = []  # (place in the text, order, piece); the order keeps an early question behind its statement
        for item in items:
            last = 0
            for statement in item.statements:
                place = self._place(cuts, 0, room, rng)
                last = max(last, place)
                inserts.append((place, 0, rng.random(), statement))
            inserts += [(self._place(cuts, last, room, rng), 1, rng.random(), question) for question in item.early]
        inserts.sort(key=lambda insert: insert[:3])
        ending = [question for item in items for question in item.late]
        rng.shuffle(ending)
        return self._finish(
            [text], [(place, piece) for place, _, _, piece in inserts] + [(room, piece) for piece in ending]
        )

    @staticmethod
    def _place(cuts: list[int], low: int, high: int, rng: Random) -> int:
        """A place in low..high: mostly after a sentence or line (`cuts`, ascending), sometimes between any two
        tokens."""
        place = rng.randint(low, high)
        if cuts and rng.random() < 0.75:
            at = bisect_left(cuts, place)
            place = cuts[at] if at < len(cuts) else place
        return place

    def _needles(self, count: int, rng: Random) -> list[Item]:
        """`count` needles of distinct names; in half of the rows all use one template: only the name tells them
        apart."""
        same = rng.choice(TEMPLATES) if rng.random() < 0.5 else None
        return [
            self._needle(same or rng.choice(TEMPLATES), name, any_value(rng), rng)
            for name in distinct(any_name, count, rng)
        ]

    def _needle(self, template: Template, name: str, value: str, rng: Random) -> Item:
        early = [self._question(template, name, value, rng)] if rng.random() < self.mixture.asked_early else []
        return Item(
            [plain(self.encode(template.statement(name, value)))], early, [self._question(template, name, value, rng)]
        )

    def _question(self, template: Template, name: str, value: str, rng: Random) -> Piece:
        prompt = template.question(name) if rng.random() < self.mixture.question_form else template.prompt(name)
        return self.encode.piece((prompt, 1.0), (" " + value, VALUE_WEIGHT), (template.end, 1.0))

    def _hop(self, employee: str, employer: str, rng: Random) -> Item:
        """Two statements, and a question that needs both."""
        hop, value = rng.choice(HOPS), any_value(rng)
        first = rng.choice(EMPLOYMENTS).format(a=employee, b=employer)
        question = self.encode.piece((hop.question.format(a=employee), 1.0), (" " + value, VALUE_WEIGHT), (".", 1.0))
        direct = self.encode.piece((hop.prompt.format(b=employer), 1.0), (" " + value, VALUE_WEIGHT), (".", 1.0))
        early = [direct] if rng.random() < self.mixture.asked_early else []
        second = f"{hop.prompt.format(b=employer)} {value}."
        return Item([plain(self.encode(first)), plain(self.encode(second))], early, [question])

    def _copy(self, name: str, rng: Random) -> Item:
        """A marked span of 8 to 24 tokens of text, to be repeated."""
        span = self.haystack(rng.randint(8, 24), rng)
        span = span[span != EOS_ID].tolist()
        head, tail = self.encode(f" <<{name}:"), self.encode(">>")
        asked = Piece(head + span + tail, [1.0] * len(head) + [SPAN_WEIGHT] * len(span) + [1.0] * len(tail))
        return Item([plain(head + span + tail)], [], [asked])

    def _facts_row(self, rng: Random) -> tuple[np.ndarray, np.ndarray]:
        """Runs of text and of fact sentences in turn, about half of each."""
        opening = self._opening(rng)
        parts, left = [opening], self.length - len(opening)
        while left > 0:
            parts.append(self.haystack(rng.randint(20, 200), rng))
            facts = [self.encode(rng.choice((" ", "\n")) + sentences(rng)) for _ in range(rng.randint(3, 12))]
            parts.append(np.array([i for ids in facts for i in ids], np.uint16))
            left -= len(parts[-2]) + len(parts[-1])
        return self._finish([np.concatenate(parts)[: self.length]], [])

    def _opening(self, rng: Random) -> np.ndarray:
        """One to three facts as a document of their own: a prompt stands right behind BOS, too."""
        text = rng.choice((" ", "\n")).join(sentences(rng) for _ in range(rng.randint(1, 3)))
        return np.array([*self.encode(text), EOS_ID], np.uint16)[-self.length :]

    def _finish(self, texts: list[np.ndarray], inserts: list[tuple[int, Piece]]) -> tuple[np.ndarray, np.ndarray]:
        """BOS, then the text with the pieces inserted at their (ascending) places; exactly length + 1 tokens."""
        text = np.concatenate(texts)
        ids, weights, done = [np.array([BOS_ID], np.uint16)], [np.ones(1, np.float32)], 0
        for place, piece in inserts:
            ids += [text[done:place], np.array(piece.ids, np.uint16)]
            weights += [np.ones(place - done, np.float32), np.array(piece.weight, np.float32)]
            done = place
        ids.append(text[done:])
        weights.append(np.ones(len(text) - done, np.float32))
        return np.concatenate(ids), np.concatenate(weights)


def load_tokenizer(corpus_dir: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(Path(corpus_dir) / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def item_count(length: int, rng: Random) -> int:
    """4 to 8 items in a row of 1,024 tokens or fewer, as far as they fit; up to 24 in a long one."""
    most = min(24, round(8 * max(1.0, length / 1024) ** 0.5), max(1, length // 80))
    return rng.randint(min(4, most), most)
