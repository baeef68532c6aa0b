"""Tasks with known answers, built as in RULER (arXiv 2404.06654), from words that ship with the project.

A task makes a prompt, the answers that count, and says where in the prompt they are stated. The single needle has a
context of the length asked for, its needle and question come on top. Of all others the length is that of BOS, context,
question and the tokens to generate together, as in RULER.

| task | RULER's | here |
|---|---|---|
| single | niah_single: one key, one value | a needle of any kind, in prose and in looped filler |
| multi-key | niah_multikey_1: 4 keys, one is asked | 4 needles of one kind |
| multi-value | niah_multivalue: 4 values of one key | all are asked |
| multi-query | niah_multiquery: 4 keys, all are asked | |
| tracking | vt: 1 chain of 4 hops in looped filler | which variables hold a value |
| common-words | cwe: 10 words 30 times, all others 3 times | less often in short contexts, in the same proportion |
| frequent-words | fwe: coded words by Zipf's law, α = 2, the first one noise | the law's own counts, rounded |

RULER puts a question to a chat model, with an example of common words. Here the prompt ends with the answer's first
words for a model that completes text, without an example, and no more tokens are generated than the answers need. Words
are an adjective and a noun with a hyphen, as its own keys are; it takes other single words for common ones.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4.errors import InputError, brief
from dsv4.probes.measure.base.asking import Asked
from dsv4.probes.measure.base.ground import Ground, different, to_generate
from dsv4.probes.measure.base.haystack import TEMPLATES, any_name, any_value, chance_of_a_guess, one_needle, plant
from dsv4.probes.measure.base.settings import QUESTION, check_least, refuse_idle
from dsv4.probes.measure.base.word_tasks import common_words, frequent_words

KEYS = VALUES = 4
CHAINS, HOPS, LETTERS = 1, 4, 5  # chains, copies of a value in each, letters of a variable's name


@dataclass(frozen=True)
class Task:
    """prose, looped: the haystacks that it is made in; neither: its own words. least: tokens of its shortest context,
    beside what lies beyond."""

    name: str
    make: Callable[[Ground], Asked]
    prose: bool = False
    looped: bool = False
    own: str = ""
    least: int = 256


# ---- needles --------------------------------------------------------------------------------


def single(ground: Ground) -> Asked:
    g = ground
    depth = g.depth * (g.length - g.beyond) / g.length
    found = one_needle(g.rng, g.tokenizer, g.text, g.length, depth, g.beyond, g.bos)
    return Asked(
        found.prompt,
        found.answer,
        depth,
        (found.value,),
        to_generate(found.answer),
        chance_of_a_guess(),
        (found.stated,),
        found.question,
    )


def multi_key(ground: Ground, keys: int = KEYS) -> Asked:
    """One of several needles of a kind. Chance: any of the values that are in the context."""
    rng, template = ground.rng, ground.rng.choice(TEMPLATES)
    names, values = different(any_name, rng, keys), different(any_value, rng, keys)
    wanted = rng.randrange(keys)
    depths = [ground.depth if i == wanted else rng.random() for i in range(keys)]
    statements = [template.statement(name, value) for name, value in zip(names, values)]
    question = template.prompt(names[wanted])
    return _planted(ground, statements, depths, question, {wanted: values[wanted]}, 1 / keys)


def multi_value(ground: Ground, count: int = VALUES) -> Asked:
    """All values of one key, in the order of the context."""
    rng, template, name = ground.rng, ground.rng.choice(TEMPLATES), any_name(ground.rng)
    values = different(any_value, rng, count)
    statements = [template.statement(name, value) for value in values]
    question = f"\nQ: {template.ask.format(n=name)} The text says {count}.\nA:"
    depths = sorted(rng.random() for _ in values)
    return _planted(ground, statements, depths, question, dict(enumerate(values)), chance_of_a_guess())


def multi_query(ground: Ground, keys: int = KEYS) -> Asked:
    """The values of several keys, in the order of the questions."""
    rng, template = ground.rng, ground.rng.choice(TEMPLATES)
    names, values = different(any_name, rng, keys), different(any_value, rng, keys)
    statements = [template.statement(name, value) for name, value in zip(names, values)]
    order = rng.sample(range(keys), keys)
    question = "\nQ: " + " ".join(template.ask.format(n=names[i]) for i in order) + "\nA:"
    depths = [rng.random() for _ in names]
    return _planted(ground, statements, depths, question, {i: values[i] for i in order}, chance_of_a_guess())


def _planted(
    ground: Ground,
    statements: Sequence[str],
    depths: Sequence[float],
    question: str,
    answers: dict[int, str],
    chance: float,
) -> Asked:
    """The statements at their depths, the question at the end. answers: by the statement that is evidence of each."""
    g, pieces, asked = ground, [ground.encode(text) for text in statements], ground.encode(question)
    answer = g.encode(" " + ", ".join(answers.values()))
    new = to_generate(answer)
    room = g.length - len(g.start) - sum(map(len, pieces)) - len(asked) - new
    words = g.run(room)
    if room <= g.beyond:
        raise InputError(
            f"{len(pieces)} statements in {g.length} tokens leave {room}, of which {g.beyond} lie behind the last; "
            "expected a longer context"
        )
    order = sorted(range(len(pieces)), key=lambda i: depths[i])
    places = [round(depths[i] * (room - g.beyond)) for i in order]
    context, spans = plant(g.tokenizer, words, [pieces[i] for i in order], places, len(g.start))
    stated = dict(zip(order, spans))
    evidence = tuple(stated[i] for i in answers)
    return Asked(
        [*g.start, *context, *asked],
        answer,
        min(start for start, _ in evidence) / g.length,
        tuple(answers.values()),
        new,
        chance,
        evidence,
        len(asked),
    )


# ---- chains of variables ---------------------------------------------------------------------


def tracking(ground: Ground, chains: int = CHAINS, hops: int = HOPS) -> Asked:
    """Variables that hold a value: one is given it, each further one copies the one before. Only the first chain is
    asked for. Chance: of as many names, any that are in the context; with one chain a guess of a name, as the names
    alone answer it then."""
    rng, length = ground.rng, hops + 1
    name = lambda rng: "".join(rng.choice(string.ascii_uppercase) for _ in range(LETTERS))
    names = different(name, rng, chains * length)
    values = different(lambda rng: str(rng.randint(10_000, 99_999)), rng, chains)
    statements = []
    for i, own in enumerate(names):
        chain, hop = divmod(i, length)
        statements.append(f" VAR {own} = {values[chain] if hop == 0 else 'VAR ' + names[i - 1]}.")
    depths = [depth for _ in range(chains) for depth in sorted(rng.random() for _ in range(length))]
    wanted = dict(enumerate(names[:length]))
    question = f"\nQ: Which variables hold the value {values[0]}?\nA: The {length} variables that hold {values[0]} are"
    chance = 1 / chains if chains > 1 else 26.0**-LETTERS
    return _planted(ground, statements, depths, question, wanted, chance)


TASKS = {
    task.name: task
    for task in (
        Task("single", single, prose=True, looped=True, least=0),
        Task("multi-key", multi_key, prose=True),
        Task("multi-value", multi_value, prose=True),
        Task("multi-query", multi_query, prose=True),
        Task("tracking", tracking, looped=True),
        Task("common-words", common_words, own="numbered list", least=1536),
        Task("frequent-words", frequent_words, own="coded words"),
    )
}


def settled(names: Sequence[str], together: int, needles: int) -> tuple[str, ...]:
    """Tasks that are asked, each once; none: single needles without generating.

    Raises InputError for an unknown task, and for options that would change nothing."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise InputError(f"--tasks has {brief(unknown[0])!r}; expected some of {', '.join(TASKS)}, separated by commas")
    check_least({"needles_a_haystack": together}, needles_a_haystack=1)
    if not needles:
        given = {"--tasks": names or None, "--needles-a-haystack": together if together > 1 else None}
        refuse_idle(given, "--needles 0; ask for some")
    if names and "single" not in names and together > 1:
        refuse_idle({"--needles-a-haystack": together}, "tasks other than single, which make a context for each")
    return tuple(dict.fromkeys(names))


def beyond_context(tasks: Sequence[str], together: int) -> int:
    """Tokens that a prompt, its answer and what is generated may have beyond the context that was asked for."""
    return 2 * QUESTION if together == 1 and (not tasks or "single" in tasks) else 0
