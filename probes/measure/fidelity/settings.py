"""How much is measured, and where."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dsv4.errors import InputError
from dsv4.model.gqa.choice import NAMES
from dsv4.probes.measure.base import settings as base
from dsv4.probes.measure.base.models import reads_by_policy
from dsv4.probes.measure.base.settings import QUESTION, refuse_idle
from dsv4.probes.measure.base.tasks import beyond_context, settled
from dsv4.probes.measure.base.variants import Variant, csa_variants, policy_variants

LEAST_BUDGET = 4  # blocks: sink, local, and one to choose


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """tail: last tokens of each row that are predicted; new: greedy tokens after each prompt; needles: by variant,
    haystack and context; queries: last ones of each context whose selection is looked at. asked: contexts that needles
    are hidden in; tasks: of `dsv4.probes.measure.base.tasks`; together: single needles of one context."""

    effort: str
    tail: int
    new: int
    queries: int
    asked: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    together: int = 1
    SHOWN: ClassVar = (
        "effort",
        "contexts",
        "rows",
        "tail",
        "new_tokens",
        "needles",
        "needle_contexts",
        "tasks",
        "needles_a_haystack",
        "queries",
        "seed",
    )
    FIELDS: ClassVar = {"new_tokens": "new", "needle_contexts": "asked", "needles_a_haystack": "together"}

    @property
    def longest(self) -> int:
        """Tokens that any cache is made for at most."""
        beyond = beyond_context(self.tasks, self.together)
        return max(self.contexts[-1] + max(2 * QUESTION, self.new), *(n + beyond for n in self.asked), 0)


EFFORTS = {  # a laptop's processor reads the demo checkpoint in about one, five and forty minutes
    "quick": Settings(effort="quick", contexts=(1024,), rows=2, tail=64, new=32, needles=4, queries=64),
    "standard": Settings(effort="standard", contexts=(1024, 2048), rows=4, tail=256, new=64, needles=10, queries=128),
    "thorough": Settings(
        effort="thorough", contexts=(1024, 2048, 4096), rows=16, tail=512, new=128, needles=100, queries=128
    ),
}


def settle(
    model,
    effort: str,
    contexts: list[int] | None,
    seed: int,
    asked: list[int] | None = None,
    tasks: Sequence[str] = (),
    together: int = 1,
    **given: int | None,
) -> Settings:
    """The settings of an effort, with what was given instead. Raises InputError for what cannot be measured."""
    if effort not in EFFORTS:
        raise InputError(f"--effort is {effort!r}; expected one of {', '.join(EFFORTS)}")
    most = model.config.max_position_embeddings
    chosen = replace(EFFORTS[effort], seed=seed, **{key: value for key, value in given.items() if value is not None})
    room = max(2 * QUESTION, chosen.new)
    contexts = base.ascending(contexts, chosen.contexts, most - room)
    tasks = settled(tasks, together, chosen.needles)
    last = most - beyond_context(tasks, together)
    chosen = replace(chosen, contexts=contexts, asked=base.ascending(asked, contexts, last), tasks=tasks)
    chosen = replace(chosen, together=together)
    base.check_least(chosen.about(), rows=1, tail=1, new_tokens=0, needles=0, queries=1)
    why = f"the checkpoint's max_position_embeddings {most}, less {room} for questions and continuations"
    base.check_range(contexts, most - room, why)
    if asked and chosen.asked[-1] > last:
        why = "with room for questions" if last < most else "the checkpoint's max_position_embeddings"
        raise InputError(f"--needle-context {chosen.asked[-1]}: expected {last} tokens at most ({why})")
    if chosen.tail >= contexts[0]:
        raise InputError(f"--tail {chosen.tail} leaves no prompt in a context of {contexts[0]} tokens; expected less")
    return chosen


def variants_of(
    model,
    settings: Settings,
    topk: list[int] | None,
    policies: list[str] | None,
    budgets: list[int | float] | None,
    block: int | None,
) -> list[Variant]:
    """The exact run first. Raises InputError for choices that this family of models does not have, and where nothing is
    compared."""
    host = model.kv_memory is not None
    if not reads_by_policy(model):
        if host:
            raise InputError(
                "--kv-memory host was given with a DeepSeek-V4 checkpoint, whose exact run selects more entries than "
                "are staged; it is measured of GQA checkpoints: leave it out"
            )
        refuse_idle(
            {"--policy": policies, "--budget": budgets, "--block": block},
            "a DeepSeek-V4 checkpoint, whose CSA has --topk; leave it out",
        )
        return csa_variants(model, topk, settings.longest)
    refuse_idle({"--topk": topk}, "a GQA checkpoint, which has --policy and --budget; leave it out")
    if host:
        policies = _staged(policies)
    size, most = block or 128, settings.contexts[-1]
    defaults = [n for n in (most // 8 // size * size, most // 4 // size * size) if n >= LEAST_BUDGET * size]
    found = policy_variants(policies, budgets or defaults or [LEAST_BUDGET * size], block)
    if len(found) < 2:
        raise InputError("--policy names the dense policy alone, and nothing to hold against it; add another")
    return found


def _staged(policies: list[str] | None) -> list[str]:
    """The policies that run with keys and values in host memory, by default all of them. Raises InputError for one that
    keeps single tokens."""
    once = [name for name, make in NAMES.items() if make().once]
    for name in policies or ():
        if name in once:
            raise InputError(
                f"--kv-memory host was given with --policy {name}, which keeps single tokens; whole blocks are staged: "
                "leave out one of them"
            )
    return policies or [name for name in NAMES if name not in once]
