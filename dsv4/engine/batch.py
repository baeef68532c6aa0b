"""Requests that join and leave between steps, over one pool of pages.

A step of the engine advances each running request by one piece: a chunk of its prompt that ends at a multiple of 128,
or a pass, which runs its last token and, if the engine speculates, drafts after it (`dsv4.engine.passes`). When pages
are short, drafts shrink first, down to none. Then prefixes that no request uses are dropped (`PrefixTree.make_free`).
Then requests are evicted: the lowest priority first, among those the lowest mean acceptance ε of drafts, among those
the least recently advanced, among those the last to come. An evicted request waits and resumes by running its tokens
again, in the pieces and passes in which they first ran. Prompts attend densely, whatever policy a GQA model decodes
with (`model.attention`), unless that says to read them in chunks (`Attention.prefill`): then a piece is `model.chunk`
tokens, and no prefix is kept or borrowed, because a chunk depends on the memory of the chunks before. Under pressure
policies draft less; it counts the pages that requests hold. Drafts take free pages only, so of a pool that kept
prefixes have filled one page is freed. To drop more of them cost evictions and time over a tight pool
(audits/batch/demo/cpu/pressure_cpu.md).

Results of matrix products depend on the number of rows. So by default each request runs alone in its pieces, and no bit
of its output depends on other requests or on evictions. `together=True` decodes all rows as one batch instead (a
captured step, where steps are captured), and resumes in chunks where decoding reads all that a prompt does: faster, and
equal up to rounding. Prompts that are read in chunks then advance together too. With speculation, other requests
influence how many drafts a pass has when pages are short or under pressure. Given equal logits that changes no token,
greedy or sampled (`accept_drawn`). Passes of several tokens
round differently from single steps: see dsv4/speculation/README.md.
"""

import time
from collections.abc import Callable
from functools import partial

from dsv4.cache.paged import PagedCache
from dsv4.cache.paging import BLOCK
from dsv4.cache.prefixes import PrefixTree
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.engine.acceptance import Drawn
from dsv4.engine.engine import Engine
from dsv4.engine.passes import Passes
from dsv4.engine.state import PagedWork, Result
from dsv4.engine.watch import Watch
from dsv4.errors import Dsv4Error, InputError, OutOfPages
from dsv4.model.causal import CausalLM
from dsv4.speculation.draft import Drafter
from dsv4.speculation.policy import Policy
from dsv4.speculation.verify import default

REWIND = MAX_DRAFTS + 1  # tokens of the longest pass


