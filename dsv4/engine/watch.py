"""What a run of the engine looked like from its pools."""

from dsv4.paged_cache import PagedCache

SAMPLED = 8  # steps between two looks at the fragmentation, which reads the state of every page
POINTS = 1024  # of the course of live pages, at most: longer runs are kept coarser


class Watch:
    """Looks at the pools of `cache` step by step. pressed: steps that began or ended under pressure or chose sizes
    under it, of `steps`."""

    def __init__(self, cache: PagedCache):
        self.cache, self.steps, self.pressed, self.every = cache, 0, 0, 1
        self.live: dict[str, list[int]] = {name: [] for name in cache.pools}  # the most live pages of each `every` steps
        self._fragmentation: list[dict[str, float]] = []
        self._begun: dict[str, int] = {}
        self._seen = False

    def look(self) -> None:
        """A step begins."""
        self._begun, self._seen = {name: pool.live for name, pool in self.cache.pools.items()}, self.cache.under_pressure

    def saw(self, pressed: bool) -> None:
        """Sizes were chosen under pressure, or not."""
        self._seen |= pressed

    def step(self) -> None:
        """A step has ended."""
        self.pressed += self._seen or self.cache.under_pressure
        for name, pool in self.cache.pools.items():
            course, live = self.live[name], max(pool.live, self._begun[name])
            if self.steps % self.every == 0:
                course.append(live)
            else:
                course[-1] = max(course[-1], live)
        if self.steps % SAMPLED == 0:
            self._fragmentation.append({name: pool["fragmentation"] for name, pool in self.cache.figures().items()})
        self.steps += 1
        if self.steps == self.every * POINTS:
            self.every *= 2
            self.live = {name: [max(course[i:i + 2]) for i in range(0, len(course), 2)] for name, course in self.live.items()}

    def mean_fragmentation(self) -> dict[str, float]:
        """Of each pool, 0 before the first step."""
        looks = self._fragmentation
        return {name: sum(look[name] for look in looks) / len(looks) if looks else 0.0 for name in self.cache.pools}

    def document(self) -> dict:
        """JSON values. live_share: of each pool, the largest share of its pages that was live when one of `steps_a_point` steps
        began or ended."""
        pools = self.cache.pools
        return {"share_of_steps_under_pressure": self.pressed / self.steps if self.steps else 0.0, "steps_a_point": self.every,
                "live_share": {name: [n / pools[name].pages for n in course] for name, course in self.live.items()}}
