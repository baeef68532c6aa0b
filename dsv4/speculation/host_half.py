"""The host's half of rounds: it captures them, launches them, polls for what they left and tells it; it waits for the
device in no call."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dsv4.causal import CausalLM, TokenCache
from dsv4.errors import InputError
from dsv4.graph import captured_graph, captures
from dsv4.speculation.resident_drafters import RoundDrafter
from dsv4.speculation.ring import Ring


@dataclass
class Progress:
    """What the host knows of a batch, as of the last round that it has read. rounds: how many it has read."""

    rounds: int
    written: list[int]
    done: list[bool]


@dataclass
class Counts:
    """Of one batch. sizes: drafts that were decided for the rows of each round. polls: how often the host asked
    whether a round had ended and heard that it had not."""

    rounds: list[int] = field(default_factory=list)  # drafts of each round, in order
    sizes: list[list[int]] = field(default_factory=list)
    polls: int = 0
    # rounds without drafts behind each step in which the drafter followed them
    caught_up: list[int] = field(default_factory=list)


NAP = 20e-6  # seconds that a poll waits for the next one, which the system makes 50 to 100 µs
# seconds of polling without a nap while the device has nothing else to do: a nap is then little beside the round
SPIN = 4e-3
AHEAD = 2  # rounds under way at most: the host launches one, 0.1 ms at Flash widths, while another runs
RING = 4  # rounds whose records the host can still read: as many as may be under way, and some more


def check_one_device(model: CausalLM) -> None:
    """Raises InputError where layers lie on several devices."""
    if model.layer_devices is not None:
        raise InputError("rounds cannot be captured while layers are spread over devices; load without --device-map")


class HostHalf(ABC):
    """Launches rounds of up to `most` drafts that write up to `room` tokens a row, and reads their records. What a
    round does is the subclass's, as are `done` bool [B], `start` int64 [B], `log` and `drafter`. widths, ring, ahead:
    as for `Rounds`. follows: as a drafter's, none where it need not follow rounds without drafts. Raises InputError
    where layers lie on several devices."""

    done: torch.Tensor
    start: torch.Tensor
    log: torch.Tensor
    drafter: RoundDrafter

    def __init__(
        self,
        model: CausalLM,
        cache: TokenCache,
        most: int,
        room: int,
        widths: Sequence[int] | None,
        ring: int,
        ahead: int = AHEAD,
        follows: Sequence[int] = (),
    ):
        device = model.device
        check_one_device(model)
        self.model, self.cache, self.most, self.room = model, cache, most, room
        # the last columns: what counts for nothing
        self.out = torch.zeros(cache.batch, room + most + 1, dtype=torch.int64, device=device)
        self.host_out = torch.zeros(*self.out.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ring = Ring(ring, cache.batch, most + 1, device, ahead)
        self.follows = follows
        self.captures = captures(model)
        self.side = torch.cuda.Stream(device) if self.captures else None
        # what is captured; others run as the next larger
        self.widths = sorted({*(range(most + 1) if widths is None else widths), most})
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None  # of all sizes: one graph runs at a time
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.catching_up: dict[int, torch.cuda.CUDAGraph] = {}  # by how many tokens a row
        # that each graph's attention read: each replay writes them again
        self.tiles: dict[int, list[torch.Tensor | None] | None] = {}

    def _anew(self, sizes: list[list[int]], done: list[bool]) -> None:
        """No round has run. sizes: of the first `ahead` rounds."""
        # what ends with each round that is not read yet, the oldest first
        self.under_way: deque[torch.cuda.Event | None] = deque()
        self.decided = deque(sizes)  # drafts of each row in the rounds that come, as far as they are known
        self.known, self.counts = Progress(0, [0] * len(done), done), Counts()
        self.rested = 0  # rounds without drafts since the drafter followed
        self.behind = 0  # tokens that some round wrote from a row's length on, at most: not all of them came to count

    # ---- what a round is -----------------------------------------------------------------

    @abstractmethod
    def _round(self, D: int) -> None:
        """One round of D drafts, on the device alone. Rows that are done change nothing."""

    @abstractmethod
    def _state(self) -> list[torch.Tensor]:
        """Tensors that a round changes though every row is done."""

    def capture(self, D: int) -> None:
        """Capture the round of D drafts, also between rounds. It runs a few times."""
        self.behind = max(self.behind, D + 1)
        with self._undisturbed():
            self.graphs[D] = captured_graph(lambda: self._round(D), self.pool)
            self.tiles[D] = self.model.tiles

    @contextmanager
    def _undisturbed(self):
        """Rounds that run meanwhile change nothing: every row counts as done, and what is chosen and learnt is put
        back."""
        state = self._state()
        held = [t.clone() for t in state]
        self.done.fill_(True)
        yield
        for tensor, before in zip(state, held):
            tensor.copy_(before)
        self.ring.send(wait=True)  # a round that was under way has ended, and its record may not be read yet

    # ---- running them --------------------------------------------------------------------

    def prepare(self) -> None:
        """Capture the rounds of all widths now, so that none is captured in the middle of a run."""
        for D in self.widths if self.captures else ():
            if D not in self.graphs:
                self.capture(D)
        for width in self.follows if self.captures and 0 in self.widths else ():
            self._capture_catching_up(width)

    def _capture_catching_up(self, width: int) -> None:
        self.behind = max(self.behind, width)
        if width not in self.catching_up:
            self.catching_up[width] = captured_graph(lambda: self._catch_up(width), self.pool)

    @torch.inference_mode()
    def _catch_up(self, width: int) -> None:
        """The drafter follows rounds without drafts, up to `width` tokens a row: changes nothing where it is done
        again."""
        self.drafter.catch_up(width, self.start)

    def history(self) -> list[list[tuple[int, int]]]:
        """Of each row (drafted, accepted) of the rounds in which it got tokens. Waits for the device."""
        drafted, accepted, count = self.log[:, 0].T.tolist(), self.log[:, 1].T.tolist(), self.log[:, 2].T.tolist()
        return [[(d, a) for d, a, n in zip(*row) if n] for row in zip(drafted, accepted, count)]

    def run(
        self, on_tokens: Callable[[int, list[int]], None] | None = None, until: Callable[[Iterable[bool]], bool] = all
    ) -> list[list[int]]:
        """Rounds until every row is done (until=any: the first of them); the rows' tokens. on_tokens(row, new tokens)
        as they are known:
        every token once and in order, those of rounds that were under way at the end too.

        With `ahead` rounds under way the oldest is waited for by polling. Records that came early are read early; what
        they decide is of later rounds.
        """
        while not until(self.known.done):
            self.counts.sizes.append(self.decided.popleft())
            self._launch(min(max(self.counts.sizes[-1]), self.most))
            while len(self.under_way) >= self.ring.ahead or self.under_way and self._ended(self.under_way[0]):
                self._read(on_tokens)
        while self.under_way:
            self._read(on_tokens)
        return self._settle()

    def _launch(self, D: int) -> None:
        """Begin a round of D drafts, or of the next width above."""
        if len(self.under_way) == self.ring.rounds:  # its record would take the place of one that is not read
            raise RuntimeError(f"{len(self.under_way)} rounds are not read yet, and the ring holds no more")
        self.counts.rounds.append(D)
        width = next(w for w in self.widths if w >= D) if self.captures else D
        if width or self.follows and self.rested == self.follows[-1]:
            self._follow_rests()
        if self.captures:
            if width not in self.graphs:
                self.capture(width)
            self.graphs[width].replay()
            self.model.tiles = self.tiles[width]
        else:
            self._round(width)
        self.behind = max(self.behind, width + 1)
        self.rested += bool(self.follows) and not width
        self.under_way.append(self._mark())

    def _follow_rests(self) -> None:
        """The drafter catches up with rounds that drafted nothing, if there were any."""
        if not self.rested:
            return
        width = next(n for n in self.follows if n >= self.rested)
        self.counts.caught_up.append(self.rested)
        self.behind = max(self.behind, width)
        if self.captures:
            self._capture_catching_up(width)
            self.catching_up[width].replay()
        else:
            self._catch_up(width)
        self.drafter.caught_up()
        self.rested = 0

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
        """Wait for the oldest round under way, and tell what it said. Before its event has passed nothing of its record
        is right."""
        self._wait(self.under_way[0], idle=len(self.under_way) == 1)
        self.under_way.popleft()
        known = self.known
        record = self.ring.read(known.rounds)
        written = [n + len(tokens) for n, tokens in zip(known.written, record.tokens)]
        self.known = Progress(known.rounds + 1, written, record.done)
        self.decided.append(record.sizes)
        for b, tokens in enumerate(record.tokens):
            if tokens and on_tokens is not None:
                on_tokens(b, tokens)

    def _wait(self, event: torch.cuda.Event | None, idle: bool) -> None:
        """Poll until `event` has passed, with naps: the processor is others'. idle: the device then has nothing to do
        until the host goes on, so naps begin only where the wait is long; else a round behind this one hides them."""
        begun = time.perf_counter()
        while not self._ended(event):
            if not idle or time.perf_counter() - begun > SPIN:
                time.sleep(NAP)

    def _settle(self) -> list[list[int]]:
        """The rows' tokens, copied once and whole; the host's lengths of the caches again what the device holds."""
        self.host_out.copy_(self.out, non_blocking=True)
        self._follow_rests()
        self._wait(self._mark(), idle=False)
        for lengths in (self.cache._main, *(self.drafter.lengths if self.most else ())):
            for b, n in enumerate(self.known.written):
                lengths.advance(slice(b, b + 1), n)
                lengths.wrote(b, lengths.now[b] + self.behind)
        self.model.replayed = max(self.cache.lengths)
        return [self.host_out[b, :n].tolist() for b, n in enumerate(self.known.written)]
