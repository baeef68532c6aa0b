"""Requests that join and leave between steps, over one pool of pages.

A step of the engine advances each running request by one piece: a chunk of its prompt that ends at a multiple of 128, or one token.
When pages are short, prefixes that nobody runs go first (`PrefixTree.make_free`), then requests: the lowest priority first, among
those the lowest mean acceptance ε of drafts (what speculation gains least from), among those the least recently advanced, among those
the last to come. An evicted
request waits and resumes by running its tokens again, in the pieces in which they first ran.

Products of floating point numbers depend on how many rows share them. So by default each request runs alone in its pieces, and its
output depends neither on its neighbours nor on evictions, to the bit. `together=True` decodes all rows as one batch instead, and
resumes in chunks: faster, and equal up to rounding.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsv4.engine.requests import Request, Result
from dsv4.errors import ContextOverrun, Dsv4Error, InputError, NotFinite, OutOfPages
from dsv4.generate import sample
from dsv4.model import Model
from dsv4.page_tables import BLOCK
from dsv4.paged_cache import PagedCache
from dsv4.prefixes import PrefixTree
from dsv4.speculation.policy import AdaptiveParameters

SAMPLED = 8  # steps between two looks at the fragmentation, which reads the state of every page


@dataclass(eq=False)
class Work:
    """A request on its way. ids: prompt and new tokens; row: of the cache, None while it waits; used: engine step that last advanced it;
    epsilon: mean acceptance of its drafts, as `Adaptive` starts and keeps it."""

    request: Request
    arrival: int
    submitted: float
    ids: list[int]
    result: Result
    generator: torch.Generator = field(repr=False)
    row: int | None = None
    used: int = 0
    last_token: float = 0.0
    epsilon: float = AdaptiveParameters.start


class BatchEngine:
    """Runs requests on `cache`, which it has for itself. on_result(result) as each ends; clock() in seconds."""

    def __init__(self, model: Model, cache: PagedCache, stop_ids=(), together: bool = False,
                 on_result: Callable[[Result], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        self.model, self.cache, self.prefixes = model, cache, PrefixTree(cache)
        self.stop_ids, self.together = frozenset(stop_ids), together
        self.on_result, self.clock = on_result or (lambda result: None), clock
        self.waiting: list[Work] = []
        self.running: list[Work] = []
        self.steps = self.arrivals = self.evictions = 0
        self._fragmentation: list[dict[str, float]] = []
        self._tight = False  # after an eviction nobody joins until somebody leaves: else two requests could evict each other for ever

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never run ends at once, with its error as its result."""
        result = Result(request.id, len(request.prompt_ids))
        self.arrivals += 1
        work = Work(request, self.arrivals, self.clock(), list(request.prompt_ids), result,
                    torch.Generator().manual_seed(request.sampling.seed))
        try:
            self._check(request)
        except Dsv4Error as error:
            self._end(work, "error", error)
            return
        self.waiting.append(work)

    def cancel(self, id: str) -> None:
        """End a request now; its result holds the tokens so far. Raises InputError if none of that id waits or runs."""
        work = next((w for w in self.waiting + self.running if w.request.id == id), None)
        if work is None:
            raise InputError(f"request {id!r} neither waits nor runs; it has ended, or was never submitted")
        self._end(work, "cancelled")

    def run(self) -> None:
        """Step until nothing waits or runs."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Joins, then one piece for each running request."""
        self._join()
        self.steps += 1
        ready = [w for w in self.running if len(w.ids) - self.cache.lengths[w.row] == 1] if self.together else []
        if ready:
            self._guard(ready, lambda: self._decode(ready))
        for work in [w for w in self.running if w not in ready]:
            if work.row is not None:  # not evicted or ended meanwhile
                self._guard([work], lambda w=work: self._advance(w))
        if self.steps % SAMPLED == 1:
            self._fragmentation.append({name: pool["fragmentation"] for name, pool in self.cache.figures().items()})

    # ---- joins and leaves ----------------------------------------------------------------

    def _check(self, request: Request) -> None:
        total = len(request.prompt_ids) + request.max_tokens - 1  # the last token is not fed back
        if not request.prompt_ids:
            raise InputError("the prompt is empty")
        if total > self.cache.max_context:
            raise ContextOverrun(f"the prompt has {len(request.prompt_ids)} tokens and {request.max_tokens} more were asked for, over the "
                                 f"max_context of {self.cache.max_context}; shorten it, lower max_tokens, or raise --max-context")
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= self.model.config.vocab_size:
            raise InputError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.model.config.vocab_size}")

    def _join(self) -> None:
        taken = {w.row for w in self.running}
        for row in range(self.cache.batch):
            if row in taken or not self.waiting or (self._tight and self.running):
                continue
            work = min(self.waiting, key=lambda w: (-w.request.priority, w.arrival))
            self.waiting.remove(work)
            self.running.append(work)
            work.row, work.used = row, self.steps
            if not work.result.evictions:
                self.prefixes.ask(work.request.prompt_ids)

    def _leave(self, work: Work) -> None:
        if work.row is not None:
            self.cache.leave(work.row)
            self.running.remove(work)
            work.row = None

    def _end(self, work: Work, reason: str, error: Dsv4Error | None = None) -> None:
        self._leave(work)
        if work in self.waiting:
            self.waiting.remove(work)
        self._tight = False
        work.result.stop_reason, work.result.error = reason, error
        self.on_result(work.result)

    def _evict(self, work: Work) -> None:
        self._leave(work)
        self.waiting.append(work)
        self.evictions += 1
        work.result.evictions += 1
        self._tight = True

    # ---- steps ---------------------------------------------------------------------------

    def _guard(self, works: list[Work], act: Callable[[], None]) -> None:
        """Run `act` for `works`; make room by evictions; what still fails ends these requests alone."""
        try:
            act()
        except OutOfPages as error:
            victim = min(self.running, key=lambda w: (w.request.priority, w.epsilon, w.used, -w.arrival))
            if len(self.running) == 1:
                self._end(victim, "error", error)
                return
            self._evict(victim)
            left = [w for w in works if w.row is not None]
            if left:
                self._guard(left, (lambda: self._decode(left)) if self.together and len(works) > 1 else act)
        except Dsv4Error as error:
            for work in works:
                if work.row is not None:
                    self._end(work, "error", error)

    def _advance(self, work: Work) -> None:
        """One piece of one request, its row alone. A prefix that another request has just finished is borrowed, not run again."""
        prompt, b = len(work.request.prompt_ids), work.row
        if self.cache.lengths[b] < prompt:
            gained = self.prefixes.graft(b, work.request.prompt_ids)
            work.result.grafted += 0 if work.result.evictions else gained
        start = self.cache.lengths[b]
        if start < prompt or self.together:
            end = min(prompt if start < prompt else len(work.ids), (start // BLOCK + 1) * BLOCK)
        else:
            end = start + 1  # also when it resumes: new tokens ran one by one, and do so again
        self._append([work], start, end, last=end == len(work.ids))
        if self.cache.lengths[b] % BLOCK == 0 and end <= prompt:
            self.prefixes.remember(b, work.ids[:end])

    def _decode(self, works: list[Work]) -> None:
        """One token of several requests, in one batch."""
        self._append(works, None, None, last=True)

    def _append(self, works: list[Work], start: int | None, end: int | None, last: bool) -> None:
        pieces = {w.row: w.ids[self.cache.lengths[w.row]:] if start is None else w.ids[start:end] for w in works}
        counts = [len(pieces.get(b, ())) for b in range(self.cache.batch)]
        ids = torch.zeros(self.cache.batch, max(counts), dtype=torch.int64)
        for b, piece in pieces.items():
            ids[b, :len(piece)] = torch.tensor(piece)
        for work in works:  # of all rows before any runs: when one finds no room, nothing has happened
            self.cache.make_room(slice(work.row, work.row + 1), counts[work.row])
        logits = self.model.append(ids, self.cache, n_new=counts, logits="last" if last else "none", chunk=BLOCK)
        for work in works:
            work.used = self.steps
        if last:
            for work in works:
                self._emit(work, logits[work.row, 0])

    def _emit(self, work: Work, logits: torch.Tensor) -> None:
        """The next token of a request, from logits [vocab] after all it has."""
        if not logits.isfinite().all():
            self._end(work, "error", NotFinite(f"the logits after {len(work.ids)} tokens are not finite; audit the checkpoint and numerics"))
            return
        token, now, result = sample(logits, work.request.sampling, work.generator), self.clock(), work.result
        if result.token_ids:
            result.between_tokens.append(now - work.last_token)
        else:
            result.first_token = now - work.submitted
        work.last_token = now
        work.ids.append(token)
        result.token_ids.append(token)
        if token in self.stop_ids or len(result.token_ids) == work.request.max_tokens:
            self._end(work, "eos" if token in self.stop_ids else "max_tokens")

    # ---- figures -------------------------------------------------------------------------

    def figures(self) -> dict:
        """Steps, evictions, the share of whole prompt blocks that were grafted, and of each pool its figures now, with its mean
        fragmentation while requests ran."""
        pools, looks = self.cache.figures(), len(self._fragmentation)
        for name, pool in pools.items():
            pool["mean_fragmentation"] = sum(look[name] for look in self._fragmentation) / looks if looks else 0.0
        return {"steps": self.steps, "evictions": self.evictions, "prefix_hit_rate": self.prefixes.hit_rate,
                "prefix_hit_tokens": self.prefixes.hit_tokens, "prefixes_kept": len(self.prefixes.kept),
                "prefixes_dropped": self.prefixes.dropped, "pools": pools}
