"""Block-size policies by the names that the command line gives them."""

from dataclasses import fields
from pathlib import Path

from dsv4.errors import InputError
from dsv4.speculation.cost_aware import CostAware
from dsv4.speculation.costs import read_costs
from dsv4.speculation.policy import LARGEST, Adaptive, AdaptiveParameters, Policy, Static

COSTS = "audits/speculation_costs_h100.json, measured by scripts/bench_speculation.py"


def policy_named(text: str, costs: Path | None = None, batch: int = 1) -> Policy:
    """'1' … '8'; 'adaptive', with 'adaptive:weight=0.2,sizes=1/4/8' and so on for other parameters; 'cost-aware', by a table of costs.

    costs: the table's file. batch: rows that share a pass, whose costs the table must have. Raises InputError.
    """
    name, _, given = text.partition(":")
    if costs is not None and text != "cost-aware":
        raise InputError(f"--draft-costs was given with --draft-tokens {text}; only cost-aware weighs costs")
    if text == "cost-aware":
        if costs is None:
            raise InputError(f"--draft-tokens cost-aware weighs what passes cost; add --draft-costs FILE, such as {COSTS}")
        return CostAware(read_costs(costs), batch)
    if name == "adaptive":
        return Adaptive(_parameters(given)) if given else Adaptive()
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST:
        raise InputError(f"--draft-tokens is {text!r}; expected 1 to {LARGEST}, adaptive or cost-aware")
    return Static(int(text))


def _parameters(given: str) -> AdaptiveParameters:
    """'weight=0.2,thresholds=0.5/0.8'. Raises InputError."""
    known, found = {f.name: f for f in fields(AdaptiveParameters)}, {}
    for part in given.split(","):
        name, _, value = part.partition("=")
        if name not in known or name in found:
            raise InputError(f"--draft-tokens adaptive has {part!r}; expected each of {', '.join(known)} once at most, as in "
                             "adaptive:weight=0.2,thresholds=0.5/0.8,sizes=1/4/8")
        number = int if name in ("sizes", "pressure_cap") else float
        try:
            values = tuple(map(number, value.split("/")))
        except ValueError:
            raise InputError(f"--draft-tokens adaptive has {part!r}; expected {'whole ' * (number is int)}numbers, several with / between") from None
        several = isinstance(known[name].default, tuple)
        if not several and len(values) > 1:
            raise InputError(f"--draft-tokens adaptive has {part!r}; expected one number")
        found[name] = values if several else values[0]
    return AdaptiveParameters(**found)
