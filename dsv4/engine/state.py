"""A request: what was asked, what came of it, and the state that decides how it goes on.

`Work` is that state, whoever advances it: the tokens so far, how they are sampled, how many are drafted, when it stops,
who is told, and when each token came. Steppers (`dsv4.engine.steppers`) and passes (`dsv4.engine.passes`) run the
model and give it tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from dsv4.errors import Dsv4Error
from dsv4.sampling import Sampling
from dsv4.speculation.policy import Adaptive, Policy, Static, room
from dsv4.speculation.result import Speculation

MEAN = Adaptive()  # whatever policy chooses the sizes, this mean of acceptance decides which request is evicted
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it. Requests of larger priority are evicted later. policy: how many
    tokens it drafts; None: the engine's policy."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int = 128
    priority: float = 0.0
    sampling: Sampling = Sampling()
    policy: Policy | None = None


@dataclass
class Generation:
    """The result of a generation. Times in seconds; `prefill_seconds` ends with the first token's logits. first_token
    and between_tokens as in `Result`."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = ""  # 'eos' or 'max_new_tokens'
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    capture_seconds: float = 0.0  # capturing the decode step as a graph, on a GPU; not part of the other times
    cache_bytes: int = 0
    max_context: int = 0
    host: dict | None = None  # of a cache in host memory: `dsv4.cache.host_tier.grouped.host_use`
    experts: dict | None = None  # of routed experts in host memory: `dsv4.engine.expert_use`
    speculation: Speculation | None = None  # counts of drafting, if tokens were drafted
    first_token: float | None = None
    between_tokens: list[float] = field(default_factory=list)

    at_length: ClassVar[str] = "max_new_tokens"  # the stop reason of a request that got all its tokens

    @property
    def prefill_rate(self) -> float:
        return len(self.prompt_ids) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the steps after the first token."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0


