"""Tasks whose evidence is every word of a list: which words come up most often (`dsv4.probes.measure.base.tasks`)."""

import string
from bisect import bisect_right
from collections.abc import Sequence
from random import Random

import numpy as np

from dsv4.errors import InputError
from dsv4.probes.measure.base.asking import Asked
from dsv4.probes.measure.base.ground import Ground, different, to_generate
from dsv4.probes.measure.base.haystack import ADJECTIVES, NOUNS

COMMON, OFTEN, SELDOM = 10, 30, 3  # words that are asked for, how often they stand in the list, how often others do
ALPHA, ZETA, FREQUENT, CODED = 2.0, np.pi**2 / 6, 3, 6  # of Zipf's law, ζ(2), words asked for, letters of a word
NOISE = " ..."


def pairs(rng: Random, count: int) -> list[str]:
    """Different words, each an adjective and a noun with a hyphen."""
    found = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in found]


def common_words(ground: Ground) -> Asked:
    """A numbered list, in which COMMON words stand ten times as often as all others: 30 times, or 20, or 10 where those
    would take more than two thirds of the context."""
    g = ground
    head = g.encode("\nA numbered list of words follows. Some of them come up much more often than the others.\n")
    asked = g.encode(
        f"\nQ: Which {COMMON} words come up most often in the list?\nA: The {COMMON} words that come up most often are"
    )
    pool = pairs(g.rng, min(len(ADJECTIVES) * len(NOUNS), COMMON + g.length // (2 * SELDOM)))
    sizes = [len(g.encode(f" {word}")) for word in pool]
    answer = max(len(g.encode(" " + ", ".join(pool[:COMMON]))), 1)
    room = g.length - len(g.start) - len(head) - len(asked) - to_generate(range(answer + COMMON))
    numbers = np.cumsum([len(g.encode(f" {i + 1}.")) for i in range(max(1, room // 3))])
    seldom = next((s for s in range(SELDOM, 1, -1) if _list_tokens(sizes, numbers, COMMON, s) < room * 2 / 3), 1)
    others = COMMON
    while others < len(pool) and _list_tokens(sizes, numbers, others + 1, seldom) <= room:
        others += 1
    often = seldom * OFTEN // SELDOM
    items = [w for i, w in enumerate(pool[:others]) for _ in range(often if i < COMMON else seldom)]
    g.rng.shuffle(items)
    wanted = list(dict.fromkeys(w for w in items if w in set(pool[:COMMON])))
    pieces = [g.encode(f" {i + 1}.") + g.encode(f" {word}") for i, word in enumerate(items)]
    return _listed(g, head, pieces, items, asked, wanted, COMMON / others)


def _list_tokens(sizes: Sequence[int], numbers: np.ndarray, words: int, seldom: int) -> float:
    """Tokens of a list of the first `words` words; infinite beyond the numbers that were counted."""
    often = seldom * OFTEN // SELDOM
    items = often * COMMON + seldom * (words - COMMON)
    if items > len(numbers):
        return float("inf")
    return often * sum(sizes[:COMMON]) + seldom * sum(sizes[COMMON:words]) + int(numbers[items - 1])


def frequent_words(ground: Ground) -> Asked:
    """Coded words by Zipf's law, the most frequent of which is noise: the three after that are asked for."""
    g, rng = ground, ground.rng
    head = g.encode("\nA coded text follows, in which some words come up more often than others.\n")
    asked = g.encode(
        f"\nQ: Which {FREQUENT} coded words come up most often, dots left aside?\nA: The {FREQUENT} coded words that "
        "come up most often are"
    )
    letters = lambda rng: "".join(rng.choice(string.ascii_lowercase) for _ in range(CODED))
    pool = different(letters, rng, int(np.sqrt(2 * g.length / ZETA)) + FREQUENT + 1)
    sizes = [len(g.encode(NOISE)), *(len(g.encode(f" {word}")) for word in pool)]
    room = g.length - len(g.start) - len(head) - len(asked)
    room -= to_generate(range(sum(sizes[1 : FREQUENT + 1]) + 2 * FREQUENT))
    total = lambda n: sum(count * size for count, size in zip(zipf(n), sizes))
    counts = zipf(bisect_right(range(1, max(2, room)), room, key=total))  # the most words that there is room for
    items = [w for w, count in zip([NOISE.strip(), *pool], counts) for _ in range(count)]
    rng.shuffle(items)
    pieces = [g.encode(f" {word}") for word in items]
    wanted = pool[:FREQUENT]
    if len(counts) < FREQUENT + 2 or counts[FREQUENT] <= counts[FREQUENT + 1]:
        raise InputError(f"{g.length} tokens hold too few coded words to tell the most frequent; expected more")
    return _listed(g, head, pieces, items, asked, wanted, FREQUENT / (len(counts) - 1))


def zipf(words: int) -> list[int]:
    """How often each word stands among `words`, the most frequent first: words/(ζ(2)·k²), rounded."""
    found = []
    for k in range(1, words + 1):
        count = round(words / (ZETA * k**ALPHA))
        if not count:
            break
        found.append(count)
    return found


def _listed(
    ground: Ground,
    head: list[int],
    pieces: Sequence[list[int]],
    items: Sequence[str],
    asked: list[int],
    wanted: Sequence[str],
    chance: float,
) -> Asked:
    """Text, the head, the pieces, the question. items: what each piece states; wanted: the answers among them."""
    g, answer = ground, ground.encode(" " + ", ".join(wanted))
    new = to_generate(answer)
    rest = g.length - len(g.start) - len(head) - sum(map(len, pieces)) - len(asked) - new
    ids, evidence, mine = [*g.start, *g.run(rest), *head], [], set(wanted)
    for piece, item in zip(pieces, items, strict=True):
        if item in mine:
            evidence.append((len(ids), len(ids) + len(piece)))
        ids += piece
    first = evidence[0][0] / g.length
    return Asked([*ids, *asked], answer, first, tuple(wanted), new, chance, tuple(evidence), len(asked))
