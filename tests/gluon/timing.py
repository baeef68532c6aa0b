"""When asynchronous operations take effect, and which partition runs: chosen by a seed.

| seed | TMA loads, cp.async | wgmma, TMA stores read shared memory | partitions switch |
|---|---|---|---|
| 0 | as late as allowed | as late as allowed | at waits |
| 1 | at once | at once | at waits |
| 2 | at once | as late as allowed | at waits and arrivals |
| 3 | as late as allowed | at once | at waits and arrivals |
| more | drawn for each | drawn for each | drawn |
"""

import random

SEEDS = tuple(range(6))  # enough for a test: the extremes, and two that draw


class Timing:
    def __init__(self, seed: int):
        self.seed, self.random = seed, random.Random(seed)

    def _draws(self) -> bool:
        return self.random.random() < 0.5

    def copies_at_once(self) -> bool:
        return self.seed in (1, 2) if self.seed < 4 else self._draws()

    def reads_at_once(self) -> bool:
        """Whether a wgmma or TMA store reads its shared operands when it is issued."""
        return self.seed in (1, 3) if self.seed < 4 else self._draws()

    def switches(self) -> bool:
        """Whether another partition runs after an arrival."""
        return self.seed in (2, 3) if self.seed < 4 else self._draws()

    def lands_early(self) -> bool:
        """Whether a copy under way lands now, though partitions can run."""
        return self.seed >= 4 and self.random.random() < 0.3

    def next(self, runnable: list, current):
        """The partition that runs: the next in turn, or any."""
        if self.seed >= 4:
            return self.random.choice(runnable)
        later = [p for p in runnable if p.index > current.index]
        return (later or runnable)[0]

    def order(self, programs: list) -> list:
        """The order of a grid's programs."""
        if self.seed < 4:
            return programs[:: -1 if self.seed % 2 else 1]
        return self.random.sample(programs, len(programs))
