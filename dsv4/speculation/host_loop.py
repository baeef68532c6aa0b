"""The host's half of rounds: it captures them, launches them, polls for their records and reports the tokens. No call
waits for the device."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dsv4.cache.cache import Cache
from dsv4.errors import InputError
from dsv4.model.causal import CausalLM, captures
from dsv4.runtime.graph import captured_graph
from dsv4.speculation.device_drafters import RoundDrafter
from dsv4.speculation.ring import Ring


@dataclass
class Progress:
    """What the host knows of a batch after the last round that it has read. rounds: how many it has read."""

    rounds: int
    written: list[int]
    done: list[bool]


@dataclass
class Counts:
    """Counts of one batch. sizes: drafts that were decided for the rows of each round. polls: how often the host asked
    whether a round had ended, and it had not."""

    rounds: list[int] = field(default_factory=list)  # drafts of each round, in order
    sizes: list[list[int]] = field(default_factory=list)
    polls: int = 0
    # steps in which the drafter ran the tokens of rounds without drafts: how many such rounds each covered
    caught_up: list[int] = field(default_factory=list)


NAP = 20e-6  # seconds between two polls, which the system makes 50 to 100 µs
# seconds of polling without sleeping while the device is idle: compared with the round, a sleep is then short
SPIN = 4e-3
AHEAD = 2  # rounds running at most: the host launches one, 0.1 ms at Flash widths, while another runs
RING = 4  # rounds whose records the host can still read: as many as may be running, and some more


def check_one_device(model: CausalLM) -> None:
    """Raises InputError where layers lie on several devices."""
    if model.layer_devices is not None:
        raise InputError("rounds cannot be captured while layers are spread over devices; load without --device-map")


class HostLoop(ABC):
    """Launches rounds of up to `most` drafts that write up to `room` tokens a row, and reads their records. The
    subclass defines the round, and `done` bool [B], `start` int64 [B], `log` and `drafter`. widths, ring, ahead: as for
    `Rounds`. catch_up_widths: as a drafter's; empty if the drafter need not run after rounds without drafts. Raises
    InputError if layers lie on several devices."""

    done: torch.Tensor
    start: torch.Tensor
    log: torch.Tensor
    drafter: RoundDrafter
    keeps = False  # whether captured graphs can be parts of others

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        most: int,
        room: int,
        widths: Sequence[int] | None,
        ring: int,
        ahead: int = AHEAD,
        catch_up_widths: Sequence[int] = (),
    ):
        device = model.device
        check_one_device(model)
        self.model, self.cache, self.most, self.room = model, cache, most, room
        # the last columns: padding, which counts for nothing
        self.out = torch.zeros(cache.batch, room + most + 1, dtype=torch.int64, device=device)
        self.host_out = torch.zeros(*self.out.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ring = self._records(ring, cache.batch, most + 1, device, ahead)
        self.catch_up_widths = catch_up_widths
        self.captures = captures(model)
        self.side = torch.cuda.Stream(device) if self.captures else None
        # captured widths; other sizes run as the next larger width
        self.widths = sorted({*(range(most + 1) if widths is None else widths), most})
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None  # of all sizes: one graph runs at a time
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.catching_up: dict[int, torch.cuda.CUDAGraph] = {}  # by tokens a row
        # tensors that each graph's attention read: each replay rewrites them
        self.tiles: dict[int, list[torch.Tensor | None] | None] = {}

    def _records(self, rounds: int, batch: int, tokens: int, device: torch.device, ahead: int) -> Ring:
        """Where rounds leave their records."""
        return Ring(rounds, batch, tokens, device, ahead)

    def _anew(self, sizes: list[list[int]], done: list[bool]) -> None:
        """Reset: no round has run. sizes: of the first `ahead` rounds."""
        # events at the end of each unread round, the oldest first
        self.under_way: deque[torch.cuda.Event | None] = deque()
        self.decided = deque(sizes)  # drafts of each row in the next rounds, as far as they are known
        self.known, self.counts = Progress(0, [0] * len(done), done), Counts()
        self.rested = 0  # rounds without drafts since the drafter last ran
        self.behind = 0  # the most tokens that some round wrote after a row's length; not all of them were kept

    # ---- what a round is -----------------------------------------------------------------

    @abstractmethod
    def _round(self, D: int) -> None:
        """One round of D drafts, on the device alone. It changes nothing in rows that are done."""

    @abstractmethod
    def _state(self) -> list[torch.Tensor]:
        """Tensors that a round changes even if every row is done."""

    def capture(self, D: int) -> None:
        """Capture the round of D drafts, also between rounds. It runs a few times."""
        self.behind = max(self.behind, D + 1)
        with self._undisturbed():
            self.graphs[D] = captured_graph(lambda: self._round(D), self.pool, keep=self.keeps)
            self.tiles[D] = self.model.tiles

    @contextmanager
    def _undisturbed(self):
        """Rounds that run within this context change nothing: every row counts as done, and chosen tokens and learnt
        state are restored."""
        state = self._state()
        held = [t.clone() for t in state]
        self.done.fill_(True)
        yield
        for tensor, before in zip(state, held):
            tensor.copy_(before)
        self.ring.send(wait=True)  # a running round has ended here, but its record may not be read yet

    # ---- running them --------------------------------------------------------------------

    def prepare(self) -> None:
        """Capture the rounds of all widths now, so that no capture happens during a run."""
        for D in self.widths if self.captures else ():
            if D not in self.graphs:
                self.capture(D)
        for width in self.catch_up_widths if self.captures and 0 in self.widths else ():
            self._capture_catching_up(width)

    def _capture_catching_up(self, width: int) -> None:
        self.behind = max(self.behind, width)
        if width not in self.catching_up:
            self.catching_up[width] = captured_graph(lambda: self._catch_up(width), self.pool, keep=self.keeps)

    @torch.inference_mode()
    def _catch_up(self, width: int) -> None:
        """The drafter runs the tokens of rounds without drafts, up to `width` a row. A second call changes nothing."""
        self.drafter.catch_up(width, self.start)

    def history(self) -> list[list[tuple[int, int]]]:
        """Of each row (drafted, accepted) of the rounds in which it got tokens. Waits for the device."""
        drafted, accepted, count = self.log[:, 0].T.tolist(), self.log[:, 1].T.tolist(), self.log[:, 2].T.tolist()
        return [[(d, a) for d, a, n in zip(*row) if n] for row in zip(drafted, accepted, count)]

    def run(
        self, on_tokens: Callable[[int, list[int]], None] | None = None, until: Callable[[Iterable[bool]], bool] = all
    ) -> list[list[int]]:
        """Rounds until every row is done (until=any: the first of them); the rows' tokens. on_tokens(row, new tokens)
        is called as they are known: every token once and in order, those of the last running rounds too."""
        while not until(self.known.done):
            self.advance(on_tokens)
        return self.finish(on_tokens)

    def advance(self, on_tokens: Callable[[int, list[int]], None] | None = None) -> None:
        """Launch a round, and read the records of earlier ones. With `ahead` rounds running the host polls for the
        oldest. Records that came early are read early, but their sizes apply to the same later rounds."""
        self.counts.sizes.append(self.decided.popleft())
        self._launch(min(max(self.counts.sizes[-1]), self.most))
        while len(self.under_way) >= self.ring.ahead or self.under_way and self._ended(self.under_way[0]):
            self._read(on_tokens)

    def finish(self, on_tokens: Callable[[int, list[int]], None] | None = None) -> list[list[int]]:
        """Read the records of all running rounds; returns the rows' tokens, and the caches' lengths are theirs."""
        while self.under_way:
            self._read(on_tokens)
        return self._settle()

    def cancel(self) -> None:
        """Launch nothing more. What runs is waited for by whoever frees its memory."""

    def _launch(self, D: int) -> None:
        """Begin a round of D drafts, or of the next width above."""
        if len(self.under_way) == self.ring.rounds:  # its record would overwrite one that is not read
            raise RuntimeError(f"{len(self.under_way)} rounds are not read yet, and the ring holds no more")
        width = next(w for w in self.widths if w >= D) if self.captures else D
        if self._must_follow(width):
            self._follow_rests()
        if self.captures:
            if width not in self.graphs:
                self.capture(width)
            self.graphs[width].replay()
            self.model.ranks.went()
        else:
            self._round(width)
        self._count(D, width)
        self.under_way.append(self._mark())

    def _count(self, D: int, width: int) -> None:
        """A round of D drafts was launched, as one of `width`."""
        self.counts.rounds.append(D)
        self.behind = max(self.behind, width + 1)
        self.rested += bool(self.catch_up_widths) and not width
        if self.captures:
            self.model.tiles = self.tiles[width]

    def _must_follow(self, width: int) -> bool:
        """Whether the drafter must run waiting tokens before a round of `width` drafts."""
        return bool(self.rested) and (width > 0 or self.rested == self.catch_up_widths[-1])

    def _count_followed(self) -> int:
        """The drafter runs what waits; returns the width of that step."""
        width = next(n for n in self.catch_up_widths if n >= self.rested)
        self.counts.caught_up.append(self.rested)
        self.behind, self.rested = max(self.behind, width), 0
        return width

    def _follow_rests(self) -> None:
        """The drafter runs the tokens of rounds without drafts, if there were any."""
        if not self.rested:
            return
        width = self._count_followed()
        if self.captures:
            self._capture_catching_up(width)
            self.catching_up[width].replay()
            self.model.ranks.went()
        else:
            self._catch_up(width)
        self.drafter.caught_up()

    def _mark(self) -> torch.cuda.Event | None:
        """An event at the end of all work launched so far; None if that work has ended."""
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
        """Wait for the oldest running round, and report its record. Before its event has passed, no part of the record
        is valid."""
        self._wait(self.under_way[0], idle=len(self.under_way) == 1)
        self.under_way.popleft()
        self._report(on_tokens)

    def _report(self, on_tokens: Callable[[int, list[int]], None] | None) -> None:
        """Report the next record, which has come."""
        known = self.known
        record = self.ring.read(known.rounds)
        written = [n + len(tokens) for n, tokens in zip(known.written, record.tokens)]
        self.known = Progress(known.rounds + 1, written, record.done)
        self.decided.append(record.sizes)
        for b, tokens in enumerate(record.tokens):
            if tokens and on_tokens is not None:
                on_tokens(b, tokens)

    def _wait(self, event: torch.cuda.Event | None, idle: bool) -> None:
        """Poll until `event` has passed, and sleep between polls to leave the processor to others. idle: the device has
        no work until the host continues, so sleeping begins only if the wait is long. Otherwise a later round hides the
        sleep."""
        begun = time.perf_counter()
        while not self._ended(event):
            if not idle or time.perf_counter() - begun > SPIN:
                time.sleep(NAP)

    def _settle(self) -> list[list[int]]:
        """The rows' tokens, copied once and whole; sets the host's lengths of the caches to the device's."""
        self.host_out.copy_(self.out, non_blocking=True)
        self._follow_rests()
        self._wait(self._mark(), idle=False)
        for lengths in (self.cache._main, *(self.drafter.lengths if self.most else ())):
            for b, n in enumerate(self.known.written):
                lengths.advance(slice(b, b + 1), n)
                lengths.wrote(b, lengths.now[b] + self.behind)
        self.model.replayed = max(self.cache.lengths)
        return [self.host_out[b, :n].tolist() for b, n in enumerate(self.known.written)]
