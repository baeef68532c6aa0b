"""Needles and what they are hidden in: sentences that give a name a value, and text or looped filler of a given length.

The training rows of the demo checkpoint (scripts/training/rows.py) plant needles of the same kinds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
from tokenizers import Tokenizer

FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEAR = 64  # tokens before the wanted place in which a sentence's end is looked for
NUMBERS, LEAST, DIGITS = 0.75, 1000, (4, 6)  # of values: share of numbers, the least number, digits of the largest ones
FORMAT = (
    "one sentence such as ' The secret code of quiet otter is 48213.', somewhere in the context; the context ends "
    "with its first words, ' The secret code of quiet otter is', and every token of the value must be the argmax"
)
CHANCE = "10^-4 to 10^-6 for values of 4 to 6 digits (3/4 of the needles), below 10^-4 for two words (the rest)"

ADJECTIVES = """amber ancient arctic autumn bold brave brass bright broken bronze calm careful cheerful chilly clever \
cloudy
copper coral cosmic crimson crystal curious dancing daring dark deep distant dusty eager early eastern electric emerald
empty endless fading fallen famous fearless fierce fiery floating flying foggy forgotten fragile frozen gentle giant \
glass
gleaming golden graceful grand granite green grey happy hasty hidden hollow honest humble hungry icy indigo iron \
ivory jolly
keen kind laughing lazy leaden light little lively lonely lost loud loyal lucky lunar marble mellow merry mighty misty
modest mossy mystic narrow nimble noble northern obsidian odd old olive opal orange pale patient pearl polished proud \
purple
quick quiet radiant rapid rare red restless rising roaming rocky rosy rough royal ruby rustic rusty sacred sandy scarlet
secret serene shady sharp shining shy silent silver simple sleepy slender small smiling smoky snowy solar solid southern
spare spotted stark steady steel stormy strange sturdy subtle sunny swift tall tame tender tidy timid tiny topaz twin \
upper
urban vast velvet violet vivid wandering warm weary western white wild wise wooden yellow young zealous agile breezy \
dizzy
frosty grumpy hardy""".split()
NOUNS = """acorn anchor antler apple arrow badger bamboo banner barrel basket beacon bear beaver bell birch bison \
blossom
boulder bridge brook bucket butterfly button cabin cactus camel candle canyon captain castle cedar cherry clock cloud \
clover
comet compass coral cottage cougar crane creek cricket crow crown dagger daisy deer desert dolphin donkey dragon drum \
eagle
ember engine falcon feather fern ferry fiddle finch forest fossil fountain fox garden garnet gate gecko glacier goose \
grove
hammer harbor harp hawk hazel heron hill horizon horse iris island ivy jackal jaguar kettle kite lagoon lake lantern \
lark
laurel lemon leopard lighthouse lily lion lizard lobster lotus lynx magnet magpie mango maple marsh meadow meteor mill
mirror monkey moon moose mountain needle nest oak oasis ocean orchard orchid otter owl oyster paddle palace panda \
panther
parrot peach pebble pelican penguin pepper pigeon pilot pine planet plum pond poppy prairie puffin pumpkin quarry rabbit
raccoon raven reef ribbon ridge river robin rocket rose saddle sailor salmon sapling shadow shell shield shore signal
sparrow spider spring squirrel star stone stork stream summit sun swan table temple thistle thunder tiger tower trail \
tree
trumpet tulip tunnel turtle valley village violin walnut walrus wagon water wave whale wheel willow window wolf \
wombat wren
zebra""".split()
FIRST_NAMES = """Ada Alan Alice Amir Anna Anton Asha Ben Bruno Carla Carmen Cecil Clara Daniel Daria David Diego Dora \
Edgar
Elena Elias Emil Emma Erik Esther Eva Farah Felix Fiona Frank George Grace Greta Hana Hans Harold Helen Henry Hugo \
Ida Igor
Ines Irene Isaac Ivan Jack Jana Jonas Julia Karim Karl Kate Kenji Lara Laura Leo Lena Liam Linda Louis Lucas Lucy Maria
Marco Martin Maya Mei Milan Mina Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Petra Priya Ralph Rosa Ruth \
Sam Sara
Simon Sofia Stefan Tariq Thomas Tina Tom Ulrich Vera Victor Walter Wanda Yara Yusuf Zoe""".split()
LAST_NAMES = """Adams Alvarez Baker Barnes Becker Bell Berg Blake Brandt Brooks Bruno Carter Castro Chen Clark Cole Cook
Costa Cruz Dahl Diaz Dixon Drake Dubois Ellis Evans Fischer Flores Ford Foster Fox Garcia Gibson Grant Gray Green \
Haas Hall
Hansen Harris Hart Hayes Hill Hoffman Holt Hughes Hunt Ito James Jensen Jones Kaya Keller Kelly Khan Kim King Klein \
Knight
Kumar Lane Larsen Lee Lewis Lopez Lund Marsh Martin Mason Meyer Miller Moore Mori Morris Murphy Nash Nguyen Novak Olsen
Ortiz Owen Palmer Park Parker Patel Perez Peters Porter Price Quinn Reed Reyes Rossi Roth Ruiz Sato Schmidt Scott \
Shaw Silva
Singh Smith Stein Stone Suzuki Tanaka Taylor Torres Turner Vogel Wagner Walker Ward Weber West White Wilson Wolf Wood \
Wright
Yang Young Zhang""".split()


@dataclass(frozen=True)
class Template:
    """A kind of needle: `before` has {n} for the name and ends where " value" follows; `ask` is its question in
    full."""

    before: str
    ask: str
    end: str = "."

    def prompt(self, name: str) -> str:
        return self.before.format(n=name)

    def statement(self, name: str, value: str) -> str:
        return f"{self.prompt(name)} {value}{self.end}"

    def question(self, name: str) -> str:
        return f"\nQ: {self.ask.format(n=name)}\nA:"


TEMPLATES = [
    Template(" The secret code of {n} is", "What is the secret code of {n}?"),
    Template(" The magic number for {n} is", "What is the magic number for {n}?"),
    Template(" The password of {n} is", "What is the password of {n}?"),
    Template(" Remember that the key for {n} is", "What is the key for {n}?"),
    Template(" The access code assigned to {n} is", "Which access code is assigned to {n}?"),
    Template(" Note: the ticket number of {n} is", "What is the ticket number of {n}?"),
    Template(" The locker of {n} opens with", "What opens the locker of {n}?"),
    Template(" In the register, {n} is listed under", "What is {n} listed under in the register?"),
    Template(" The special magic value of {n} is:", "What is the special magic value of {n}?"),
    Template(" The agent known as {n} answers to", "What does the agent known as {n} answer to?"),
    Template(" The parcel for {n} carries the label", "Which label does the parcel for {n} carry?"),
    Template("\n# token for {n}:", "What is the token for {n}?", "\n"),
    Template('\nsettings["{n}"] =', 'What is the value of settings["{n}"]?', "\n"),
    Template("\n{n} =>", "What does {n} map to?", "\n"),
]


def person(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def thing(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def any_name(rng: Random) -> str:
    """An adjective and a noun (half), a person, or an id such as unit KX-4821: over 50,000 names of the first two
    alone."""
    choice = rng.random()
    if choice < 0.5:
        return thing(rng)
    if choice < 0.8:
        return person(rng)
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
    return f"{rng.choice(('unit', 'room', 'item', 'user'))} {letters}-{rng.randint(10, 9999)}"


def any_value(rng: Random) -> str:
    """4 to 6 digits (three quarters), or two words."""
    return str(rng.randrange(LEAST, 10 ** rng.randint(*DIGITS))) if rng.random() < NUMBERS else thing(rng)


def chance_of_a_guess() -> float:
    """Probability that the best constant guess is the value: a number of 4 digits, which all three ranges hold, or two
    words.

    The mean over lengths L of 1 / (10^L − 1000), times the share of numbers; words by the most frequent ones.
    """
    lengths = range(DIGITS[0], DIGITS[1] + 1)
    number = NUMBERS * sum(1 / (10**n - LEAST) for n in lengths) / len(lengths)
    words = [max(Counter(group).values()) / len(group) for group in (ADJECTIVES, NOUNS)]
    return max(number, (1 - NUMBERS) * words[0] * words[1])


@dataclass(frozen=True)
class Needle:
    """One needle's prompt (BOS + context + question) and answer, ids; its value, [start, end) of the prompt that states
    it, and how many tokens the question has."""

    prompt: list[int]
    answer: list[int]
    value: str
    stated: tuple[int, int]
    question: int


def needle_trial(
    rng: Random,
    tokenizer: Tokenizer,
    haystack_tokens: np.ndarray,
    length: int,
    depth: float,
    beyond: int = 0,
    bos: int | None = 0,
) -> tuple[list[int], list[int]]:
    """(prompt, answer) of `one_needle`."""
    found = one_needle(rng, tokenizer, haystack_tokens, length, depth, beyond, bos)
    return found.prompt, found.answer


def one_needle(
    rng: Random,
    tokenizer: Tokenizer,
    haystack_tokens: np.ndarray,
    length: int,
    depth: float,
    beyond: int = 0,
    bos: int | None = 0,
) -> Needle:
    """One needle in exactly `length` tokens of haystack, asked once, at the end.

    depth is the needle's relative place, 0 (start) to 1 (end), moved to a sentence's end before it if there is one
    nearby, and forward so far that at least `beyond` tokens lie between the needle and the question. The prompt ends
    right before the answer. A haystack longer than `length` gives a random run of it.
    """
    text = np.asarray(haystack_tokens)
    if len(text) < length or not 0 <= beyond <= length:
        raise ValueError(f"a haystack of {len(text)} tokens cannot give {length} with {beyond} behind the needle")
    begin = rng.randint(0, len(text) - length)
    text = text[begin : begin + length].tolist()
    template, name, value = rng.choice(TEMPLATES), any_name(rng), any_value(rng)
    place = min(round(depth * length), length - beyond)
    needle, question = (encode(tokenizer, text) for text in (template.statement(name, value), template.prompt(name)))
    start = [] if bos is None else [bos]
    found, (stated,) = plant(tokenizer, text, [needle], [place], len(start))
    return Needle([*start, *found, *question], encode(tokenizer, " " + value), value, stated, len(question))


def plant(
    tokenizer: Tokenizer, words: list[int], pieces: Sequence[list[int]], places: Sequence[int], before: int = 0
) -> tuple[list[int], list[tuple[int, int]]]:
    """(words with the pieces among them, [start, end) of each piece). places: ascending; each piece stands at a
    sentence's end at most NEAR tokens before its place if there is one, after the piece before it. before: tokens that
    stand before the words, which the positions count."""
    ends, found, spans, done = boundaries(tokenizer), [], [], 0
    for piece, place in zip(pieces, places, strict=True):
        place = next((p for p in range(place, max(done, place - NEAR), -1) if ends[words[p - 1]]), place)
        found += words[done:place]
        spans.append((before + len(found), before + len(found) + len(piece)))
        found += piece
        done = place
    return found + words[done:], spans


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a piece of text, without BOS."""
    return tokenizer.encode(text, add_special_tokens=False).ids


@lru_cache(maxsize=4)
def boundaries(tokenizer: Tokenizer, eos: int = 1) -> np.ndarray:
    """bool [vocab]: whether a sentence or a line may end with this token."""
    ends = np.zeros(tokenizer.get_vocab_size(), bool)
    for i in range(len(ends)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        ends[i] = i == eos or "\n" in text or text.endswith((".", "!", "?"))
    return ends


def filler(tokenizer: Tokenizer, length: int) -> np.ndarray:
    """int64 [length]: one group of sentences over and over, a haystack without any content."""
    return np.resize(np.array(encode(tokenizer, FILLER)), length)
