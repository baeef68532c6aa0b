"""Block-size policies by the names that the command line gives them."""

from pathlib import Path

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError, brief
from dsv4.named_values import NUMBER, WHOLE, WORD, named_values, several
from dsv4.speculation.cost_aware import CostAware
from dsv4.speculation.costs import CostTable, read_costs
from dsv4.speculation.policy import Adaptive, AdaptiveParameters, Policy, Static

COSTS = "audits/speculation/flash/h100/speculation_costs_h100.json, measured by scripts/bench_speculation.py"
# of ASBS
PARAMETERS = {
    "weight": NUMBER,
    "start": NUMBER,
    "thresholds": several(NUMBER),
    "sizes": several(WHOLE),
    "pressure_cap": WHOLE,
    "undrafted": WORD,
}


def policy_named(text: str, costs: Path | None = None, batch: int = 1) -> Policy:
    """'1' … '8'; 'adaptive', with 'adaptive:weight=0.2,sizes=1/4/8' and so on for other parameters; 'cost-aware', by a
    table of costs.

    costs: the table's file. batch: rows that share a pass, whose costs the table must have. Raises InputError.
    """
    name, colon, given = text.partition(":")
    if costs is not None and text != "cost-aware":
        raise InputError(f"--draft-costs was given with --draft-tokens {brief(text)}; only cost-aware weighs costs")
    if text == "cost-aware":
        if costs is None:
            raise InputError(
                f"--draft-tokens cost-aware weighs what passes cost; add --draft-costs FILE, such as {COSTS}"
            )
        return CostAware(_table(costs), batch)
    if name == "adaptive" and (given or not colon):
        return Adaptive(_parameters(given))
    if text not in map(str, range(1, MAX_DRAFTS + 1)):
        raise InputError(f"--draft-tokens is {brief(text)!r}; expected 1 to {MAX_DRAFTS}, adaptive or cost-aware")
    return Static(int(text))


def _table(costs: Path) -> CostTable:
    try:
        return read_costs(costs)
    except InputError as error:
        raise InputError(f"--draft-costs: {error}; name a table as scripts/bench_speculation.py writes it") from None


def _parameters(given: str) -> AdaptiveParameters:
    """'weight=0.2,thresholds=0.5/0.8'. Raises InputError."""
    found = named_values(
        "--draft-tokens adaptive", given, PARAMETERS, "adaptive:weight=0.2,thresholds=0.5/0.8,sizes=1/4/8"
    )
    try:
        return AdaptiveParameters(**found)
    except InputError as error:
        raise InputError(f"--draft-tokens adaptive: {error}") from None
