"""The recipe: stages by row length, and the learning rate over all of them."""

from dataclasses import dataclass

from scripts.training.trainee import Wanted

BATCH = 65536      # tokens a step
PEAK, FLOOR = 4e-3, 2e-5
WARM_UP = 200      # steps, from the start
RESTART = 20       # steps after the optimiser's momenta were lost


@dataclass(frozen=True)
class Stage:
    """`tokens` in millions at rows of `length` tokens. needles: share of rows that hide and ask for some. sparse: attend to
    the indexer's selection; gather: see `Wanted`; simulate: train in the official quantisation simulation."""

    name: str
    length: int
    tokens: int
    needles: float
    sparse: bool
    simulate: bool = False
    gather: float = 0.0

    @property
    def steps(self) -> int:
        return self.tokens * 1_000_000 // BATCH

    @property
    def wanted(self) -> Wanted:
        return Wanted(sparse=self.sparse, gather=self.gather)


STAGES = (  # many needles in short rows and every entry to look at: that is what makes retrieval emerge
    Stage("512 dense", 512, 50, 0.70, sparse=False),
    Stage("1K dense", 1024, 80, 0.50, sparse=False),
    Stage("2K dense", 2048, 30, 0.40, sparse=False),
    Stage("2K gathered", 2048, 40, 0.40, sparse=True, gather=0.2),
    Stage("4K gathered", 4096, 110, 0.40, sparse=True, gather=0.2),
    Stage("16K gathered", 16384, 75, 0.40, sparse=True, gather=0.2),
    Stage("32K gathered", 32768, 25, 0.40, sparse=True, gather=0.2),
    Stage("4K simulated", 4096, 40, 0.35, sparse=True, gather=0.2, simulate=True),
    Stage("16K simulated", 16384, 15, 0.35, sparse=True, gather=0.2, simulate=True),
)
TOTAL = sum(stage.steps for stage in STAGES)
DECAY = 0.35       # share of all steps over which the rate falls linearly to FLOOR


def stage_at(step: int) -> Stage:
    for stage in STAGES:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return STAGES[-1]


def rate(step: int, since_restart: int) -> float:
    """Learning rate of a step: warm up, hold, fall linearly; gentle for a moment after a restart."""
    fall = min(1.0, (TOTAL - step) / (DECAY * TOTAL))
    warm = min(1.0, (step + 1) / WARM_UP, (since_restart + 1) / RESTART)
    return warm * (FLOOR + (PEAK - FLOOR) * fall)
