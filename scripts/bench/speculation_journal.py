"""What a race of block sizes has finished, line by line, so that a run that is cut off goes on where it stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pvariance
from types import MappingProxyType

from dsv4.probes.journal import Kept
from dsv4.speculation import Policy
from dsv4.speculation.costs import BatchCost, parse_batch
from scripts.bench.speculation import Point


@dataclass
class Timed:
    """One policy on one trace, as it ran. expected: tokens/s that the simulation gives with the measured costs. same:
    rows whose tokens are those of no speculation, where a real text was written."""

    policy: str
    trace: str
    kind: str
    batch: int
    tokens: int
    seconds: float
    expected: float
    rounds: list[int] = field(repr=False, default_factory=list)
    sizes: list[list[int]] = field(repr=False, default_factory=list)
    polls: int = 0
    synchronisations: int = 0
    same: int | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def point(self) -> Point:
        drafted = [size for sizes in self.sizes for size in sizes]
        rate = (self.tokens - self.batch * len(self.rounds)) / sum(drafted) if sum(drafted) else None
        return Point(
            self.trace,
            self.kind,
            self.batch,
            self.policy,
            self.tokens_per_second,
            self.tokens,
            len(self.rounds),
            rate,
            fmean(drafted),
            pvariance(drafted),
            own_text=self.same is not None,
        )


def name_of(policy: Policy | None) -> str:
    return "oracle" if policy is None else policy.name


class SpeculationJournal:
    """Lines of JSON: ["of", what runs], ["costs", batch, BatchCost], ["ran", Timed]. No path: nothing is kept.

    what: everything that figures depend on. Raises InputError for a journal of something else.
    """

    def __init__(self, path: Path | None = None, what: Mapping = MappingProxyType({})):
        self.kept, self.costs, self.ran = Kept(path, what), {}, []
        for kind, *held in self.kept.held:
            if kind == "costs":
                self.costs[held[0]] = parse_batch(str(held[0]), held[1])
            else:
                self.ran.append(Timed(**held[0]))

    def cost(self, batch: int, cost: BatchCost) -> None:
        self.costs[batch] = cost
        self.kept.append("costs", batch, asdict(cost))

    def done(self, timed: Timed) -> None:
        self.ran.append(timed)
        self.kept.append("ran", asdict(timed))

    def left(self, policy: Policy | None, batch: int, traces: Sequence[str]) -> list[str]:
        """Traces that the policy has not run on."""
        ran = {r.trace for r in self.ran if (r.policy, r.batch) == (name_of(policy), batch)}
        return [name for name in traces if name not in ran]
