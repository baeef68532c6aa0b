"""What all formats say in the same words, as plain text."""

import math

from dsv4.probes.result import Check, Status

SIGNS = {"<=": "≤", ">=": "≥", "==": "="}
MEANING = {  # of what is not passed, for headings and messages
    Status.WARN: "to be looked at",
    Status.VACUOUS: "no evidence: nothing was measured that could have failed",
    Status.FAIL: "measured, and wrong",
    Status.ERROR: "the probe itself broke",
}


def plain(value):
    """A number or string from what a probe put there, such as a torch or numpy scalar."""
    value = value.item() if hasattr(value, "item") else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def number(value) -> str:
    """For people: six digits, thousands separated, NaN and infinities by name."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def required(check: Check) -> str:
    """'≥ 0.999', '' without a threshold."""
    if check.threshold is None:
        return ""
    return f"{SIGNS.get(check.relation, check.relation)} {number(check.threshold)}".strip()


def measured(check: Check) -> str:
    return "" if check.measured is None else f"{number(check.measured)} {check.unit}".strip()


def place(check: Check) -> str:
    """Where and which part: 'layer 2 (indexer keys)'."""
    return f"{check.at} ({check.part})" if check.at and check.part else check.at or check.part


def evidence(check: Check) -> str:
    """Measured value, threshold and its source, chance level and samples in one sentence, without the note."""
    said = [f"measured {measured(check)}" if measured(check) else "nothing measured"]
    if required(check):
        said.append(f"required {required(check)}")
    if check.source:
        said.append(f"threshold from {check.source}")
    if check.chance is not None:
        said.append(f"chance {number(check.chance)}")
    said.append(f"{check.samples:,} sample" + ("" if check.samples == 1 else "s"))
    return "; ".join(said)


def sentence(check: Check) -> str:
    """One paragraph about a check: name, place, evidence, note."""
    where = f" at {place(check)}" if place(check) else ""
    return f"{check.name}{where}: {evidence(check)}" + (f". {check.note}" if check.note else "")


def totals(counts: dict[Status, int]) -> str:
    """Worst first, only what occurs: '1 FAIL, 2 VACUOUS, 30 PASS'."""
    said = [f"{counts[status]:,} {status.value}" for status in reversed(Status) if counts[status]]
    return ", ".join(said) or "no checks"


def flat(value, prefix: str = "") -> list[tuple[str, str]]:
    """Nested dictionaries as (dotted key, text) rows; lists of plain values joined, other lists left out."""
    rows = []
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict):
            rows += flat(inner, name + ".")
        elif isinstance(inner, list | tuple | set | frozenset):
            if not any(isinstance(v, dict) for v in inner):
                rows.append((name, ", ".join(str(v) for v in inner)))
        else:
            rows.append((name, "–" if inner is None else str(inner)))
    return rows
