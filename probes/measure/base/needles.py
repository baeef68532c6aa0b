"""Needles and other tasks with known answers (`dsv4.probes.measure.base.tasks`), asked of a model in several ways.

A needle is a value that was stated once, further back than sliding windows reach. Whether it is found is judged by
teacher forcing, see `dsv4.probes.measure.base.asking`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from tokenizers import Tokenizer

from dsv4.kernels.block_choice import Observed
from dsv4.model.causal import CausalLM
from dsv4.probes.bounds import lower_bound, upper_bound
from dsv4.probes.measure.base.asking import AS_IT_IS, DECODED, Asked, Limits, Said, said_by
from dsv4.probes.measure.base.asking import PASS as PASS  # old places of these names, until 0.4
from dsv4.probes.measure.base.asking import PIECE as PIECE
from dsv4.probes.measure.base.asking import answered as answered
from dsv4.probes.measure.base.asking import replies as replies
from dsv4.probes.measure.base.asking import replies_by as replies_by
from dsv4.probes.measure.base.ground import Ground, to_generate
from dsv4.probes.measure.base.haystack import chance_of_a_guess, filler
from dsv4.probes.measure.base.models import Say, reach
from dsv4.probes.measure.base.planting import planted
from dsv4.probes.measure.base.settings import QUESTION, Settings
from dsv4.probes.measure.base.tasks import TASKS, Task
from dsv4.probes.measure.base.text import Text
from dsv4.probes.measure.base.variants import Variant


def hidden(model: CausalLM, tokenizer: Tokenizer, text: np.ndarray, length: int, trials: int, seed: int) -> list[Asked]:
    """Needles at depths spread evenly over all places that are further from the question than windows alone reach.
    Nothing is generated."""
    return [replace(a, new=0) for a in made(model, TASKS["single"], tokenizer, text, length, trials, seed)]


def made(
    model: CausalLM, task: Task, tokenizer: Tokenizer, text: np.ndarray, length: int, trials: int, seed: int
) -> list[Asked]:
    """Trials of a task. Evidence lies further from the question than windows alone reach, except of tasks about all of
    their words."""
    beyond, bos, found = reach(model), model.config.bos_token_id, []
    for i in range(trials):
        rng = Random(f"{seed}:{length}:{i}" + ("" if task.name == "single" else f":{task.name}"))
        found.append(task.make(Ground(rng, tokenizer, text, length, (i + 0.5) / trials, beyond, bos)))
    return found


def together(
    model: CausalLM, tokenizer: Tokenizer, text: np.ndarray, length: int, trials: int, each: int, seed: int
) -> list[Asked]:
    """Single needles, `each` of them in one context, of which every one is asked by itself. `length` holds the
    question and what is generated too."""
    found, bos = [], model.config.bos_token_id
    for number, at in enumerate(range(0, trials, each)):
        count, own = min(each, trials - at), f"{seed}:{number}" if number else seed
        found += planted(tokenizer, text, length - QUESTION, count, reach(model), bos, own).asked(number)
    return [replace(a, new=to_generate(a.answer)) for a in found]


@dataclass(frozen=True)
class Haystack:
    """Where needles are hidden, and how the model may look for them."""

    name: str
    prose: bool
    window_only: bool = False


HAYSTACKS = (Haystack("prose", True), Haystack("looped filler", False))


def trials(
    model: CausalLM,
    tokenizer: Tokenizer,
    prose: np.ndarray,
    contexts: Iterable[int],
    count: int,
    seed: int,
    say: Say,
    haystacks: tuple[Haystack, ...] = HAYSTACKS,
    each: int = 1,
) -> Iterator[tuple[Haystack, int, list[Asked], Say]]:
    """(haystack, context, `count` needles in it, a `say` that names both): the same needles whatever is measured. each:
    needles of one context."""
    for haystack in haystacks:
        for context in contexts:
            text = prose if haystack.prose else filler(tokenizer, context)
            if each == 1:
                asked = hidden(model, tokenizer, text, context, count, seed)
            else:
                asked = [replace(a, new=0) for a in together(model, tokenizer, text, context, count, each, seed)]
            where = f"needles, {haystack.name}, {context} tokens"
            yield haystack, context, asked, lambda text, where=where: say(f"{where}: {text}")


def task_trials(
    model: CausalLM,
    tokenizer: Tokenizer,
    prose: np.ndarray,
    contexts: Iterable[int],
    count: int,
    seed: int,
    say: Say,
    tasks: Sequence[str],
    each: int = 1,
) -> Iterator[tuple[Task, str, int, list[Asked], Say]]:
    """(task, haystack, context, `count` trials of it, a `say` that names all three). each: single needles of one
    context."""
    for task in map(TASKS.__getitem__, tasks):
        names = [h for h in HAYSTACKS if (task.prose if h.prose else task.looped)] or [Haystack(task.own, True)]
        for haystack in names:
            for context in contexts:
                if context < task.least + (0 if task.own else reach(model)):
                    say(f"{task.name} is not asked at {context:,} tokens: too few for it")
                    continue
                text = prose if haystack.prose else filler(tokenizer, context)
                if task.name == "single" and each > 1:
                    asked = together(model, tokenizer, text, context, count, each, seed)
                else:
                    asked = made(model, task, tokenizer, text, context, count, seed)
                where = f"{task.name}, {haystack.name}, {context} tokens"
                yield task, haystack.name, context, asked, lambda text, where=where: say(f"{where}: {text}")


def found(
    model: CausalLM,
    variants: list[Variant],
    tokenizer: Tokenizer,
    prose: np.ndarray,
    contexts: Iterable[int],
    count: int,
    limits: Limits,
    say: Say = lambda text: None,
    seed: int = 0,
    tasks: Sequence[str] = (),
    each: int = 1,
    about: Callable[[Variant], dict] = lambda variant: {},
) -> list[dict]:
    """Needles found by variant, haystack and context, as JSON values; the same `count` trials for every variant. tasks:
    those that are asked, with what is generated beside teacher forcing (none: single needles by teacher forcing alone);
    each: single needles of one context; about: further figures of a variant's row, asked for once after its trials."""
    rows = []
    if not tasks:
        for haystack, context, asked, note in trials(model, tokenizer, prose, contexts, count, seed, say, each=each):
            said = answers(model, variants, asked, limits, note)
            rows += [row(v, haystack.name, context, asked, hits(asked, said[v.name])) | about(v) for v in variants]
        return rows
    given = model, tokenizer, prose, contexts, count, seed, say, tasks, each
    for task, haystack_name, context, asked, note in task_trials(*given):
        said = answers(model, variants, asked, limits, note)
        full = next((said[v.name] for v in variants if v.exact), None)
        for v in variants:
            of_task = recalled(tokenizer, asked, said[v.name], full)
            found = row(v, haystack_name, context, asked, hits(asked, said[v.name]))
            rows.append(found | {"task": task.name} | of_task | about(v))
    return rows


