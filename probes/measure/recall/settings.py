"""What is measured where, and the refusal to measure what proves nothing."""

from dataclasses import dataclass
from typing import ClassVar

from dsv4.errors import InputError
from dsv4.probes.measure.base import settings as base
from dsv4.probes.measure.base.models import csa_layers
from dsv4.probes.oracle import kinds

# of the classic gate, and the tokens that make exactly so many entries
GATE_K, GATE_ENTRIES = 512, 1024
GATE_CONTEXT = kinds.CSA * GATE_ENTRIES
LEAST = 8  # entries a pick, below which chance alone scores more than 1/8 (known_bugs 0.2)


class VacuousSetting(InputError):
    """So few entries that a random selection would look good."""


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """ks: picks, of which those beside the model's own are what-ifs; queries: the last ones of each context, in each of
    `rows` rows of text; needles: trials by haystack and length. The document shows two keys of the config too."""

    ks: tuple[int, ...]
    queries: int
    SHOWN: ClassVar = ("contexts", "k", "index_topk", "sliding_window", "queries", "rows", "needles", "seed")
    FIELDS: ClassVar = {"k": "ks"}

    @property
    def measured(self) -> tuple[tuple[int, int], ...]:
        """(context, k) of every row: those asked for, and that of the gate at exactly GATE_ENTRIES entries where the
        longest context holds it (and its queries are not those of a shorter context)."""
        asked = [(context, k) for context in self.contexts for k in self.ks]
        exact = GATE_CONTEXT, GATE_K
        apart = min((abs(GATE_CONTEXT - c) for c in self.contexts if c != GATE_CONTEXT), default=self.queries)
        reached = self.contexts[-1] >= GATE_CONTEXT and apart >= self.queries
        return tuple(sorted({*asked, exact} if reached else asked))

    def is_vacuous(self, context: int, k: int) -> bool:
        return context // kinds.CSA < LEAST * k


def settle(
    config,
    contexts: list[int] | None,
    ks: list[int] | None,
    queries: int,
    rows: int,
    needles: int,
    seed: int,
    vacuous: bool,
    longest: int | None = None,
) -> Settings:
    """Settings with their defaults: k of the model, contexts of 8·k and 16·k entries. longest: tokens that there are.

    Raises VacuousSetting for n_comp < 8·k unless `vacuous`, InputError for what cannot be measured at all.
    """
    if not csa_layers(config):
        raise InputError("the checkpoint has no CSA layer (compress_ratio 4): no indexer selects anything")
    longest = min(longest or config.max_position_embeddings, config.max_position_embeddings)
    ks = sorted(set(ks or [config.index_topk]))
    least = kinds.CSA * LEAST * ks[-1]
    contexts = base.ascending(contexts, (least, 2 * least), longest)
    given = dict(rows=rows, queries=queries, needles=needles)
    base.check_least(given | {"k": ks[0]}, k=1, rows=1, queries=2, needles=0)
    if contexts[-1] > longest:
        raise InputError(
            f"--context {contexts[-1]} exceeds the {longest} tokens that the checkpoint takes (or the dump "
            "holds); ask for at most that"
        )
    queries = min([queries, contexts[0] // 2, *(b - a for a, b in zip(contexts, contexts[1:]))])
    if queries < 2:
        raise InputError(
            f"the contexts {list(contexts)} leave {queries} queries of its own to one of them; expected at least 2"
        )
    settings = Settings(contexts=contexts, ks=tuple(ks), seed=seed, **given | {"queries": queries})
    for context in contexts if not vacuous else ():
        for k in ks:
            if settings.is_vacuous(context, k):
                raise VacuousSetting(refusal(context, k, longest))
    return settings


def refusal(context: int, k: int, longest: int) -> str:
    n, least = context // kinds.CSA, kinds.CSA * LEAST * k
    instead = (
        f"use --context {least} or more" if least <= longest else f"use --k {longest // kinds.CSA // LEAST} or less"
    )
    return (
        f"a context of {context} tokens has n_comp = {n} entries, fewer than {LEAST} · k = {LEAST * k}: chance alone "
        f"recalls {min(1.0, k / max(n, 1)):.0%}; {instead}, or --vacuous to see the figures marked VACUOUS"
    )
