"""Requests in groups, each of which is one launch: the device decodes all of a group until the last has ended.

The host does nothing while a group runs but read what the device has published, so nobody joins, is evicted or borrows
a prefix. A group is as many requests as there are rows, if pages for all that they may write are free (`Allotted`). The
first is the waiting one of the highest priority, and of those the first to come; others join in that order if they are
drawn with the same temperature and top_p. Prompts run before the launch.

Rows are decoded as one batch, so texts equal those of `BatchEngine` up to rounding, and sampled ones in distribution:
noise is counter-based (`dsv4.speculation.noise`). Each row must have noise of its own, because the sizes of one row may
depend on another's tokens. So the first request with a seed draws with it, and later ones with numbers derived from it.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dsv4.cache.allotted import Allotted
from dsv4.cache.paged import PagedCache
from dsv4.engine.engine import Engine
from dsv4.engine.state import PagedWork, Request, Result
from dsv4.engine.steppers import DeviceRounds, advance_all
from dsv4.engine.watch import Watch
from dsv4.errors import InputError, OutOfPages
from dsv4.model.causal import CausalLM
from dsv4.speculation.choosing import Choice
from dsv4.speculation.draft import Drafter
from dsv4.speculation.noise import splitmix64
from dsv4.speculation.one_launch import OneLaunch
from dsv4.speculation.policy import Policy
from dsv4.speculation.rounds import Rounds

AHEAD = 1  # the device needs no round in advance: sizes apply to the next one


class DeviceBatch(Engine):
    """Runs requests in groups. most: drafts of a round; the last most + 1 tokens of the cache's context are not for
    requests, because rows that are done keep running. make: makes the object that runs the rounds of a group: by
    default one launch, on a CUDA device. launches: of loops so far, one a group. Other arguments as for `Engine`."""

    def __init__(
        self,
        model: CausalLM,
        cache: PagedCache,
        most: int,
        stop_ids=(),
        on_result: Callable[[Result], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        make: Callable[..., Rounds] = OneLaunch,
    ):
        context = cache.max_context - most - 1
        super().__init__(model, cache, context, stop_ids, on_result, clock, drafter, policy, max(most, 1))
        self.most, self.make, self.held = most, make, Allotted(cache, cache.batch)
        self.watch = Grown(self.held)
        self.steps = self.launches = self.prompts_at_once = 0
        self._seeds: Counter[int] = Counter()
        self._made: dict[tuple[float, float], Rounds] = {}  # by temperature and top_p, which captured rounds contain

    def step(self) -> None:
        """Run a group to its end, or end a request that no empty pool holds."""
        self.waiting.sort(key=lambda w: (-w.request.priority, w.arrival))
        if not (group := self._group()):
            reason = self.held.lacking([self._tokens(self.waiting[0].request), *self._idle(1)])
            self._end(self.waiting[0], OutOfPages(f"{reason}; make the pool larger"))
            return
        idle = [self._work(self._nothing(group[0].request)) for _ in self._idle(len(group))]
        rows = group + idle
        for b, work in enumerate(rows):
            work.row = b
        try:
            self.held.allot([self._tokens(work.request) for work in rows])
            made = partial(self._rounds, _drawn(group[0]))
            stepper = DeviceRounds(self.model, self.held, rows, self.drafter, self.most, AHEAD, made)
            advance_all(stepper)
            self.prompts_at_once = max(self.prompts_at_once, len(group))
            self._count(stepper, len(group))
        finally:
            self.held.close()
        for work in group:
            self._end(work)

    def _group(self) -> list[PagedWork]:
        """The next requests that run at once, of those that wait in order; none if the first finds no pages."""
        found: list[PagedWork] = []
        for work in self.waiting:
            sizes = [self._tokens(w.request) for w in [*found, work]]
            if _drawn(work) != _drawn(self.waiting[0]) or self.held.lacking(sizes + self._idle(len(sizes))):
                continue
            found.append(work)
            if len(found) == self.cache.batch:
                break
        return found

    def _tokens(self, request: Request) -> int:
        """Tokens of a row that pages must be there for: its own, and what it runs when it is done."""
        return len(request.prompt_ids) + request.max_tokens + self.most

    def _nothing(self, like: Request) -> Request:
        """What a row without a request runs: one token, and then nothing."""
        return Request("", (0,), 1, sampling=like.sampling)

    def _idle(self, taken: int) -> list[int]:
        """Tokens of each row that is not taken."""
        return [2 + self.most] * (self.cache.batch - taken)

    def _rounds(self, sampling: tuple[float, float], *given, choice: Choice, ahead: int) -> Rounds:
        """Rounds of a group: earlier ones that begin anew, if there are any with room for it. given: as `make` takes
        it."""
        tokens, drafts, left = given[3:6]
        made = self._made.get(sampling)
        if made is None or max(left) > made.room:
            room = max(work.request.max_tokens for work in self.waiting)
            made = self._made[sampling] = self.make(*given, choice=choice, ahead=ahead, room=room)
        else:
            made.restart(tokens, drafts, left, choice)
        return made

    # ---- requests ------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never run ends at once, with its error as its result."""
        sampling = request.sampling
        if earlier := self._seeds[sampling.seed]:
            seed = splitmix64(torch.tensor(sampling.seed), torch.tensor(earlier)).item()
            request = replace(request, sampling=replace(sampling, seed=seed))
        self._seeds[sampling.seed] += 1
        super().submit(request)

    def _check(self, request):
        super()._check(request)
        if request.policy is not None:
            raise InputError(
                f"the request has the policy {request.policy.name!r}; requests that are one launch share the engine's"
            )

    # ---- figures -------------------------------------------------------------------------

    def _count(self, stepper: DeviceRounds, requests: int) -> None:
        """Count the rounds of a group, of whose rows the first `requests` had some."""
        if (rounds := stepper.rounds) is None:  # each request ended with its first token
            return
        self.launches += getattr(rounds, "launches", 0)
        counts = rounds.log[: rounds.known.rounds, 2].cpu()  # tokens of each row in each round
        began = torch.tensor([[len(prompt) for prompt in stepper.prompts]])
        lengths = torch.cat((began, began + counts.cumsum(0)))
        pressed = self.watch.replay(lengths, lengths == lengths[-1])
        self.steps += len(counts)
        for b, work in enumerate(stepper.rows[:requests]):
            work.result.pressed_history = [p for p, n in zip(pressed, counts[:, b].tolist()) if n]

    def _counts(self):
        none = dict.fromkeys(("evictions", "prefix_hit_rate", "prefix_hit_tokens"), 0)
        none |= dict.fromkeys(("prefixes_kept", "prefixes_dropped"), 0)
        at_once = {"prompts_at_once": self.prompts_at_once}
        return {"steps": self.steps, "launches": self.launches, **at_once, **none}


