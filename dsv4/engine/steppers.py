"""Ways to advance requests, and the loop that runs them from their prompts to their ends."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.host_tier.grouped import host_use
from dsv4.engine.expert_use import ExpertUse
from dsv4.engine.limits import context_full
from dsv4.engine.passes import Passes
from dsv4.engine.state import Generation, Work
from dsv4.errors import InputError, RoundError
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import sample
from dsv4.speculation.captured import Steps
from dsv4.speculation.choosing import choice_of
from dsv4.speculation.device_drafters import CATCH_UP_WIDTHS, primed
from dsv4.speculation.draft import Drafter, needs_block
from dsv4.speculation.policy import Policy
from dsv4.speculation.policy_device import on_device
from dsv4.speculation.prefill import OnStreams, prefill
from dsv4.speculation.rounds import Rounds

OnPrefill = Callable[[int, int], None] | None


class Stepper(ABC):
    """Advances `rows`, request b in row b of `cache`. capture_seconds: time of captures so far."""

    capture_seconds: float = 0.0

    def __init__(self, model: CausalLM, cache: Cache, rows: Sequence[Work], on_streams: OnStreams | None = None):
        self.model, self.cache, self.rows, self.on_streams = model, cache, rows, on_streams
        self.prompts = [list(row.request.prompt_ids) for row in rows]

    def prefill(self, on_prefill: OnPrefill) -> None:
        """Run the prompts, and wait for them. on_prefill(done, total)."""
        self.logits, self.streams = prefill(self.model, self.cache, self.prompts, self.on_streams, on_prefill)
        if self.logits.is_cuda:
            torch.cuda.synchronize(self.logits.device)  # prefill time ends when the device has finished its work

    @abstractmethod
    def first(self) -> None:
        """Give each request the token after its prompt."""

    def prepare(self) -> None:
        """Capture what the requests will run. Called if one of them goes on."""

    @abstractmethod
    def advance(self) -> None:
        """One step of all rows. Raises ContextOverrun if a next token has no room in the context."""

    def finish(self) -> None:
        """Called when every request has ended."""

    def cancel(self) -> None:
        """Called when an exception ends all of them: what still runs is to end."""

    def check_room(self) -> None:
        """Raises ContextOverrun if an active request has no room for its next token."""
        for row in self.rows:
            if row.active and row.free <= 0:
                raise context_full(row.limit, len(row.result.token_ids))


class Times(NamedTuple):
    """Seconds until the prompts had run, from then to the end without captures, and of captures."""

    prefill: float
    decode: float
    capture: float


def run(stepper: Stepper, on_prefill: OnPrefill) -> list[Generation]:
    """Run the requests of a stepper as `advance_all` does; their results, with times."""
    use = ExpertUse(stepper.model)
    times = advance_all(stepper, on_prefill, use)
    experts = use.document(sum(len(row.result.token_ids) - 1 for row in stepper.rows), times.decode)
    for row in stepper.rows:
        out = row.result
        out.experts = experts
        out.prefill_seconds, out.decode_seconds, out.capture_seconds = times
        out.host = host_use(stepper.cache)
    return [row.result for row in stepper.rows]


def advance_all(stepper: Stepper, on_prefill: OnPrefill = None, use: ExpertUse | None = None) -> Times:
    """Run the requests of a stepper from an empty cache until each has ended. use: is marked before the prompts, before
    decoding and at the end. Raises as the stepper does; what came until then has been told."""
    rows, mark = stepper.rows, (lambda: None) if use is None else use.mark
    mark()
    begun = time.perf_counter()
    stepper.prefill(on_prefill)
    prefilled = time.perf_counter()
    stepper.first()
    try:
        if any(row.room for row in rows):
            stepper.prepare()
        mark()  # not before: captures run steps too
        while any(row.active for row in rows):
            stepper.advance()
        stepper.finish()
    except BaseException:
        stepper.cancel()
        raise
    captured, ended = stepper.capture_seconds, time.perf_counter()
    mark()
    return Times(prefilled - begun, ended - prefilled - captured, captured)


class SingleTokens(Stepper):
    """One request, a token a step: an append or, on the triton backend, a `DecodeGraph`. Then, greedily, the next step
    is running before the host knows its token: one that ends the request is appended for nothing."""

    graph: DecodeGraph | None = None

    def first(self):
        self._give(self.logits)
        self.logits = None  # from now on those of the step that is running

    def prepare(self):
        if self.model.backend == "triton":
            begun = time.perf_counter()
            self.graph = DecodeGraph(self.model, self.cache, whole=False)
            if self.graph.graph is not None:
                self.capture_seconds = time.perf_counter() - begun

    def advance(self):
        self.check_room()
        [row] = self.rows
        if self.graph is None:
            self._give(self.model.append(self._fed(), self.cache, logits="last", whole=False))
        elif row.request.sampling.temperature:
            self._give(self.graph.step(self._fed()))
        else:
            running = self.graph.step(self._fed()) if self.logits is None else self.logits
            tokens, self.logits = self.graph.greedy(running, row.room > 1)
            row.give(tokens)

    def _fed(self) -> torch.Tensor:
        """The last token, int64 [1, 1]; greedily, a captured step has it on the device already."""
        return torch.tensor([[self.rows[0].ids[-1]]])

    def _give(self, logits: Logits) -> None:
        [row] = self.rows
        row.give([sample(logits[0, -1], row.request.sampling, row.generator)])


class DraftedPasses(Stepper):
    """Passes of all rows that the host decides (`Passes`), by rejection sampling. All rows have one policy and one
    temperature."""

    def __init__(self, passes: Passes, rows: Sequence[Work]):
        self.passes, self.drafter = passes, passes.drafter
        on_streams = self.drafter.prefilled if passes.wants_streams else None
        super().__init__(passes.model, passes.cache, rows, on_streams)

    def first(self):
        self.passes.first(self.rows, self.logits, self.streams)

    def prepare(self):
        """The passes of a single row. Other widths are captured when they are needed."""
        if len(self.rows) > 1:
            return
        [row] = self.rows
        sizes = {0, *(row.drafts(size, self.cache.max_rewind) for size in row.policy.sizes)}
        # a pass has its drafts and one more token; the block runs as many tokens as a pass kept, and then one at a time
        for way in self._captured:
            way.prepare(range(1, max(sizes) + 2) if way is self.drafter.captured else (size + 1 for size in sizes))

    def advance(self):
        self.check_room()
        self.passes.advance(self.rows)

    @property
    def capture_seconds(self) -> float:
        return sum(way.capture_seconds for way in self._captured)

    @property
    def _captured(self) -> list[Steps]:
        """The objects that capture steps, if there are any."""
        return [way for way in (self.passes.verify, self.drafter.captured) if isinstance(way, Steps)]


def rounds_in(config, limit: int, drafter: Drafter | None, policy: Policy) -> tuple[int, int]:
    """Of rounds within a context of `limit` tokens: drafts of a round at most, which is less than the policy wants if
    the context ends near the checkpoint's; and the tokens that the cache must be able to rewind. The cache needs room
    for that many drafts and one token more, because rows that are done keep running. Raises InputError if there is
    none."""
    most = min(max(policy.sizes), config.max_position_embeddings - limit - 1)
    if most < 0:
        raise InputError(
            f"a context of {limit} tokens is all that the checkpoint takes; rounds run one token behind it: lower "
            f"--max-context or --max-new-tokens by one, or leave out {'--speculate' if drafter else '--loop'}"
        )
    # so that the block can run many rounds without drafts at once
    back = CATCH_UP_WIDTHS[-1] - 1 if needs_block(drafter) and 0 in policy.sizes else 1
    return most, max(most, back)


class DeviceRounds(Stepper):
    """Rounds that stay on the device (`Rounds`), which decides what each row gets and where it ends; what the host
    makes of their records must agree. All rows have one policy, temperature and top_p. most: drafts of a round; make:
    makes the object that runs the rounds."""

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        rows: Sequence[Work],
        drafter: Drafter | None,
        most: int,
        ahead: int,
        make: Callable[..., Rounds],
    ):
        super().__init__(model, cache, rows)
        self.drafter, self.most, self.ahead, self.make = drafter, most, ahead, make
        drawn = [row.request.sampling for row in rows]
        self.choice = choice_of(drawn[0], len(rows), model.device, [s.seed for s in drawn])
        self.rounds: Rounds | None = None  # until they are prepared

    def prefill(self, on_prefill):
        self.tokens, self.drafts = primed(self.model, self.cache, self.prompts, on_prefill, self.choice, self.drafter)
        self.firsts = self.tokens.tolist()  # waits for the prompts, whose time ends here

    def first(self):
        for row, token in zip(self.rows, self.firsts):
            row.give([token])

    def prepare(self):
        begun, policy, B = time.perf_counter(), self.rows[0].policy, len(self.rows)
        # a text without repeats drafts nothing
        sizes = policy.sizes if needs_block(self.drafter) else (0, *policy.sizes)
        of_rows = self.tokens, self.drafts, [row.room for row in self.rows], self.rows[0].stops
        how = on_device(policy, B, self.model.device), [n for n in sizes if n <= self.most]
        given = self.model, self.cache, self.most, *of_rows, *how
        self.rounds = self.make(*given, choice=self.choice, ahead=self.ahead)
        self.rounds.prepare()
        self.capture_seconds = time.perf_counter() - begun

    def advance(self):
        if self.rounds is not None and not all(self.rounds.known.done):
            self.rounds.advance(self._tell)
            return
        self.finish()
        self.check_room()  # only now: the others got all their tokens first

    def finish(self):
        if self.rounds is None:
            return
        found = self.rounds.finish(self._tell)
        for row, tokens, done, history in zip(self.rows, found, self.rounds.known.done, self.rounds.history()):
            if tokens != row.result.token_ids[1:] or done != (row.room == 0):
                raise RoundError(
                    f"the device has {len(tokens)} tokens of row {row.row} and {'ended' if done else 'runs'} it; "
                    f"the host has {len(row.result.token_ids) - 1} and room for {row.room}; expected the same"
                )
            for proposed, accepted in history:
                row.observe(accepted, proposed, proposed if needs_block(self.drafter) else 0)

    def cancel(self):
        if self.rounds is not None:
            self.rounds.cancel()

    def _tell(self, b: int, tokens: list[int]) -> None:
        if self.rows[b].active:  # else the device went on where the host stopped, which is seen at the end
            self.rows[b].give(tokens)