@dataclass
class Result:
    """The result of a request. stop_reason: 'eos', 'max_tokens', 'cancelled' or 'error' (then `error` is the
    exception).

    Times in seconds: first_token since the request was submitted, between_tokens one for each later token; tokens of
    one pass come at once, 0 s apart. grafted: prompt tokens that were borrowed, before any eviction; evictions: how
    often it lost its pages; speculation counts passes that first gave tokens, not those that ran again.
    pressed_history: for each of them, whether its size was chosen under pressure.
    """

    id: str
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = ""
    error: Dsv4Error | None = None
    grafted: int = 0
    evictions: int = 0
    first_token: float | None = None
    between_tokens: list[float] = field(default_factory=list)
    speculation: Speculation = field(default_factory=lambda: Speculation("off"))
    pressed_history: list[bool] = field(default_factory=list)

    at_length: ClassVar[str] = "max_tokens"

    def document(self, text: str | None = None) -> dict:
        """JSON values; `text` of the tokens, if there is a tokenizer."""
        error = None if self.error is None else {"type": type(self.error).__name__, "message": str(self.error)}
        spec = self.speculation
        return {
            "id": self.id,
            "text": text,
            "token_ids": self.token_ids,
            "stop_reason": self.stop_reason,
            "error": error,
            "prompt_tokens": self.prompt_tokens,
            "grafted_tokens": self.grafted,
            "evictions": self.evictions,
            "speculation": spec.method,
            "drafted": spec.proposed,
            "accepted": spec.accepted,
            "acceptance": spec.acceptance,
            "mean_block_size": spec.mean_block_size,
            "block_size_variance": spec.block_size_variance,
            "block_size_history": spec.block_size_history,
            "accepted_history": spec.accepted_history,
            "pressed_history": self.pressed_history,
            "time_to_first_token_seconds": self.first_token,
            "inter_token_percentiles_seconds": percentiles(self.between_tokens),
            "inter_token_seconds": self.between_tokens,
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th, 95th and 99th percentile, with linear interpolation, as 'p50', 'p95' and 'p99'; None if `values` is
    empty."""
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if len(values) else None


class Verdict(NamedTuple):
    """What was decided of a pass of one row. tokens: its output, if nothing stops it; accepted: how many of `drafts`
    lead them; error: why there are no more tokens."""

    tokens: list[int]
    accepted: int
    drafts: list[int]
    error: Dsv4Error | None = None


class Pass(NamedTuple):
    """The tokens that ran after a row's last token, and how many tokens of the pass were kept (that token is one)."""

    drafts: list[int]
    kept: int


@dataclass(eq=False)
class Work:
    """A request on its way. result: its output so far; row: of the cache, None while it has none; limit: tokens that
    its context holds; generator: it samples with; on_token(id): told of each token that is no stop id.

    ids: prompt and new tokens, all final; the last is not run yet. state: of its policy. submitted and last_token:
    seconds of `clock`.
    """

    request: Request
    result: Generation | Result
    limit: int
    generator: torch.Generator = field(repr=False)
    policy: Policy = Static(0)
    stops: frozenset[int] = frozenset()
    row: int | None = None
    on_token: Callable[[int], None] | None = None
    clock: Callable[[], float] = time.perf_counter
    ids: list[int] = field(init=False)
    state: Any = field(init=False)
    submitted: float = field(init=False)
    last_token: float = 0.0

    def __post_init__(self):
        self.ids, self.state = list(self.request.prompt_ids), self.policy.initial()
        self.submitted = self.clock()

    @property
    def active(self) -> bool:
        return not self.result.stop_reason

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_tokens - len(self.result.token_ids)

    @property
    def free(self) -> int:
        """Slots of its context that are empty once all but its last token have run."""
        return self.limit - len(self.ids) + 1

    @property
    def room(self) -> int:
        """Tokens that it still gets, if no stop id comes: within its request and its context."""
        return min(self.left, self.free) if self.active else 0

    def drafts(self, wanted: int, rewind: int) -> int:
        """The number of drafts of its next pass: what its policy wants, within the tokens it may still generate, its
        context, and what the cache can rewind."""
        return max(0, min(wanted, room(self.left, self.free), rewind - 1)) if self.active else 0

    def give(self, tokens: Sequence[int]) -> int:
        """Output tokens, which came at once, until it stops. Returns how many were output."""
        now, result = self.clock(), self.result
        for n, token in enumerate(tokens, 1):
            if result.token_ids:
                result.between_tokens.append(now - self.last_token)
            else:
                result.first_token = now - self.submitted
            self.last_token = now
            self.ids.append(token)
            result.token_ids.append(token)
            stops = token in self.stops
            if self.on_token is not None and not stops:
                self.on_token(token)
            if stops or not self.left:
                result.stop_reason = "eos" if stops else result.at_length
                return n
        return len(tokens)

    def observe(self, accepted: int, proposed: int, steps: int) -> None:
        """Count `accepted` of `proposed` drafts of a pass, which took `steps` runs of a drafting model."""
        self.state = self.policy.observe(self.state, accepted, proposed)
        if self.result.speculation is not None:
            self.result.speculation.passed(proposed, accepted, steps)

    def take(self, verdict: Verdict, steps: int, pressed: bool) -> int:
        """Output what a pass decided, and count it. pressed: whether its size was chosen under pressure. Returns how
        many tokens were output."""
        n = self.give(verdict.tokens)
        if n:
            self.observe(min(verdict.accepted, n), len(verdict.drafts), steps)
        return n


@dataclass(eq=False)
class PagedWork(Work):
    """A request that may lose its pages. arrival: its number; used: engine step that last advanced it; epsilon: mean
    acceptance of its drafts.

    text: how many of `ids` run as a prompt does, in pieces of up to 128, since it joined; passes: those that ran after
    the text, of which the first `again` have run again since it joined; streams [1, n, d]: the main model's at the last
    token of the text that was run, where the drafter wants them.
    """

    result: Result
    arrival: int = 0
    used: int = 0
    epsilon: np.float32 = MEAN.initial()
    text: int = 0
    passes: list[Pass] = field(default_factory=list)
    again: int = 0
    streams: torch.Tensor | None = field(default=None, repr=False)

    def observe(self, accepted: int, proposed: int, steps: int) -> None:
        super().observe(accepted, proposed, steps)
        self.epsilon = MEAN.observe(self.epsilon, accepted, proposed)

    def take(self, verdict: Verdict, steps: int, pressed: bool) -> int:
        n = super().take(verdict, steps, pressed)
        if n:
            self.result.pressed_history.append(pressed)
            self.passes.append(Pass(verdict.drafts, n))
            self.again = len(self.passes)
        return n