class BatchEngine(Engine):
    """Runs requests a piece at a time. verify(model, cache) makes the object that runs a pass; a request's own policy
    is followed. Other arguments as for `Engine`."""

    def __init__(
        self,
        model: CausalLM,
        cache: PagedCache,
        stop_ids=(),
        together: bool = False,
        on_result: Callable[[Result], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        verify=partial(default, pads=False),
    ):
        super().__init__(model, cache, cache.max_context, stop_ids, on_result, clock, drafter, policy, REWIND)
        self.prefixes, self.watch, self.together = PrefixTree(cache), Watch(cache), together
        drawn = Drawn(cache.batch, model.device)
        self.passes = Passes(model, cache, drafter, drawn, verify, on_end=self._end)
        self.running: list[PagedWork] = []
        self.steps = self.evictions = 0
        self.chunked = model.attention is not None and model.attention.prefill is not None
        self.prompts_at_once = 0  # the most prompts whose chunks ran in one pass
        # after an eviction no request joins until one leaves; otherwise two requests could evict each other forever
        self._tight = False

    def cancel(self, id: str) -> None:
        """End a request now; its result holds the tokens so far. Raises InputError if none of that id waits or runs."""
        work = next((w for w in self.waiting + self.running if w.request.id == id), None)
        if work is None:
            raise InputError(f"request {id!r} neither waits nor runs; it has ended, or was never submitted")
        work.result.stop_reason = "cancelled"
        self._end(work)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> None:
        """Let waiting requests join, then run one piece of each running request."""
        self._join()
        self.steps += 1
        self.watch.look()
        ready = (
            [
                w
                for w in self.running
                if w.result.token_ids and self.cache.lengths[w.row] >= w.text and w.again == len(w.passes)
            ]
            if self.together
            else []
        )
        if ready:
            self._guard(ready, self._pass)
        reading = [w for w in self.running if self.chunked and self.together and self._reads(w)]
        if reading:
            self._guard(reading, self._read_chunks)
        for work in [w for w in self.running if w not in ready and w not in reading]:
            if work.row is not None:  # not evicted or ended meanwhile
                self._guard([work], self._advance)
        self._relieve()
        self.watch.step()

    # ---- joins and leaves ----------------------------------------------------------------

    def _join(self) -> None:
        taken = {w.row for w in self.running}
        for row in range(self.cache.batch):
            if row in taken or not self.waiting or (self._tight and self.running):
                continue
            work = min(self.waiting, key=lambda w: (-w.request.priority, w.arrival))
            self.waiting.remove(work)
            self.running.append(work)
            work.row, work.used = row, self.steps
            as_text = self.together and (self.model.attention is None or self.model.attention.plain)
            self.passes.join(work, len(work.ids) if as_text else len(work.request.prompt_ids))
            if not work.result.evictions and not self.chunked:
                self.prefixes.ask(work.request.prompt_ids)

    def _leave(self, work: PagedWork) -> None:
        if work.row is not None:
            self.cache.leave(work.row)
            self.running.remove(work)
            work.row = None

    def _end(self, work: PagedWork, error: Dsv4Error | None = None) -> None:
        self._leave(work)
        self._tight = False
        super()._end(work, error)

    def _evict(self, work: PagedWork) -> None:
        self._leave(work)
        self.waiting.append(work)
        self.evictions += 1
        self.watch.evicted()
        work.result.evictions += 1
        self._tight = True

    def _relieve(self) -> None:
        """Leave drafts, which take free pages only, a page of each pool that kept prefixes have filled."""
        for name, pool in self.cache.pools.items() if self.drafter else ():
            if not pool.free:
                self.prefixes.make_free(name, 1)

    # ---- steps ---------------------------------------------------------------------------

    def _guard(self, works: list[PagedWork], act: Callable[[list[PagedWork]], None]) -> None:
        """Call act(works). When pages are short, evict requests and try again; requests that still fail end with their
        error."""
        try:
            act(works)
        except OutOfPages as error:
            victim = min(self.running, key=lambda w: (w.request.priority, w.epsilon, w.used, -w.arrival))
            if len(self.running) == 1:
                self._end(victim, error)
                return
            self._evict(victim)
            left = [w for w in works if w.row is not None]
            if left:
                self._guard(left, act)
        except Dsv4Error as error:
            for work in works:
                if work.row is not None:
                    self._end(work, error)

    def _advance(self, works: list[PagedWork]) -> None:
        """Run one piece of one request, its row alone."""
        [work] = works
        if self._reads(work):
            self._read_chunks(works) if self.chunked else self._read(work)
        elif work.again < len(work.passes):
            self.passes.again(work)
            work.used = self.steps
        else:
            self._pass(works)

    def _reads(self, work: PagedWork) -> bool:
        """Whether a part of its text has still to run."""
        return self.cache.lengths[work.row] < work.text

    def _read_chunks(self, works: list[PagedWork]) -> None:
        """Run the next chunks of some prompts."""
        ends = [min(work.text, self.cache.lengths[work.row] + self.model.chunk) for work in works]
        new = [work for work, end in zip(works, ends) if end == len(work.ids)]
        logits = self.passes.read_chunks(works, ends, last=bool(new))
        self.prompts_at_once = max(self.prompts_at_once, len(works))
        for work, end in zip(works, ends):
            work.used = self.steps
            if end == work.text and work not in new:  # the request resumes
                self.passes.follow(work, work.ids[end])
        if new:
            self.passes.first(new, logits, None)

    def _read(self, work: PagedWork) -> None:
        """Run one piece of a request's text. A prefix that another request has just finished is borrowed, not run
        again."""
        prompt, b = len(work.request.prompt_ids), work.row
        if self.cache.lengths[b] < prompt:
            if (kept := self.prefixes.longest(b, work.request.prompt_ids)) is not None:
                work.streams = kept.snapshot.streams
            gained = self.prefixes.graft(b, work.request.prompt_ids, resumes=work.result.evictions > 0)
            work.result.grafted += 0 if work.result.evictions else gained
        start = self.cache.lengths[b]
        end = min(work.text, (start // BLOCK + 1) * BLOCK)
        new = end == len(work.ids)
        logits = self.passes.read(work, start, end, last=new)
        work.used = self.steps
        if end % BLOCK == 0 and end <= prompt:
            self.prefixes.remember(b, work.ids[:end], work.streams)
        if new:
            self.passes.first([work], logits, self.passes.behind(work))
        elif end == work.text:  # the request resumes
            self.passes.follow(work, work.ids[end])

    def _pass(self, works: list[PagedWork]) -> None:
        """Run a pass of one request, or of several in one batch."""
        self.watch.saw(self.passes.advance(works))
        for work in works:
            work.used = self.steps

    def _counts(self) -> dict:
        return {
            "steps": self.steps,
            "evictions": self.evictions,
            "prompts_at_once": self.prompts_at_once,
            "prefix_hit_rate": self.prefixes.hit_rate,
            "prefix_hit_tokens": self.prefixes.hit_tokens,
            "prefixes_kept": len(self.prefixes.kept),
            "prefixes_dropped": self.prefixes.dropped,
        }
