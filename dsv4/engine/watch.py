"""What the pools of the engine looked like during a run."""

from dsv4.cache.paged import PagedCache

SAMPLED = 8  # steps between two samples of the fragmentation at first: each sample reads the state of every page
POINTS = 1024  # points of a series at most: longer runs are sampled more coarsely


class Watch:
    """Samples the pools of `cache` step by step. pressed: steps, of `steps`, that began or ended under pressure or
    chose sizes under it. evictions: the step of each, from 0."""

    def __init__(self, cache: PagedCache):
        self.cache, self.steps, self.pressed, self.every = cache, 0, 0, 1
        # the most live pages in each group of `every` steps
        self.live: dict[str, list[int]] = {name: [] for name in cache.pools}
        # after the first of each `looked_every` steps
        self.fragmentation: dict[str, list[float]] = {name: [] for name in cache.pools}
        self.looked_every, self.evictions = SAMPLED, []
        self._begun: dict[str, int] = {}
        self._seen = False

    def _live(self) -> dict[str, int]:
        """Live pages of each pool."""
        return {name: pool.live for name, pool in self.cache.pools.items()}

    def _under_pressure(self) -> bool:
        return self.cache.under_pressure

    def look(self) -> None:
        """Called when a step begins."""
        self._begun, self._seen = self._live(), self._under_pressure()

    def saw(self, pressed: bool) -> None:
        """Called when sizes were chosen, under pressure or not."""
        self._seen |= pressed

    def evicted(self) -> None:
        """Called when a request was evicted in this step."""
        self.evictions.append(self.steps)

    def step(self) -> None:
        """Called when a step has ended."""
        self.pressed += self._seen or self._under_pressure()
        for name, now in self._live().items():
            course, live = self.live[name], max(now, self._begun[name])
            if self.steps % self.every == 0:
                course.append(live)
            else:
                course[-1] = max(course[-1], live)
        if self.steps % self.looked_every == 0:
            for name, pool in self.cache.figures().items():
                self.fragmentation[name].append(pool["fragmentation"])
        self.steps += 1
        if self.steps == self.every * POINTS:
            self.every *= 2
            self.live = {
                name: [max(course[i : i + 2]) for i in range(0, len(course), 2)] for name, course in self.live.items()
            }
        if self.steps == self.looked_every * POINTS:
            self.looked_every *= 2
            self.fragmentation = {
                name: [sum(course[i : i + 2]) / 2 for i in range(0, len(course), 2)]
                for name, course in self.fragmentation.items()
            }

    def mean_fragmentation(self) -> dict[str, float]:
        """Mean fragmentation of each pool over the steps; 0 before the first."""
        return {name: sum(course) / len(course) if course else 0.0 for name, course in self.fragmentation.items()}

    def document(self) -> dict:
        """JSON values. live_share: of each pool, the largest share of its pages that was live when one of
        `steps_a_point` steps began or ended; fragmentation: of each pool, the share of rows of live pages that held
        nothing after one of `steps_a_look` steps, or the mean of looks where the run was long; eviction_steps: the step
        of each eviction, from 0."""
        pools = self.cache.pools
        return {
            "share_of_steps_under_pressure": self.pressed / self.steps if self.steps else 0.0,
            "steps_a_point": self.every,
            "live_share": {name: [n / pools[name].pages for n in course] for name, course in self.live.items()},
            "steps_a_look": self.looked_every,
            "fragmentation": self.fragmentation,
            "eviction_steps": self.evictions,
        }