def answers(
    model: CausalLM, variants: list[Variant], asked: list[Asked], limits: Limits, say: Say
) -> dict[str, list[Said]]:
    """What is said, by variant. Where all act in decoding alone, prompts are prefilled once for those that need not see
    them. A policy that chooses once runs its prompts with their questions, as published: its window is the question."""
    note = lambda v: lambda text: say(f"{v.name}: {text}")
    if not all(v.decode_only for v in variants):
        found = {}
        for variant in variants:
            with variant.on(model):
                found[variant.name] = said_by(model, asked, limits, AS_IT_IS, note(variant))[""]
        return found
    ways = {v.name: lambda cache, v=v: v.resumed(model, cache) for v in variants if v.resumable}
    said = said_by(model, asked, limits, ways, say, DECODED) if ways else {}
    for variant in variants:
        if not variant.resumable:
            again = variant.policy.window if isinstance(variant.policy, Observed) else 0
            with variant.on(model):
                said[variant.name] = said_by(model, asked, limits, AS_IT_IS, note(variant), 1, again)[""]
    return said


def hits(asked: list[Asked], said: list[Said]) -> list[bool]:
    """Whether each answer was given in full, by teacher forcing."""
    return [one.forced == a.answer for a, one in zip(asked, said, strict=True)]


def strings_found(tokenizer: Tokenizer, asked: Asked, said: Said) -> int:
    """Answers that stand somewhere in what was generated, whatever their case: RULER's string_match_all."""
    text = tokenizer.decode(said.generated).lower()
    return sum(answer.lower() in text for answer in asked.answers)