class Grown(Watch):
    """Watches rows that hold their pages beforehand. Live are the pages that rows would hold if they took them as they
    grow, which is what the device chooses sizes by; fragmentation is of the pages that they do hold."""

    def __init__(self, held: Allotted):
        super().__init__(held.whole)
        self.held, self._course, self._pressed, self._at = held, {}, [], 0

    def _live(self):
        return {name: course[self._at] for name, course in self._course.items()}

    def _under_pressure(self):
        return self._pressed[self._at]

    def replay(self, lengths: torch.Tensor, done: torch.Tensor) -> list[bool]:
        """Rounds that have run: lengths int64 [R + 1, B], done bool [R + 1, B] before the first and after each. Returns
        whether the size of each round was chosen under pressure."""
        self._course = {name: n.tolist() for name, n in self.held.live(lengths, done).items()}
        self._pressed = self.held.pressed(lengths, 0, done).tolist()
        rows, mtp = self.cache._main.now, self.cache._mtp.now
        for at, now in enumerate(lengths[1:].tolist()):
            self._at = at
            self.look()
            self._at, rows[: len(now)], mtp[: len(now)] = at + 1, now, now
            self.step()
        return self._pressed[:-1]


def _drawn(work: PagedWork) -> tuple[float, float]:
    """Requests must have this in common to be one launch."""
    return work.request.sampling.temperature, work.request.sampling.top_p
