"""Goals relative to peers of the same run: how many times as fast as the fastest of them ours must be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.bench.measure import Result
from scripts.bench.row import Beside


@dataclass(frozen=True)
class Judged:
    """A goal held against the fastest peer that it names. times: how many times as fast as `peer` (`peer_us`) ours
    (`ours_us`) was, timed in turn with it where the row is interleaved; all None where ours or no such peer was
    timed."""

    goal: Beside
    peer: str | None = None
    peer_us: float | None = None
    ours_us: float | None = None
    times: float | None = None

    @property
    def verdict(self) -> str:
        return "not judged" if self.times is None else "met" if self.times >= self.goal.times else "MISSED"


def judged(result: Result) -> list[Judged]:
    found = []
    for goal in result.beside:
        timed = [
            (p.timing.cold_us, name)
            for name, p in result.peers.items()
            if p.timing is not None and re.search(goal.peers, name)
        ]
        if result.timing is None or not timed:
            found.append(Judged(goal))
            continue
        us, name = min(timed)
        ours = (result.peers[name].beside or result.timing).cold_us
        found.append(Judged(goal, name, us, ours, us / ours))
    return found


def said(goal: Beside) -> str:
    """The goal in words, of a peer's time or speed."""
    return f"{goal.times:.3g}× as fast" if goal.times >= 1 else f"≤ {1 / goal.times:.3g} of its time"


def markdown(results: Sequence[Result]) -> list[str]:
    """A table of all rows that have such a goal; nothing where none has."""
    rows = [(r, j) for r in results for j in judged(r)]
    if not rows:
        return []
    lines = [
        "## Goals beside peers of this run",
        "",
        "Against the fastest peer of those that a goal names; ours as timed in turn with it.",
        "",
        "| row | goal | fastest peer | its µs | ours µs | times as fast | |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for r, j in rows:
        figures = " | – | – | – " if j.times is None else f" | {j.peer_us:.1f} | {j.ours_us:.1f} | {j.times:.3f} "
        lines.append(f"| `{r.op}` {r.shape} | {said(j.goal)} | {j.peer or '–'}{figures}| {j.verdict} |")
    return [*lines, ""]


def tally(results: Sequence[Result]) -> str:
    verdicts = [j.verdict for r in results for j in judged(r)]
    if not verdicts:
        return ""
    rest = verdicts.count("not judged")
    return f" Beside peers of the same run: {verdicts.count('met')} goals met, {verdicts.count('MISSED')} MISSED" + (
        f", {rest} not judged." if rest else "."
    )
