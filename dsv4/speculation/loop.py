"""Speculative generation for a batch of rows: draft, verify all drafts in one pass, keep the right ones, rewind the
rest.

A row always holds one final token that the model has not run yet (`pending`). A pass runs it and the drafts after it,
position by position as plain decoding would, and keeps the longest prefix that plain decoding could have produced.
Caches are addressed by position, so a rewind only sets lengths: of window, entries, index keys, compressor rows and the
MTP block's window.

Given equal logits, greedy tokens are those of plain greedy decoding, and sampled tokens have its distribution. The
backend's kernels decide whether a pass of several tokens gives the logits of single steps to the last bit: see
README.md beside this file.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND, Cache
from dsv4.cache.host_tier.grouped import host_use
from dsv4.engine.generate import Generation, context_full, context_limit
from dsv4.errors import InputError
from dsv4.model.causal import CausalLM, capacity
from dsv4.sampling import Sampling, distribution
from dsv4.speculation import verify as ways
from dsv4.speculation.accept import Accepted, accept_greedy, accept_sampled, draw
from dsv4.speculation.captured import Steps
from dsv4.speculation.draft import Drafter, Drafts
from dsv4.speculation.passes import Verify
from dsv4.speculation.policy import Policy, Static, room
from dsv4.speculation.prefill import prefill
from dsv4.speculation.result import Speculation


@dataclass
class _Row:
    """One row: its output, and the state that decides how it continues. state: of the policy."""

    out: Generation
    state: Any
    generator: torch.Generator

    @property
    def active(self) -> bool:
        return not self.out.stop_reason


def generate_speculative(
    model: CausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    drafter: Drafter,
    sampling: Sampling = Sampling(),
    policy: Policy | None = None,
    max_context: int | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    pressure: Callable[[], bool] = lambda: False,
    max_rewind: int = DEFAULT_MAX_REWIND,
    verify: Callable[[CausalLM], Verify] = ways.default,
) -> list[Generation]:
    """Generate from prompts until a stop id or `max_new_tokens` each, as `dsv4.engine.generate.generate` does from one
    prompt.

    policy: chooses how many tokens each row drafts (None: always the drafter's `draft_tokens`). on_token(row, id) as
    tokens become final. Row b draws from its own generator with seed sampling.seed + b, so its tokens do not depend on
    other rows. A pass drafts at most max_rewind − 1 tokens. verify makes the object that runs a pass, by default one
    append. Raises as `generate` does (ContextOverrun as soon as one row's next token has no room), and InputError if
    the model cannot draft.
    """
    check_can_speculate(model, drafter)
    policy = policy or Static(drafter.draft_tokens)
    limit = context_limit(model, prompts, max_new_tokens, max_context)
    cache = model.new_cache(len(prompts), capacity(model, limit), max_rewind)
    rows = [
        _Row(
            Generation(list(ids), cache_bytes=cache.nbytes, max_context=limit, speculation=Speculation(drafter.name)),
            policy.initial(),
            torch.Generator().manual_seed(sampling.seed + b),
        )
        for b, ids in enumerate(prompts)
    ]
    batch = _Batch(
        model,
        cache,
        rows,
        drafter,
        sampling,
        limit,
        max_new_tokens,
        frozenset(stop_ids),
        on_token,
        verify(model, cache),
        policy,
    )
    begun = time.perf_counter()
    logits, streams = batch.prefill(on_prefill)
    batch.seconds("prefill_seconds", begun)
    begun = time.perf_counter()
    batch.first(logits, streams)
    batch.seconds("decode_seconds", begun)
    batch.prepare()
    while any(row.active for row in rows):
        batch.step(pressure())
        batch.seconds("decode_seconds", begun)
    for row in rows:
        row.out.host = host_use(cache)
    return [row.out for row in rows]


class _Batch:
    """The rows of one call of `generate_speculative`."""

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        rows: list[_Row],
        drafter: Drafter,
        sampling: Sampling,
        limit: int,
        max_new_tokens: int,
        stops: frozenset[int],
        on_token,
        verify: Verify,
        policy: Policy,
    ):
        self.model, self.cache, self.rows, self.drafter, self.sampling, self.limit = (
            model,
            cache,
            rows,
            drafter,
            sampling,
            limit,
        )
        self.max_new_tokens, self.stops, self.on_token, self.verify, self.policy = (
            max_new_tokens,
            stops,
            on_token,
            verify,
            policy,
        )
        drafter.begin([row.out.prompt_ids for row in rows], model, cache, self._choose)

    def seconds(self, name: str, begun: float) -> None:
        """Seconds since `begun`, without captures meanwhile, which are reported separately."""
        if self.model.device.type == "cuda" and name == "prefill_seconds":
            torch.cuda.synchronize(self.model.device)  # prefill time ends when the device has finished its work
        captured = sum(way.capture_seconds for way in self._captured())
        for row in self.rows:
            row.out.capture_seconds = captured
            setattr(row.out, name, time.perf_counter() - begun - captured)

    def _captured(self) -> list[Steps]:
        """The object that captures steps, if there is one."""
        return [way for way in (self.verify, self.drafter.captured) if isinstance(way, Steps)]

    def prepare(self) -> None:
        """Capture the passes that a single row will run, if it continues. Other widths are captured when they are
        needed."""
        if len(self.rows) > 1 or not self.rows[0].active or self.cache.lengths[0] == self.limit:
            return
        sizes = {0, *(self._cut(0, size) for size in self.policy.sizes)}
        # a pass has its drafts and one more token; the block runs as many tokens as a pass kept, and then one at a time
        for way in self._captured():
            way.prepare(range(1, max(sizes) + 2) if way is self.drafter.captured else (size + 1 for size in sizes))

    # ---- prefill ----------------------------------------------------------------------------

    def prefill(self, on_prefill) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the prompts. Returns the logits [B, 1, vocab] of each row's last token, and its streams [B, 1, n, d] if
        the drafter needs them."""
        on_streams = self.drafter.prefilled if self.drafter.needs_streams else None
        return prefill(self.model, self.cache, [row.out.prompt_ids for row in self.rows], on_streams, on_prefill)

    def first(self, logits: torch.Tensor, streams: torch.Tensor | None) -> None:
        """Choose the token after each prompt, as a pass without drafts whose pending token was the prompt's last."""
        B = len(self.rows)
        none = Drafts(torch.zeros(B, 0, dtype=torch.int64), [0] * B, None, [0] * B)
        self._keep(self._accept(logits, none), none, streams)

    # ---- a pass -----------------------------------------------------------------------------

    def step(self, pressure: bool) -> None:
        """One pass: draft, verify, keep."""
        B, active = len(self.rows), [row.active for row in self.rows]
        for row, length in zip(self.rows, self.cache.lengths):
            if row.active and length == self.limit:
                raise context_full(self.limit, len(row.out.token_ids))
        wanted = self.policy.choose([row.state if row.active else None for row in self.rows], pressure)
        drafts = self.drafter.draft([self._cut(b, wanted[b]) for b in range(B)])
        pending = torch.tensor([[row.out.token_ids[-1]] for row in self.rows])
        ids = torch.cat((pending.to(drafts.tokens.device), drafts.tokens), 1)
        before = self.cache.lengths
        logits, streams = self.verify(
            ids, [1 + size if on else 0 for on, size in zip(active, drafts.sizes)], self.drafter.needs_streams
        )
        kept = self._keep(self._accept(logits, drafts), drafts, streams)
        self.cache.rewind([now - length - n for now, length, n in zip(self.cache.lengths, before, kept)])

    def _cut(self, b: int, wanted: int) -> int:
        """The number of drafts of row b: the policy's size, within the context, the tokens it may still generate, and
        the cache's rewind."""
        row = self.rows[b]
        if not row.active:
            return 0
        left = self.max_new_tokens - len(row.out.token_ids)
        return max(0, min(wanted, room(left, self.limit - self.cache.lengths[b]), self.cache.max_rewind - 1))

    def _accept(self, logits: torch.Tensor, drafts: Drafts) -> Accepted:
        drafted, sizes = drafts.tokens.to(logits.device), torch.tensor(drafts.sizes, device=logits.device)
        if self.sampling.temperature == 0:
            return accept_greedy(logits, drafted, sizes)
        u = torch.zeros(len(self.rows), drafted.shape[1] + 1, dtype=torch.float64)
        for b, (row, size) in enumerate(zip(self.rows, drafts.sizes)):
            # as many draws as the row has drafts, so that its draws do not depend on other rows
            if row.active:
                u[b, : size + 1] = torch.rand(size + 1, dtype=torch.float64, generator=row.generator)
        u = u.to(logits.device, non_blocking=True)
        return accept_sampled(distribution(logits, self.sampling), drafts.q, drafted, sizes, u[:, 1:], u[:, 0])

    def _keep(self, accepted: Accepted, drafts: Drafts, streams: torch.Tensor | None) -> list[int]:
        """Output the accepted tokens, up to a stop, and report them to the drafter. Returns the number of output tokens
        of each row. Here the host waits for the device, once a pass."""
        counts, emitted, kept = accepted.count.tolist(), accepted.tokens.tolist(), []
        for b, row in enumerate(self.rows):
            if not row.active:
                kept.append(0)
                continue
            kept.append(self._give(b, emitted[b][: counts[b] + 1]))
            if len(row.out.token_ids) > kept[b]:  # prefill gave the first token, not a pass
                row.state = self.policy.observe(row.state, counts[b], drafts.sizes[b])
                row.out.speculation.passed(drafts.sizes[b], min(counts[b], kept[b]), drafts.steps[b])
        self.drafter.commit(streams, torch.tensor(emitted), [n if row.active else 0 for n, row in zip(kept, self.rows)])
        return kept

    def _give(self, b: int, tokens: list[int]) -> int:
        """Append tokens to row b's output until it stops. Returns how many were appended."""
        out = self.rows[b].out
        for n, token in enumerate(tokens, 1):
            out.token_ids.append(token)
            if self.on_token is not None and token not in self.stops:
                self.on_token(b, token)
            if token in self.stops or len(out.token_ids) == self.max_new_tokens:
                out.stop_reason = "eos" if token in self.stops else "max_new_tokens"
                return n
        return len(tokens)

    def _choose(self, logits: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [M] from a drafting model's logits [M, vocab] for `rows`, and the distribution they were drawn
        from."""
        if self.sampling.temperature == 0:
            return logits.argmax(-1), None
        q = distribution(logits, self.sampling)
        u = torch.stack([torch.rand((), dtype=torch.float64, generator=self.rows[b].generator) for b in rows])
        return draw(q, u.to(q.device, non_blocking=True)), q


def check_can_speculate(model: CausalLM, drafter: Drafter) -> None:
    """Raises InputError, naming what to do instead, where `drafter` cannot run on this model."""
    if model.backend == "training":
        raise InputError(
            "the training backend runs whole sequences and keeps no cache to rewind; speculate with reference, "
            "cpu or triton"
        )
    if drafter.needs_mtp and not len(model.mtp):
        raise InputError(
            "drafting with the MTP block was asked for, and this model has none; use --speculate lookup, which "
            "drafts from the text itself, or --speculate off"
        )
