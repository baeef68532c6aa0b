"""What a race of block sizes has finished, line by line, so that a run that is cut off goes on where it stopped."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from dsv4.speculation import Policy
from dsv4.speculation.costs import BatchCost
from scripts.bench.journal import append, claim, lines_of
from scripts.bench.speculation_gpu import Timed, name_of


class SpeculationJournal:
    """Lines of JSON: ["of", what runs], ["costs", batch, BatchCost], ["ran", Timed]. No path: nothing is kept.

    what: everything that figures depend on. Raises InputError for a journal of something else.
    """

    def __init__(self, path: Path | None, what: dict):
        self.path, self.costs, self.ran = path, {}, []
        if path is not None:
            claim(path, what)
        for kind, *held in lines_of(path)[1:] if path is not None else ():
            if kind == "costs":
                self.costs[held[0]] = BatchCost(**{k: tuple(v) if isinstance(v, list) else v for k, v in held[1].items()})
            else:
                self.ran.append(Timed(**held[0]))

    def cost(self, batch: int, cost: BatchCost) -> None:
        self.costs[batch] = cost
        self._append("costs", batch, dataclasses.asdict(cost))

    def done(self, timed: Timed) -> None:
        self.ran.append(timed)
        self._append("ran", dataclasses.asdict(timed))

    def left(self, policy: Policy | None, batch: int, traces: Sequence[str]) -> list[str]:
        """Traces that the policy has not run on."""
        ran = {r.trace for r in self.ran if (r.policy, r.batch) == (name_of(policy), batch)}
        return [name for name in traces if name not in ran]

    def _append(self, *line) -> None:
        if self.path is not None:
            append(self.path, *line)
