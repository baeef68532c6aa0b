"""How much is measured, and where."""

from dataclasses import dataclass, replace

from dsv4.errors import InputError
from dsv4.probes.measure.fidelity.variants import Variant, csa_variants, is_gqa, policy_variants
from dsv4.probes.measure.recall.measure import QUESTION
from dsv4.probes.measure.recall.needles import reach

LEAST_BUDGET = 4  # blocks: sink, local, and one to choose


@dataclass(frozen=True)
class Settings:
    """contexts: tokens, ascending; rows of text of each; tail: last tokens of each row that are predicted; new: greedy
    tokens after each prompt; needles: trials by variant, haystack and context; queries: last ones of each context whose
    selection is looked at."""

    effort: str
    contexts: tuple[int, ...]
    rows: int
    tail: int
    new: int
    needles: int
    queries: int
    seed: int = 0

    def about(self) -> dict:
        """As JSON values."""
        return {
            "effort": self.effort,
            "contexts": list(self.contexts),
            "rows": self.rows,
            "tail": self.tail,
            "new_tokens": self.new,
            "needles": self.needles,
            "queries": self.queries,
            "seed": self.seed,
        }

    @property
    def longest(self) -> int:
        """Tokens that any cache is made for at most."""
        return self.contexts[-1] + max(2 * QUESTION, self.new)


EFFORTS = {  # a laptop's processor reads the demo checkpoint in about one, five and forty minutes
    "quick": Settings("quick", (1024,), rows=2, tail=64, new=32, needles=4, queries=64),
    "standard": Settings("standard", (1024, 2048), rows=4, tail=256, new=64, needles=10, queries=128),
    "thorough": Settings("thorough", (1024, 2048, 4096), rows=16, tail=512, new=128, needles=100, queries=128),
}


def settle(model, effort: str, contexts: list[int] | None, seed: int, **given: int | None) -> Settings:
    """The settings of an effort, with what was given instead. Raises InputError for what cannot be measured."""
    if effort not in EFFORTS:
        raise InputError(f"--effort is {effort!r}; expected one of {', '.join(EFFORTS)}")
    most = model.config.max_position_embeddings
    chosen = replace(EFFORTS[effort], seed=seed, **{key: value for key, value in given.items() if value is not None})
    room = max(2 * QUESTION, chosen.new)
    contexts = tuple(sorted(set(contexts or [n for n in chosen.contexts if n + room <= most] or [most - room])))
    chosen = replace(chosen, contexts=contexts)
    if min(chosen.rows, chosen.tail) < 1 or min(chosen.new, chosen.needles) < 0 or chosen.queries < 1:
        raise InputError(
            f"--rows {chosen.rows}, --tail {chosen.tail}, --new-tokens {chosen.new}, --needles {chosen.needles}, "
            f"--queries {chosen.queries}: expected at least 1, 1, 0, 0, 1"
        )
    if contexts[0] < 2 or contexts[-1] + room > most:
        raise InputError(
            f"--context {contexts[0] if contexts[0] < 2 else contexts[-1]}: expected 2 … {most - room} tokens (the "
            f"checkpoint's max_position_embeddings {most}, less {room} for questions and continuations)"
        )
    if chosen.tail >= contexts[0]:
        raise InputError(f"--tail {chosen.tail} leaves no prompt in a context of {contexts[0]} tokens; expected less")
    return chosen


def variants_of(
    model,
    settings: Settings,
    topk: list[int] | None,
    policies: list[str] | None,
    budgets: list[int] | None,
    block: int | None,
) -> list[Variant]:
    """The exact run first. Raises InputError for choices that this family of models does not have, and where nothing is
    compared."""
    if not is_gqa(model):
        _refuse(
            {"--policy": policies, "--budget": budgets, "--block": block},
            "a DeepSeek-V4 checkpoint, whose CSA has --topk",
        )
        return csa_variants(model, topk, settings.longest)
    _refuse({"--topk": topk}, "a GQA checkpoint, which has --policy and --budget")
    size, most = block or 128, settings.contexts[-1]
    defaults = [n for n in (most // 8 // size * size, most // 4 // size * size) if n >= LEAST_BUDGET * size]
    found = policy_variants(policies, budgets or defaults or [LEAST_BUDGET * size], block)
    if len(found) < 2:
        raise InputError("--policy names the dense policy alone, and nothing to hold against it; add another")
    return found


def _refuse(given: dict, of: str) -> None:
    idle = [name for name, value in given.items() if value is not None]
    if idle:
        raise InputError(f"{', '.join(idle)} would change nothing of {of}; leave it out")


def needle_contexts(model, settings: Settings, tokens: int) -> tuple[list[int], list[str]]:
    """(contexts in which needles can be hidden, notes on the others): longer than windows alone reach, and no longer
    than the text."""
    beyond = reach(model)
    fits = [n for n in settings.contexts if beyond + QUESTION < n <= tokens]
    return fits, [
        f"no needles at {n:,} tokens: they are asked in contexts from {beyond + QUESTION + 1:,} (windows alone reach "
        f"{beyond:,}) to {tokens:,} tokens, as many as the text has"
        for n in settings.contexts
        if n not in fits
    ]
