"""Goals beside what was measured."""

from collections.abc import Sequence


def goal_table(goals: Sequence[dict]) -> list[str]:
    """Markdown lines. Each goal: what, measured (None: not), goal, at_least, verdict."""
    lines = ["", "| goal | measured | goal | |", "|---|---:|---:|---|"]
    for row in goals:
        measured = "–" if row["measured"] is None else f"{row['measured']:.4g}"
        sign = "≥" if row["at_least"] else "≤"
        lines.append(f"| {row['what']} | {measured} | {sign} {row['goal']:.4g} | {row['verdict']} |")
    return lines
