"""How much is measured, and by which rules."""

from dataclasses import asdict, dataclass, replace

from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.probes.measure.fidelity.variants import is_gqa, policy_variants
from dsv4.probes.measure.recall.measure import QUESTION
from dsv4.probes.measure.recall.needles import reach

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


@dataclass(frozen=True)
class Settings:
    """contexts: tokens, ascending; rows of text; queries: last ones of each context that are walked; needles: trials by
    variant, haystack and context; rule: what is measured, in tiles of `tile` tokens, or rows of CSA and HCA; looser:
    further τ that needles are asked under; asked: contexts in which they are."""

    contexts: tuple[int, ...]
    rows: int
    queries: int
    needles: int
    rule: Termination
    tile: int
    looser: tuple[float, ...]
    asked: tuple[int, ...]
    seed: int = 0

    def about(self) -> dict:
        return {
            "contexts": list(self.contexts),
            "rows": self.rows,
            "queries": self.queries,
            "needles": self.needles,
            "rule": asdict(self.rule) | {"tile": self.tile},
            "looser": list(self.looser),
            "needle_contexts": list(self.asked),
            "seed": self.seed,
        }


def rule_of(model, tau: float, phi: float, patience: int, tile: int | None) -> tuple[Termination, int]:
    """(rule, tile). Raises UnsupportedInput for a rule that is none, InputError for rows of a tile of CSA and HCA that
    are none."""
    rule = Termination(tau=tau, phi=phi, patience=patience)
    if is_gqa(model):
        rule = rule if tile is None else replace(rule, tile=tile)
        return rule, rule.tile
    if tile is not None and tile < 1:
        raise InputError(f"--tile {tile}; expected at least 1 row")
    return rule, tile or ENTRY_TILE


def settle(
    model,
    contexts: list[int] | None,
    rows: int,
    queries: int,
    needles: int,
    rule: tuple[Termination, int],
    looser: list[float],
    asked: list[int] | None,
    seed: int,
) -> Settings:
    """Raises InputError for what cannot be measured."""
    most = model.config.max_position_embeddings - 2 * QUESTION
    contexts = tuple(sorted(set(contexts or [min(2048, most)])))
    if min(rows, queries) < 1 or needles < 0:
        raise InputError(f"--rows {rows}, --queries {queries}, --needles {needles}: expected at least 1, 1, 0")
    if contexts[0] < 2 or contexts[-1] > most:
        raise InputError(
            f"--context {contexts[0] if contexts[0] < 2 else contexts[-1]}: expected 2 … {most} tokens (the "
            f"checkpoint's max_position_embeddings less {2 * QUESTION} for questions)"
        )
    if any(not tau > 0 for tau in looser):
        raise InputError(f"--looser {','.join(map(str, looser))}: expected positive τ")
    if not is_gqa(model) and needles:
        raise InputError(
            "--needles: terminated attention of CSA and HCA is walked, not run, so no needle can be asked for; "
            "pass --needles 0"
        )
    asked = tuple(sorted(set(asked or contexts))) if needles else ()
    least = reach(model) + QUESTION
    if needles and not least < asked[0] <= asked[-1] <= most:
        raise InputError(
            f"--needle-context {','.join(map(str, asked))}: expected {least + 1} … {most} tokens, as needles lie "
            f"{least - QUESTION} tokens or more before their questions"
        )
    return Settings(contexts, rows, queries, needles, *rule, tuple(looser), asked, seed)


def orders_of(model, names: list[str] | None, budgets: list[int] | None) -> list[Policy]:
    """What is walked of a GQA model: dense first. Empty for a DeepSeek-V4 one, whose layers have one order each. Raises
    InputError."""
    if not is_gqa(model):
        idle = [name for name, value in {"--policy": names, "--budget": budgets}.items() if value is not None]
        if idle:
            raise InputError(
                f"{', '.join(idle)} would change nothing of a DeepSeek-V4 checkpoint, whose CSA and HCA have "
                "their own orders"
            )
        return []
    return [v.policy for v in policy_variants(names or POLICIES, budgets or [2048], None)]


def rules(settings: Settings) -> list[tuple[str, Termination]]:
    """(what is varied, rule): the ablations, then the sweeps of τ, φ and p, each around the rule."""
    found = [(name, replace(settings.rule, **change)) for name, change in ABLATIONS.items()]
    return found + [
        (name, replace(settings.rule, **{name: value})) for name, values in SWEEPS.items() for value in values
    ]
