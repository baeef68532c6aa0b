"""Tasks as in RULER: what is planted, counted and chained is what the answers say, in a prompt of exactly the length
asked for."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dsv4.engine.generate import generate
from dsv4.errors import ContextOverrun, InputError
from dsv4.kernels.block_choice import dense, sink_window, snapkv
from dsv4.model.tokenizer import Tokenizer
from dsv4.probes.measure.base import needles, word_tasks
from dsv4.probes.measure.base.asking import AS_IT_IS, DECODED, Asked, Limits, Said, said_by
from dsv4.probes.measure.base.ground import Ground, different
from dsv4.probes.measure.base.haystack import encode, filler
from dsv4.probes.measure.base.planting import planted
from dsv4.probes.measure.base.tasks import TASKS, beyond_context, settled, tracking
from dsv4.probes.measure.base.variants import of_policy
from tests.texts import PROSE

DEMO = Path(__file__).resolve().parents[2] / "demo_gqa"
LENGTH, BEYOND = 2048, 512
NEW = [name for name in TASKS if name != "single"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO, 4096).backend


@pytest.fixture(scope="module")
def prose(tokenizer):
    return np.resize(np.array(encode(tokenizer, PROSE)), 2 * LENGTH)


def ground(tokenizer, text, seed=0, length=LENGTH, depth=0.3):
    return Ground(Random(seed), tokenizer, text, length, depth, BEYOND, 0)


@pytest.fixture(params=NEW)
def task(request):
    return TASKS[request.param]


def context_of(asked: Asked, tokenizer) -> str:
    return tokenizer.decode(asked.prompt[1 : len(asked.prompt) - asked.question])


def question_of(asked: Asked, tokenizer) -> str:
    return tokenizer.decode(asked.prompt[len(asked.prompt) - asked.question :])


# ---- an independent solver of each task, from the prompt's text alone ------------------------------


def solve_tracking(context: str, question: str) -> set[str]:
    held, value = {}, re.search(r"value (\d+)", question)[1]
    for name, of in re.findall(r"VAR ([A-Z]+) = (?:VAR )?([A-Z]+|\d+)\.", context):
        held[name] = held.get(of, of)
    return {name for name, of in held.items() if of == value}


def solve_common(context: str, question: str) -> set[str]:
    counted = Counter(re.findall(r"\d+\. ([a-z]+-[a-z]+)", context))
    return {word for word, _ in counted.most_common(int(re.search(r"Which (\d+) words", question)[1]))}


def solve_frequent(context: str, question: str) -> set[str]:
    counted = Counter(context.rpartition("than others.\n")[2].split())
    del counted["..."]
    return {word for word, _ in counted.most_common(3)}


def solve_values(context: str, question: str) -> set[str]:
    """Values stated in sentences whose words, apart from the value, the question has too."""
    found = set()
    for asked in re.findall(r"[^?\n]+\?", question) or [question]:
        for template in needles_templates():
            name = re.fullmatch(r"\s*(?:Q:\s*)?" + re.escape(template.ask).replace(r"\{n\}", "(.+)"), asked)
            name = name or re.fullmatch(re.escape(template.before).replace(r"\{n\}", "(.+)"), asked)
            if name:
                stated = re.escape(template.prompt(name[1])) + " (.+?)" + re.escape(template.end)
                found |= set(re.findall(stated, context))
    return found


def needles_templates():
    from dsv4.probes.measure.base.haystack import TEMPLATES

    return TEMPLATES


SOLVERS = {"tracking": solve_tracking, "common-words": solve_common, "frequent-words": solve_frequent}


def flaws(asked: Asked, tokenizer, task, length=LENGTH) -> list[str]:
    """What is wrong with a trial: its length, its answers, where its evidence stands."""
    found, end = [], len(asked.prompt) - asked.question
    if len(asked.prompt) + asked.new != length:
        found.append("length")
    solver = SOLVERS.get(task.name, solve_values)
    if solver(context_of(asked, tokenizer), question_of(asked, tokenizer)) != set(asked.answers):
        found.append("answers")
    if any(not 1 <= start < stop <= end for start, stop in asked.evidence):
        found.append("evidence outside of the context")
    elif any(sum(a in tokenizer.decode(asked.prompt[s:e]) for s, e in asked.evidence) < 1 for a in asked.answers):
        found.append("evidence")
    if not task.own and end - max(stop for _, stop in asked.evidence) < BEYOND:
        found.append("near")
    if tokenizer.decode(asked.answer).strip() != ", ".join(asked.answers):
        found.append("answer tokens")
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_trial_is_solved_by_its_text_and_as_long_as_asked(task, tokenizer, prose, seed):
    text = prose if task.prose or task.own else filler(tokenizer, LENGTH)
    asked = task.make(ground(tokenizer, text, seed))
    assert flaws(asked, tokenizer, task) == []
    assert asked == task.make(ground(tokenizer, text, seed)) != task.make(ground(tokenizer, text, seed + 100))
    assert len(asked.answer) < asked.new and 0 < asked.chance < 0.3


PLANTED = {
    "a wrong answer key": ("answers", lambda a: replace(a, answers=("nothing-of-it", *a.answers[1:]))),
    "an answer too few": ("answers", lambda a: replace(a, answers=a.answers + ("nothing-of-it",))),
    "evidence in the question": (
        "evidence outside of the context",
        lambda a: replace(a, evidence=((len(a.prompt) - 2, len(a.prompt)),)),
    ),
    "evidence a sentence early": ("evidence", lambda a: replace(a, evidence=tuple((1, 3) for _ in a.evidence))),
    "a token too many": ("length", lambda a: replace(a, new=a.new + 1)),
    "tokens of another answer": ("answer tokens", lambda a: replace(a, answer=a.answer[:-1])),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_a_trial_is_seen(task, tokenizer, prose, fault):
    wrong, plant = PLANTED[fault]
    text = prose if task.prose or task.own else filler(tokenizer, LENGTH)
    assert wrong in flaws(plant(task.make(ground(tokenizer, text))), tokenizer, task)


def test_evidence_near_the_question_is_seen(tokenizer, prose):
    asked = TASKS["multi-key"].make(replace(ground(tokenizer, prose, depth=1.0), beyond=0))
    assert "near" in flaws(asked, tokenizer, TASKS["multi-key"])


def test_several_chains_are_told_apart(tokenizer, prose):
    asked = tracking(ground(tokenizer, prose), chains=3, hops=2)
    context = context_of(asked, tokenizer)
    assert len(re.findall(r"VAR [A-Z]+ = ", context)) == 9 and len(asked.answers) == 3 and asked.chance == 1 / 3
    assert solve_tracking(context, question_of(asked, tokenizer)) == set(asked.answers)
    values = re.findall(r"VAR [A-Z]+ = (\d+)\.", context)
    assert len(values) == 3 and solve_tracking(context, f"value {values[0]}") != solve_tracking(
        context, f"value {values[1]}"
    )


def test_words_stand_as_often_as_published(tokenizer, prose):
    """Common words ten times as often as others; coded words by n / (ζ(2)·k²), the noise first."""
    asked = TASKS["common-words"].make(ground(tokenizer, prose))
    counted = Counter(re.findall(r"\d+\. ([a-z]+-[a-z]+)", context_of(asked, tokenizer)))
    assert set(counted.values()) == {10, 1} and {w for w, n in counted.items() if n == 10} == set(asked.answers)
    numbers = [int(n) for n in re.findall(r"(\d+)\. [a-z]+-[a-z]+", context_of(asked, tokenizer))]
    assert numbers == list(range(1, len(numbers) + 1)) and len(asked.evidence) == 100
    assert asked.chance == pytest.approx(10 / len(counted))
    long = TASKS["common-words"].make(ground(tokenizer, np.resize(prose, 9000), length=8192))
    assert set(Counter(re.findall(r"\d+\. ([a-z]+-[a-z]+)", context_of(long, tokenizer))).values()) == {30, 3}
    asked = TASKS["frequent-words"].make(ground(tokenizer, prose))
    words = context_of(asked, tokenizer).rpartition("than others.\n")[2].split()
    counts = [n for _, n in Counter(words).most_common()]
    n = next(n for n in range(1, 2000) if word_tasks.zipf(n) == counts)
    assert counts[:4] == [round(n * 6 / np.pi**2 / k**2) for k in (1, 2, 3, 4)] and asked.answers == tuple(
        w for w, _ in Counter(words).most_common(4)[1:]
    )


def test_strings_are_no_parts_of_each_other():
    found = different(lambda rng: str(rng.randrange(100)), Random(0), 40)
    assert not any(a in b for a in found for b in found if a is not b)


def test_too_short_contexts_are_refused(tokenizer, prose):
    for name, length in (("multi-key", 560), ("common-words", 700), ("frequent-words", 120)):
        with pytest.raises(InputError, match="tokens"):
            TASKS[name].make(ground(tokenizer, prose, length=length))


def test_recall_is_the_share_of_answers_that_were_generated(tokenizer):
    ids = lambda text: encode(tokenizer, text)
    asked = [Asked([0], ids(" a"), answers=("Red", "blue"), chance=0.25)] * 2
    said = [Said([], ids(" it is red, not BLUE")), Said([], ids(" green and blue"))]
    found = needles.recalled(tokenizer, asked, said, said)
    assert (found["recall"], found["answers"], found["answers_found"], found["solved"]) == (0.75, 4, 3, False)
    assert needles.recalled(tokenizer, asked * 4, said * 4, said * 4)["solved"] is True
    none = needles.recalled(tokenizer, asked, [Said([], [])] * 2, said)
    assert (none["recall"], none["recall_full"]) == (0, 0.75)
    (note,) = needles.unsolved([found | {"task": "tracking", "haystack": "x", "context": 9}] * 2)
    assert "not solved by full attention (recall 0.75, chance 0.2): says nothing about the rule" in note


def test_which_tasks_are_asked():
    assert settled([], 1, 5) == settled([], 1, 0) == settled([], 100, 5) == ()
    assert settled(["tracking", "single", "tracking"], 1, 5) == ("tracking", "single")
    assert (
        beyond_context((), 1) == beyond_context(("single",), 1) == 128
        and beyond_context(("single",), 9) == beyond_context((), 9) == 0
    )
    for given, said in (
        ((["needle"], 1, 5), "--tasks has 'needle'; expected some of single"),
        ((["single"], 1, 0), "--tasks would change nothing of --needles 0"),
        (([], 0, 5), "--needles-a-haystack 0: expected at least 1"),
        ((["tracking"], 9, 5), "--needles-a-haystack would change nothing of tasks other than single"),
    ):
        with pytest.raises(InputError, match=said):
            settled(*given)


# ---- many needles of one context -------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(gqa, gqa_path):
    tokenizer = Tokenizer(gqa_path, 384).backend
    text = np.resize(np.array(encode(tokenizer, PROSE)), 1000)
    asked = planted(tokenizer, text, 700, 5, 200, 0, 0).asked(0)
    # what a random model says is no value: answers of its own, so that teacher forcing goes on past the first token
    return [replace(a, new=6, answer=a.answer + [1]) for a in asked]


WAYS = {"dense": dense(), "sink": sink_window(64, block=16)}


def test_needles_of_one_context_are_answered_as_one_by_one(gqa, many):
    """Prefilled once for all, in other pieces, rewound between questions and between ways: the same tokens."""
    ways = {name: lambda cache, p=p: of_policy(p).resumed(gqa, cache) for name, p in WAYS.items()}
    prefilled, append = [], type(gqa).append

    def counting(model, ids, cache, *rest, **more):
        prefilled.append(ids.numel() if more.get("prompt") else 0)
        return append(model, ids, cache, *rest, **more)

    alone = [said_by(gqa, [replace(a, context=None)], Limits(1000, 64), ways, decoded=DECODED) for a in many]
    try:
        type(gqa).append = counting
        together = said_by(gqa, many, Limits(1000, 64), ways, decoded=DECODED)
    finally:
        type(gqa).append = append
    for name in WAYS:
        assert together[name] == [one[name][0] for one in alone]
    assert together["dense"] != together["sink"] and all(len(s.generated) == 6 for s in together["dense"])
    assert sum(prefilled) < 2 * 700


def test_a_question_is_not_answered_after_another_one(gqa, many):
    """Without the rewind between them the answers differ, or the cache is too small: the test before can fail."""
    forgetful = lambda cache, n: None
    right = said_by(gqa, many, Limits(1000, 64), AS_IT_IS, decoded=DECODED)[""]
    cache_class, real = gqa.cache_class, gqa.cache_class.rewind
    try:
        cache_class.rewind = forgetful
        with pytest.raises((ContextOverrun, AssertionError)):
            assert said_by(gqa, many, Limits(1000, 64), AS_IT_IS, decoded=DECODED)[""] == right
    finally:
        cache_class.rewind = real


def test_a_policy_that_chooses_once_chooses_for_each_question(gqa, many):
    policy = snapkv(96)
    variant = of_policy(policy)
    with variant.on(gqa):
        alone = [said_by(gqa, [replace(a, context=None)], Limits(1000, 64), AS_IT_IS, decoded=1)[""][0] for a in many]
        together = said_by(gqa, many, Limits(1000, 64), AS_IT_IS, decoded=1, again=policy.window)[""]
    assert together == alone


@pytest.mark.parametrize("policy", [snapkv(96), dense()], ids=lambda p: p.name)
def test_what_is_generated_is_what_generate_says(gqa, many, policy):
    """Whose window has the prompt's last token, too."""
    with of_policy(policy).on(gqa):
        want = [generate(gqa, a.prompt, a.new).token_ids for a in many]
        for asked in (many, [replace(a, context=None) for a in many]):
            said = said_by(gqa, asked, Limits(1000, 64), AS_IT_IS, decoded=1, again=policy.window if policy.once else 0)
            assert [one.generated for one in said[""]] == want
