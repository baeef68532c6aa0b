"""When asynchronous operations take effect, and which partition runs: chosen by a seed.

| seed | TMA loads, cp.async | wgmma and TMA stores read | partitions run |
|---|---|---|---|
| 0 | as late as allowed | as late as allowed | in turn, from wait to wait |
| 1 | at once | at once | in turn, from wait to wait |
| 2 | at once | as late as allowed | the last that can |
| 3 | as late as allowed | at once | the first that can |
| 4 | at once | as late as allowed | the first that can |
| more | one of the three, drawn | one of the three, drawn | by a drawn order, redrawn at times |

The third of the three is to draw for each operation.
"""

import random

SEEDS = tuple(range(7))  # enough for a test: the extremes, and two that draw
ALWAYS = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (1.0, 0.0), 3: (0.0, 1.0), 4: (1.0, 0.0)}  # probability of "at once"


class Timing:
    """Of one program; `place` is its place in the order of programs."""

    def __init__(self, seed: int, place: int = 0):
        self.seed, self.random = seed, random.Random(seed * 1_000_003 + place)
        drawn = [self.random.choice((0.0, 1.0, 0.5)) for _ in range(2)]
        self.copies, self.reads = ALWAYS.get(seed, drawn)
        self.ranks: dict = {}  # by partition: the least runs

    def copies_at_once(self) -> bool:
        return self.random.random() < self.copies

    def reads_at_once(self) -> bool:
        """Whether a wgmma or TMA store reads its shared operands when it is issued."""
        return self.random.random() < self.reads

    def switches(self) -> bool:
        """Whether another partition may run after an arrival."""
        return self.seed > 1

    def lands_early(self) -> bool:
        """Whether a copy under way lands now, though partitions can run."""
        return self.seed not in ALWAYS and self.random.random() < 0.2

    def next(self, runnable: list, current):
        """The partition that runs."""
        if self.seed < 2:
            later = [p for p in runnable if p.index > current.index]
            return (later or runnable)[0]
        if self.seed in ALWAYS:
            return runnable[-1 if self.seed == 2 else 0]
        if self.random.random() < 0.1:
            self.ranks.clear()
        return min(runnable, key=lambda p: self.ranks.setdefault(p.index, self.random.random()))


def order(seed: int, programs: list) -> list:
    """The order of a grid's programs."""
    if seed in ALWAYS:
        return programs[:: -1 if seed % 2 else 1]
    return random.Random(seed).sample(programs, len(programs))
