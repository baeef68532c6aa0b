"""Speculative decoding that stays on the device: a round drafts, verifies, commits and chooses the next block sizes.

A round with D drafts is captured once (a CUDA graph; on a CPU it runs as it is) and serves every position of a ragged batch. The
host chooses which D to replay from sizes that earlier rounds left in pinned memory (`ring`), a few rounds behind, and never waits
for the device in a call: rows that want fewer drafts than D have theirs refused, rows that want more get D.

A row holds `start` tokens in the caches; `token` is the last one that it has chosen, not yet in them. The MTP block's entry at
position t is made of the main model's streams at t and the token at t + 1, so it holds `start` entries, and what it said last is
`first`, the draft of what follows `token`. A round:

    d_1 = first;  d_2 … d_D: the block's own streams fed back, from position `start` on
    verify token, d_1 … d_D at start … start + D:  c_0 … c_D, what the model itself chooses after each
    a = how many d_{i+1} equal c_i in a row;  c_0 … c_a are the row's next tokens
    the block again at start … start + D, with the model's streams and the tokens that really follow

What verifying wrote beyond the new length is written again before it can be seen (`dsv4.cache`); so are the block's entries of
chained drafts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dsv4.cache import Cache
from dsv4.errors import InputError
from dsv4.graph import WARM_UP, captures
from dsv4.model import Model
from dsv4.speculation.accept import accept_greedy
from dsv4.speculation.policy_device import DevicePolicy
from dsv4.speculation.prefill import prefill
from dsv4.speculation.ring import Ring
from dsv4.step import CapturedStep


@dataclass
class Progress:
    """What the host knows of a batch, as of the last round that it has read. rounds: how many it has read."""

    rounds: int
    written: list[int]
    sizes: list[int]
    done: list[bool]


@dataclass
class Counts:
    """Of one batch. sizes: what the host knew that rows wanted when it began each round. polls: how often the host asked
    whether a round had ended and heard that it had not."""

    rounds: list[int] = field(default_factory=list)  # drafts of each round, in order
    sizes: list[list[int]] = field(default_factory=list)
    polls: int = 0


SPARE = 8     # rounds that may run after the last that gives a row a token
NAP = 20e-6   # seconds that a poll waits for the next one, which the system makes 50 to 100 µs
SPIN = 4e-3   # seconds of polling without a nap while the device has nothing else to do: a nap is then little beside the round
RING = 4      # rounds whose records the host can still read: as many as may be under way, and some more


class Rounds:
    """Decodes a batch whose prompts are in `cache`, with up to `most` drafts a round.

    streams [B, n, d], tokens int64 [B]: the main model's streams at each row's last position and the token that it chose there;
    the MTP block must hold that position too, and first int64 [B], chained [B, n, d] are what it drafts after `tokens` and its
    streams there (`primed`). left: tokens that each row may still produce. stop_ids end a row, which keeps them. widths: drafts for
    which a round is captured when it is first wanted (None: every number). ring: rounds whose records are held for the host, at least as
    many as `run` has under way. Raises InputError where a round could reach beyond the cache.
    """

    def __init__(self, model: Model, cache: Cache, most: int, tokens: torch.Tensor, first: torch.Tensor, chained: torch.Tensor,
                 left: Sequence[int], stop_ids: Iterable[int], policy: DevicePolicy, widths: Sequence[int] | None = None, ring: int = RING):
        B, device = cache.batch, model.device
        if not model.mtp:
            raise InputError("this model was loaded without an MTP block; draft by lookup, or load one with a block")
        self.model, self.cache, self.most, self.policy, self.room = model, cache, most, policy, max(left)
        rows = lambda: torch.zeros(B, dtype=torch.int64, device=device)
        self.start, self.left, self.written, self.sizes = rows(), rows(), rows(), rows()
        self.token, self.first, self.chained = tokens.clone(), first.clone(), chained.clone()
        self.done = torch.zeros(B, dtype=torch.bool, device=device)
        self.pressure = torch.zeros((), dtype=torch.bool, device=device)  # whether the cache is short of pages: whoever knows sets it
        self.stops = torch.tensor(sorted(set(stop_ids)) or [-1], device=device)
        self.out = torch.zeros(B, self.room + most + 1, dtype=torch.int64, device=device)  # the last columns: what counts for nothing
        self.host_out = torch.zeros(*self.out.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ring = Ring(ring, B, most + 1, device)
        self.captures = captures(model)
        self.side = torch.cuda.Stream(device) if self.captures else None
        self.log = torch.zeros(self.room + SPARE, 3, B, dtype=torch.int64, device=device)  # of each round: drafted, accepted, tokens
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        self.widths = sorted({*(range(most + 1) if widths is None else widths), most})  # what is captured; others run as the next larger
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None  # of all sizes: one graph runs at a time
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.restart(tokens, first, chained, left)

    def restart(self, tokens: torch.Tensor, first: torch.Tensor, chained: torch.Tensor, left: Sequence[int]) -> None:
        """Begin other requests in the same rows, from where `cache` stands now; graphs stay. Arguments as for a new one.

        Raises InputError where a round could reach beyond the cache, or a row could write more than any did when this was made.
        """
        lengths = self.cache.lengths
        reach = max(length + n for length, n in zip(lengths, left)) + self.most
        if reach > self.cache.max_context or self.most > self.cache.max_rewind:
            raise InputError(f"rounds of {self.most} drafts reach {reach} tokens and rewind {self.most}; the cache has max_context "
                             f"{self.cache.max_context} and max_rewind {self.cache.max_rewind}; build it larger or draft fewer")
        if max(left) > self.room:
            raise InputError(f"a row may write {max(left)} tokens; these rounds were made for {self.room}: make new ones")
        for held, given in ((self.start, lengths), (self.left, list(left)), (self.token, tokens), (self.first, first), (self.chained, chained)):
            held.copy_(torch.as_tensor(given))
        self.done.copy_(self.left == 0)
        self.written.zero_()
        self.round.zero_()
        self.log.zero_()
        self.ring.clear()
        self.policy.reset(torch.ones_like(self.done))
        self._choose()
        self.under_way: deque[torch.cuda.Event | None] = deque()  # what ends with each round that is not read yet, the oldest first
        self.known, self.counts = Progress(0, [0] * len(self.left), self.sizes.tolist(), self.done.tolist()), Counts()

    # ---- on the device -------------------------------------------------------------------

    def _step(self, ids: torch.Tensor, start: torch.Tensor) -> CapturedStep:
        return CapturedStep(ids, start, self.cache.max_context, self.model.rope_frequencies())

    def _block(self, streams: torch.Tensor, ids: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The MTP block at start … of each row: streams [B·T, n, d], next tokens ids [B, T] → features [B·T, d], streams."""
        step = self._step(ids, start)
        embedded = self.model.embed(step.ids).to(self.model.numerics.activation)
        return self.model.mtp[0](streams, embedded, step, self.cache.mtp_layers[0])

    def _drafts(self, D: int) -> torch.Tensor:
        """int64 [B, D]."""
        found, streams = [self._draft(self.first, 0)][:D], self.chained
        for j in range(1, D):
            features, streams = self._block(streams, found[-1].unsqueeze(1), self.start + (j - 1))
            found.append(self._draft(self.model.head(features).argmax(-1), j))
        return torch.stack(found, 1) if D else self.token.new_empty(len(self.token), 0)

    def _choose(self) -> None:
        """Sizes of the next round: the policy's, and no more than what a row may still write."""
        self.sizes.copy_(torch.minimum(self.policy.choose(self.pressure, ~self.done), (self.left - 1).clamp(min=0)))

    def _draft(self, said: torch.Tensor, ahead: int) -> torch.Tensor:
        """What is drafted `ahead` tokens after the next one, int64 [B], where the block says `said`."""
        return said

    def _accept(self, logits: torch.Tensor, drafts: torch.Tensor, proposed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many drafts stay int64 [B], and the tokens that come out int64 [B, D + 1], as `accept_greedy` says."""
        return accept_greedy(logits, drafts, proposed)

    @torch.inference_mode()
    def _round(self, D: int) -> None:
        B, drafts = len(self.token), self._drafts(D)
        ids = torch.cat((self.token.unsqueeze(1), drafts), 1)
        streams, logits = self.model.captured(self._step(ids, self.start), self.cache)
        place = torch.arange(D + 1, device=ids.device)
        proposed = self.sizes.clamp(0, D).masked_fill(self.done, 0)
        accepted, chosen = self._accept(logits.view(B, D + 1, -1), drafts, proposed)
        stopping = (chosen.unsqueeze(-1) == self.stops).any(-1)
        first_stop = torch.where(stopping, place, D + 1).amin(1)
        count = torch.minimum(torch.minimum(accepted + 1, self.left), first_stop + 1).masked_fill(self.done, 0)
        with self._aside():  # dozens of tiny kernels, beside the block's few
            column = torch.where(place < count.unsqueeze(1), self.written.unsqueeze(1) + place, self.room + place)
            self.out.scatter_(1, column, chosen)
            self.log.index_copy_(0, self.round.clamp(max=len(self.log) - 1), torch.stack((proposed, torch.minimum(accepted, count), count)).unsqueeze(0))
            self.written += count
            self.left -= count
            self.done |= (self.left == 0) | (first_stop < count)
            self.policy.observe(accepted, proposed)
            self._choose()
            self._record(chosen, count)
        self._follow(streams, chosen, count)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        self.start += count
        self.ring.send()

    def _record(self, chosen: torch.Tensor, count: torch.Tensor) -> None:
        """What this round says to the host: of chosen int64 [B, T] the first count[b] tokens, and how rows stand now."""
        self.ring.put(self.round, chosen, count, self.sizes, self.done)
        self.round += 1

    @contextmanager
    def _aside(self):
        """Kernels that run beside what follows, until the round waits for `side`. What they read of the round's own tensors must live as
        long as the round."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _follow(self, streams: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor) -> None:
        """The MTP block over what was verified, and what it says after the last token that counts; others stay as they were."""
        B, T = chosen.shape
        features, after = self._block(streams, chosen, self.start)
        last = (count - 1).clamp(min=0)
        row = torch.arange(B, device=chosen.device) * T + last
        moved, token = count > 0, chosen.gather(1, last.unsqueeze(1)).squeeze(1)
        drafted = self.model.head(features.index_select(0, row)).argmax(-1)
        self.first.copy_(torch.where(moved, drafted, self.first))
        self.token.copy_(torch.where(moved, token, self.token))
        self.chained.copy_(torch.where(moved.view(-1, 1, 1), after.index_select(0, row), self.chained))

    def capture(self, D: int) -> None:
        """Capture the round of D drafts, also between rounds. It runs a few times."""
        with self._undisturbed():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._round(D)
                self.graphs[D] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[D], stream=stream, pool=self.pool):
                    self._round(D)
            torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def _undisturbed(self):
        """Rounds that run meanwhile change nothing: every row counts as done, and what is chosen and learnt is put back."""
        state = [self.done, self.sizes, self.round, self.ring.records, *(t for t in vars(self.policy).values() if isinstance(t, torch.Tensor))]
        held = [t.clone() for t in state]
        self.done.fill_(True)
        yield
        for tensor, before in zip(state, held):
            tensor.copy_(before)
        self.ring.send(wait=True)  # a round that was under way has ended, and its record may not be read yet

    # ---- on the host ---------------------------------------------------------------------

    def prepare(self) -> None:
        """Capture the rounds of all widths now, so that none is captured in the middle of a run."""
        for D in self.widths if self.captures else ():
            if D not in self.graphs:
                self.capture(D)

    def history(self) -> list[list[tuple[int, int]]]:
        """Of each row (drafted, accepted) of the rounds in which it got tokens. Waits for the device."""
        drafted, accepted, count = self.log[:, 0].T.tolist(), self.log[:, 1].T.tolist(), self.log[:, 2].T.tolist()
        return [[(d, a) for d, a, n in zip(*row) if n] for row in zip(drafted, accepted, count)]

    def run(self, on_tokens: Callable[[int, list[int]], None] | None = None, ahead: int = 2,
            until: Callable[[Iterable[bool]], bool] = all) -> list[list[int]]:
        """Rounds until every row is done (until=any: the first of them); the rows' tokens. on_tokens(row, new tokens) as they are known:
        every token once and in order, those of rounds that were under way at the end too.

        ahead: rounds under way before the oldest is waited for by polling; 1 decides every size by the round just before. Raises
        InputError where the ring holds fewer.
        """
        if not 1 <= ahead <= self.ring.rounds:
            raise InputError(f"{ahead} rounds were to be under way; these were made with a ring of {self.ring.rounds}: expected 1 to that many")
        while not until(self.known.done):
            wanted = max(size for size, done in zip(self.known.sizes, self.known.done) if not done)
            self.counts.sizes.append(self.known.sizes)
            self._launch(min(wanted, self.most))
            while len(self.under_way) >= ahead or self.under_way and self._ended(self.under_way[0]):
                self._read(on_tokens)
        while self.under_way:
            self._read(on_tokens)
        return self._settle()

    def _launch(self, D: int) -> None:
        """Begin a round of D drafts, or of the next width above."""
        if len(self.under_way) == self.ring.rounds:  # its record would take the place of one that is not read
            raise RuntimeError(f"{len(self.under_way)} rounds are not read yet, and the ring holds no more")
        self.counts.rounds.append(D)
        if self.captures:
            width = next(w for w in self.widths if w >= D)
            if width not in self.graphs:
                self.capture(width)
            self.graphs[width].replay()
        else:
            self._round(D)
        self.under_way.append(self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        """What ends with all that was begun so far; None where that has ended."""
        if self.model.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _ended(self, event: torch.cuda.Event | None) -> bool:
        ended = event is None or event.query()
        self.counts.polls += not ended
        return ended

    def _read(self, on_tokens: Callable[[int, list[int]], None] | None) -> None:
        """Wait for the oldest round under way, and tell what it said. Before its event has passed nothing of its record is right."""
        self._wait(self.under_way[0], idle=len(self.under_way) == 1)
        self.under_way.popleft()
        known = self.known
        record = self.ring.read(known.rounds)
        written = [n + len(tokens) for n, tokens in zip(known.written, record.tokens)]
        self.known = Progress(known.rounds + 1, written, record.sizes, record.done)
        for b, tokens in enumerate(record.tokens):
            if tokens and on_tokens is not None:
                on_tokens(b, tokens)

    def _wait(self, event: torch.cuda.Event | None, idle: bool) -> None:
        """Poll until `event` has passed, with naps: the processor is others'. idle: the device then has nothing to do until the host goes on,
        so naps begin only where the wait is long; else a round behind this one hides them."""
        begun = time.perf_counter()
        while not self._ended(event):
            if not idle or time.perf_counter() - begun > SPIN:
                time.sleep(NAP)

    def _settle(self) -> list[list[int]]:
        """The rows' tokens, copied once and whole; the host's lengths of the caches again what the device holds."""
        self.host_out.copy_(self.out, non_blocking=True)
        self._wait(self._mark(), idle=False)
        for lengths in (self.cache._main, self.cache._mtp):
            for b, n in enumerate(self.known.written):
                lengths.advance(slice(b, b + 1), n)
        return [self.host_out[b, :n].tolist() for b, n in enumerate(self.known.written)]


def primed(model: Model, cache: Cache, prompts: list[list[int]],
           on_prefill: Callable[[int, int], None] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append prompts to an empty cache and to the MTP block's own.

    Returns what `Rounds` starts from: the tokens that the model chooses after the prompts int64 [B], what the block drafts
    after those int64 [B], and the block's streams there [B, n, d]. Greedy.
    """
    told = lambda streams, following, known: model.mtp_logits(streams, following, cache, n_new=known, logits="none")
    logits, streams = prefill(model, cache, prompts, told, on_prefill)
    tokens = logits[:, -1].argmax(-1)
    said, after = model.mtp_logits(streams, tokens.unsqueeze(1), cache, return_streams=True)
    return tokens, said[:, -1].argmax(-1), after[:, -1]