def recalled(tokenizer: Tokenizer, asked: list[Asked], said: list[Said], full: list[Said] | None) -> dict:
    """Figures of what was generated. recall: mean over trials of the share of answers found. full: what full attention
    said (None: not run). solved: whether its answers found, bounded below, are more than chance; otherwise the
    task says nothing about what is held against it."""
    share = lambda said: [strings_found(tokenizer, a, one) / len(a.answers) for a, one in zip(asked, said, strict=True)]
    mean = lambda values: sum(values) / len(values)
    mine, number = share(said), sum(len(a.answers) for a in asked)
    chance, best = mean([a.chance for a in asked]), None if full is None else share(full)
    count = lambda shares: round(sum(s * len(a.answers) for s, a in zip(shares, asked)))
    return {
        "answers": number,
        "answers_found": count(mine),
        "recall": mean(mine),
        "recall_full": None if best is None else mean(best),
        "solved": None if best is None else lower_bound(count(best), number) > chance,
        "chance": chance,
        "evidence": mean([sum(end - start for start, end in a.evidence) for a in asked]),
    }


def row(variant: Variant, haystack: str, context: int, asked: list[Asked], hits: list[bool]) -> dict:
    """One row of the document. at_least, at_most: one-sided 97.5 % bounds each (Clopper-Pearson); chance: of the best
    guess. Vacuous where the variant leaves nothing out of any prompt and answer, which together are longer than the
    context."""
    longest = max(map(len, asked))
    return {
        "variant": variant.name,
        "haystack": haystack,
        "context": context,
        **counted(hits),
        "chance": chance_of_a_guess(),
        "status": "VACUOUS" if variant.keeps_all(longest) and not variant.exact else "MEASURED",
        "depths": depths(asked, hits),
    }


def counted(hits: list[bool]) -> dict:
    """Figures of the trials. at_least, at_most: one-sided 97.5 % bounds each (Clopper-Pearson)."""
    count, trials = sum(hits), len(hits)
    return {
        "trials": trials,
        "hits": count,
        "share": count / trials,
        "at_least": lower_bound(count, trials),
        "at_most": upper_bound(count, trials),
    }


def depths(asked: list[Asked], hits: list[bool]) -> list[dict]:
    return [{"depth": round(a.depth, 4), "hit": hit} for a, hit in zip(asked, hits)]


def unsolved(rows: list[dict]) -> list[str]:
    """Notes on tasks that full attention does not solve; rows: of `found`."""
    keys = [(r["task"], r["haystack"], r["context"]) for r in rows if r.get("solved") is False]
    notes = []
    for task, haystack, context in dict.fromkeys(keys):
        r = next(r for r in rows if (r.get("task"), r["haystack"], r["context"]) == (task, haystack, context))
        notes.append(
            f"{task} in {haystack} at {context:,} tokens: not solved by full attention (recall {r['recall_full']:.2f}, "
            f"chance {r['chance']:.1g}): says nothing about the rule"
        )
    return notes


def why_none(settings: Settings, text: Text) -> str | None:
    """Why no needle can be asked for; None where some can."""
    if not settings.needles:
        return "needles were turned off (--needles 0)"
    return "no needles without a tokenizer: they are sentences" if text.tokenizer is None else None


def fitting(model: CausalLM, contexts: Iterable[int], most: int, why: str = "") -> tuple[list[int], list[str]]:
    """(contexts in which needles can be hidden, notes on the others): longer than windows alone reach, and up to `most`
    tokens. why: where `most` comes from."""
    beyond = reach(model)
    fits = [n for n in contexts if beyond + QUESTION < n <= most]
    asked = f"from {beyond + QUESTION + 1:,} (windows alone reach {beyond:,}) to {most:,} tokens{why}"
    return fits, [f"no needles at {n:,} tokens: they are asked in contexts {asked}" for n in contexts if n not in fits]


def best_bound(count: int, of: str) -> str:
    """A note: what `count` needles can show at best. of: what they are of, such as 'a length'."""
    return (
        f"{count} needles {of} bound the rate below by {lower_bound(count, count):.1%} at best; --needles 100 by 96.4 %"
    )
