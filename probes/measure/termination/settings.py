"""How much is measured, and by which rules."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.probes.measure.base import settings as base
from dsv4.probes.measure.base.models import reach, reads_by_policy
from dsv4.probes.measure.base.settings import QUESTION
from dsv4.probes.measure.base.tasks import beyond_context, settled
from dsv4.probes.measure.base.variants import policy_variants

SWEEPS = {
    "tau": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1),
    "phi": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1),
    "patience": (1, 2, 3, 5, 8),
}
WHOLE = "as it is"
ABLATIONS = {
    WHOLE: {},
    "without scale": {"scale": False},
    "without direction": {"direction": False},
    "without patience": {"persistence": False},
}
POLICIES = ["sink-window", "page-bound", "block-bound"]
# rows of a tile of CSA and HCA, unless another is asked for: as many tiles in a checkpoint's narrow keep-set as Flash
# has of 64
ENTRY_TILE = 16


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """queries: last ones of each context that are walked; needles: by variant, haystack and context; rule: what is
    measured, in tiles of `tile` tokens, or rows of CSA and HCA; looser: further τ that needles are asked under; asked:
    contexts in which they are; tasks: of `dsv4.probes.measure.base.tasks`; together: single needles of one context."""

    queries: int
    rule: Termination
    tile: int
    looser: tuple[float, ...]
    asked: tuple[int, ...]
    tasks: tuple[str, ...] = ()
    together: int = 1
    SHOWN: ClassVar = (
        "contexts",
        "rows",
        "queries",
        "needles",
        "rule",
        "looser",
        "needle_contexts",
        "tasks",
        "needles_a_haystack",
        "seed",
    )
    FIELDS: ClassVar = {"needle_contexts": "asked", "needles_a_haystack": "together"}

    def about(self) -> dict:
        return super().about(rule=asdict(self.rule) | {"tile": self.tile})


def rule_of(model, tau: float, phi: float, patience: int, tile: int | None) -> tuple[Termination, int]:
    """(rule, tile). Raises UnsupportedInput for a rule that is none, InputError for rows of a tile of CSA and HCA that
    are none."""
    rule = Termination(tau=tau, phi=phi, patience=patience)
    if reads_by_policy(model):
        rule = rule if tile is None else replace(rule, tile=tile)
        return rule, rule.tile
    if tile is not None and tile < 1:
        raise InputError(f"--tile {tile}; expected at least 1 row")
    return rule, tile or ENTRY_TILE


def settle(
    model,
    contexts: list[int] | None,
    rule: tuple[Termination, int],
    looser: list[float],
    asked: list[int] | None,
    tasks: Sequence[str] = (),
    together: int = 1,
    **given: int,
) -> Settings:
    """rule: of `rule_of`; given: fields of `Settings`. Raises InputError for what cannot be measured."""
    most = model.config.max_position_embeddings - 2 * QUESTION
    contexts = base.ascending(contexts, (2048,), most)
    base.check_least(given, rows=1, queries=1, needles=0)
    why = f"the checkpoint's max_position_embeddings less {2 * QUESTION} for questions"
    base.check_range(contexts, most, why)
    if any(not tau > 0 for tau in looser):
        raise InputError(f"--looser {','.join(map(str, looser))}: expected positive τ")
    needles = given["needles"]
    if not reads_by_policy(model) and needles:
        raise InputError(
            "--needles: terminated attention of CSA and HCA is walked, not run, so no needle can be asked for; "
            "pass --needles 0"
        )
    tasks = settled(tasks, together, needles)
    most += 2 * QUESTION - beyond_context(tasks, together)
    asked = base.ascending(asked, contexts, most) if needles else ()
    least = reach(model) + QUESTION
    if needles and not least < asked[0] <= asked[-1] <= most:
        raise InputError(
            f"--needle-context {','.join(map(str, asked))}: expected {least + 1} … {most} tokens, as needles lie "
            f"{least - QUESTION} tokens or more before their questions"
        )
    ruled, tile = rule
    return Settings(
        contexts=contexts,
        rule=ruled,
        tile=tile,
        looser=tuple(looser),
        asked=asked,
        tasks=tasks,
        together=together,
        **given,
    )


def orders_of(model, names: list[str] | None, budgets: list[int | float] | None) -> list[Policy]:
    """What is walked of a GQA model: dense first. Empty for a DeepSeek-V4 one, whose layers have one order each. Raises
    InputError."""
    if not reads_by_policy(model):
        of = "a DeepSeek-V4 checkpoint, whose CSA and HCA have their own orders"
        base.refuse_idle({"--policy": names, "--budget": budgets}, of)
        return []
    return [v.policy for v in policy_variants(names or POLICIES, budgets or [2048], None)]


def rules(settings: Settings) -> list[tuple[str, Termination]]:
    """(what is varied, rule): the ablations, then the sweeps of τ, φ and p, each around the rule."""
    found = [(name, replace(settings.rule, **change)) for name, change in ABLATIONS.items()]
    return found + [
        (name, replace(settings.rule, **{name: value})) for name, values in SWEEPS.items() for value in values
    ]
