"""The recipes: stages by row length, and the learning rate over all of them."""

from dataclasses import dataclass
from typing import Any

from scripts.training.trainee import Wanted


@dataclass(frozen=True)
class Stage:
    """`tokens` in millions at rows of `length` tokens. needles: share of rows that hide and ask for some. wanted: what
    the trainee is told (see `trainee.Wanted`; None: nothing); simulate: train in the official quantisation
    simulation."""

    name: str
    length: int
    tokens: int
    needles: float
    wanted: Any = None
    simulate: bool = False


@dataclass(frozen=True)
class Recipe:
    """batch: tokens a step. Rates: warm up over `warm_up` steps, hold `peak`, fall linearly to `floor` over the share
    `decay` of all steps; `restart` steps are gentle after the optimiser's momenta were lost."""

    stages: tuple[Stage, ...]
    batch: int = 65536
    peak: float = 4e-3
    floor: float = 2e-5
    warm_up: int = 200
    restart: int = 20
    decay: float = 0.35

    def steps(self, stage: Stage) -> int:
        return stage.tokens * 1_000_000 // self.batch

    @property
    def total(self) -> int:
        return sum(map(self.steps, self.stages))

    def end_of(self, stage: Stage) -> int:
        """Step after the stage's last."""
        return sum(map(self.steps, self.stages[: self.stages.index(stage) + 1]))

    def stage_at(self, step: int) -> Stage:
        return next((stage for stage in self.stages if step < self.end_of(stage)), self.stages[-1])

    def rate(self, step: int, since_restart: int) -> float:
        """Learning rate of a step."""
        fall = min(1.0, (self.total - step) / (self.decay * self.total))
        warm = min(1.0, (step + 1) / self.warm_up, (since_restart + 1) / self.restart)
        return warm * (self.floor + (self.peak - self.floor) * fall)


DENSE, GATHERED = Wanted(sparse=False), Wanted(sparse=True, gather=0.2)
DEMO = Recipe(
    (  # many needles in short rows and every entry to look at: that is what makes retrieval emerge
        Stage("512 dense", 512, 50, 0.70, DENSE),
        Stage("1K dense", 1024, 80, 0.50, DENSE),
        Stage("2K dense", 2048, 30, 0.40, DENSE),
        Stage("2K gathered", 2048, 40, 0.40, GATHERED),
        Stage("4K gathered", 4096, 110, 0.40, GATHERED),
        Stage("16K gathered", 16384, 75, 0.40, GATHERED),
        Stage("32K gathered", 32768, 25, 0.40, GATHERED),
        Stage("4K simulated", 4096, 40, 0.35, GATHERED, simulate=True),
        Stage("16K simulated", 16384, 15, 0.35, GATHERED, simulate=True),
    )
)
# the same data; attention is dense throughout, and one KV head serves four query heads. 430 s on an H100 at the
# measured rates
GQA = Recipe(
    (
        Stage("512", 512, 80, 0.70),
        Stage("1K", 1024, 170, 0.50),
        Stage("2K", 2048, 120, 0.40),
        Stage("4K", 4096, 150, 0.40),
        Stage("16K", 16384, 90, 0.40),
        Stage("32K", 32768, 35, 0.40),
    )
)
