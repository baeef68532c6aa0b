"""What engines have in common: requests that wait for rows of a paged cache, and results that are told as they end."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from dsv4.cache.paged import PagedCache
from dsv4.engine.limits import beyond_checkpoint, check_ids
from dsv4.engine.state import PagedWork, Request, Result
from dsv4.engine.watch import Watch
from dsv4.errors import ContextOverrun, Dsv4Error, InputError
from dsv4.model.causal import CausalLM
from dsv4.speculation.draft import Drafter, check_can_speculate
from dsv4.speculation.policy import Policy, Static
from dsv4.speculation.result import Speculation


class Engine(ABC):
    """Runs requests on `cache`, which no one else may use; a request has up to `context` tokens. on_result(result) is
    called as each request ends; clock() gives seconds. drafter None: plain decoding. policy: how many tokens a request
    drafts. rewind: tokens that the cache must be able to rewind if something drafts. Raises InputError if the drafter
    cannot run on this model, or if the cache cannot rewind that many."""

    def __init__(
        self,
        model: CausalLM,
        cache: PagedCache,
        context: int,
        stop_ids,
        on_result: Callable[[Result], None] | None,
        clock: Callable[[], float],
        drafter: Drafter | None,
        policy: Policy | None,
        rewind: int,
    ):
        if drafter is not None:
            check_can_speculate(model, drafter)
            if cache.max_rewind < rewind:
                raise InputError(
                    f"the cache was built with max_rewind {cache.max_rewind} and passes have up to {rewind} tokens; "
                    f"build it with max_rewind >= {rewind}"
                )
        elif policy is not None:
            raise InputError(f"the policy {policy.name!r} was given and nothing drafts; give a drafter too")
        self.model, self.cache, self.context, self.drafter = model, cache, context, drafter
        self.policy = policy or Static(drafter.draft_tokens if drafter else 0)
        self.stop_ids, self.clock = frozenset(stop_ids), clock
        self.on_result = on_result or (lambda result: None)
        self.waiting: list[PagedWork] = []
        self.arrivals = 0

    watch: Watch

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never run ends at once, with its error as its result."""
        self.arrivals += 1
        work = self._work(request)
        try:
            self._check(request)
        except Dsv4Error as error:
            self._end(work, error)
            return
        self.waiting.append(work)

    def run(self) -> None:
        """Step until every request has ended."""
        while self.busy:
            self.step()

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.waiting)

    @abstractmethod
    def step(self) -> None:
        """Advance requests."""

    def _work(self, request: Request) -> PagedWork:
        return PagedWork(
            request,
            Result(request.id, len(request.prompt_ids), speculation=Speculation(self._method)),
            self.context,
            torch.Generator().manual_seed(request.sampling.seed),
            request.policy or self.policy,
            self.stop_ids,
            clock=self.clock,
            arrival=self.arrivals,
        )

    @property
    def _method(self) -> str:
        return self.drafter.name if self.drafter else "off"

    def _check(self, request: Request) -> None:
        """Raises Dsv4Error for a request that can never run."""
        total = len(request.prompt_ids) + request.max_tokens - 1  # the last token is not fed back
        if not request.prompt_ids:
            raise InputError("the prompt is empty")
        if request.policy is not None and self.drafter is None:
            raise InputError(
                f"the request has the policy {request.policy.name!r} and nothing drafts; give the engine a drafter"
            )
        if total > (most := self.model.config.max_position_embeddings):
            raise beyond_checkpoint(len(request.prompt_ids), request.max_tokens, most, "max_tokens")
        if total > self.context:
            raise ContextOverrun(
                f"the prompt has {len(request.prompt_ids)} tokens and {request.max_tokens} more were asked for, over "
                f"the max_context of {self.context}; shorten it, lower max_tokens, or raise --max-context "
                f"(at most {most})"
            )
        check_ids(request.prompt_ids, self.model.config.vocab_size)

    def _end(self, work: PagedWork, error: Dsv4Error | None = None) -> None:
        """A request has ended; it does now if there is an error."""
        if work in self.waiting:
            self.waiting.remove(work)
        if error is not None:
            work.result.stop_reason, work.result.error = "error", error
        self.on_result(work.result)

    def figures(self) -> dict:
        """Steps, evictions, the share of whole prompt blocks that were grafted, what `Watch` measured while requests
        ran, and the figures of each pool now with its mean fragmentation during the run."""
        pools, mean = self.cache.figures(), self.watch.mean_fragmentation()
        for name, pool in pools.items():
            pool["mean_fragmentation"] = mean[name]
        return {**self._counts(), **self.watch.document(), "pools": pools}

    @abstractmethod
    def _counts(self) -> dict:
        """steps, evictions, prefix_hit_rate, prefix_hit_tokens, prefixes_kept and prefixes_dropped."""
