"""Rounds whose loop the device runs: one launch a batch, from the first round to the last.

The host launches a graph that repeats (`dsv4.runtime.conditional`). Each time around, a kernel publishes the record of
the round that has just ended, and chooses the graphs of the next one: which number of waiting tokens the drafter runs
first, if any, and how many drafts the round has. It ends the loop when every row is done, or when the host has set a
flag. The host polls a number in pinned memory and reads records there. It launches nothing, and waits for nothing but
the end.

Sizes, tokens and records are those of `Rounds`, bit for bit: the same graphs run in the same order.
"""

import time

import torch

from dsv4.cache.host_tier.memory import HostBuffer
from dsv4.errors import RoundError
from dsv4.kernels.commit_rows import HEAD
from dsv4.model.causal import CausalLM, captures
from dsv4.runtime.conditional import ConditionalError, Kernel, WhileGraph, missing
from dsv4.speculation.host_loop import NAP
from dsv4.speculation.ring import Ring
from dsv4.speculation.rounds import SPARE, Rounds

ENDED, CANCELLED = 0, 1  # of the flags: how many rounds have ended, and whether the host wants no more

# One block. Handles: of the loop, of the drafter's waiting tokens, of the round.
TURN = Kernel(
    """
typedef unsigned long long Handle;
typedef long long i64;
extern "C" __device__ void cudaGraphSetConditional(Handle handle, unsigned int value);

extern "C" __global__ void turn(
    Handle loop, Handle follow, Handle round,
    const i64* records, i64 ring, i64 numbers, i64* kept, volatile i64* flags,  // numbers: of one record
    const i64* ran, i64* published, const bool* done, const i64* sizes, i64 rows,
    const i64* place, i64 most, const i64* waits, i64 widths, i64* rested) {
  const i64 ended = *ran;
  if (ended > *published) {
    for (i64 i = threadIdx.x; i < numbers; i += blockDim.x)
      kept[(ended - 1) * numbers + i] = records[(ended - 1) % ring * numbers + i];
    __threadfence_system();  // the host sees a record before it sees that there is one
  }
  __syncthreads();
  if (threadIdx.x) return;
  *published = ended;
  flags[0] = ended;
  bool all = true;
  i64 drafts = 0;
  for (i64 b = 0; b < rows; b++) {
    all = all && done[b];
    drafts = sizes[b] > drafts ? sizes[b] : drafts;
  }
  drafts = drafts < most ? drafts : most;
  unsigned int chosen = (unsigned int)place[drafts], followed = (unsigned int)widths;
  const bool ends = all || flags[1];
  if (ends) {
    chosen = (unsigned int)place[most] + 1;
  } else if (widths) {
    const bool drafting = place[drafts] > 0;  // the first graph is that of no drafts
    if (*rested && (drafting || *rested == waits[widths - 1])) {
      for (followed = 0; waits[followed] < *rested;) followed++;
      *rested = 0;
    }
    *rested += !drafting;
  }
  cudaGraphSetConditional(loop, !ends);
  cudaGraphSetConditional(round, chosen);
  if (widths) cudaGraphSetConditional(follow, followed);
}
""",
    "turn",
)


def check_loop(model: CausalLM) -> None:
    """Raises ConditionalError with the reason if a loop of this model's steps cannot run on its device."""
    check_device(model.device)
    if not captures(model):
        why = "a kernel of yours runs in it" if model.replacements else f"backend {model.backend} runs it"
        raise ConditionalError(f"a step of this model is no graph, because {why}; leave out --loop device")


def check_device(device: torch.device | str) -> None:
    """Raises ConditionalError with the reason if a graph cannot repeat on this device."""
    if reason := missing(device):
        raise ConditionalError(f"{reason}; leave out --loop device")


class Published(Ring):
    """A ring on the device, of which each round's record is copied to a place of its own in host memory: no round waits
    until the host has read another's. kept: rounds that there can be."""

    def __init__(self, rounds: int, batch: int, tokens: int, device: torch.device, ahead: int, kept: int):
        self._kept = HostBuffer((kept, batch, HEAD + tokens), torch.int64, device)
        self._flags = HostBuffer((2,), torch.int64, device)
        super().__init__(rounds, batch, tokens, device, ahead)
        self.host, self.flags = self._kept.host, self._flags.host

    @property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The places of records and the flags, as the device addresses them."""
        return self._kept.device, self._flags.device

    @property
    def nbytes(self) -> int:
        """Bytes that a round leaves in host memory: one record."""
        return self.host[0].nbytes

    def clear(self):
        self.records.fill_(-1)
        self._kept.host.fill_(-1)
        self._flags.host.zero_()

    def send(self, wait: bool = False):
        pass  # the loop's own kernel publishes


class OneLaunch(Rounds):
    """`Rounds` in one launch a batch, on a CUDA device. Raises ConditionalError where it cannot be built. launches: how
    often a loop was launched since the requests began."""

    keeps, launches = True, 0
    _loop: WhileGraph | None = None

    def _records(self, rounds, batch, tokens, device, ahead):
        # on the device: rounds whose records are published, and rounds without drafts since the drafter last ran
        self._published, self._rested = torch.zeros(2, 1, dtype=torch.int64, device=device)
        return Published(rounds, batch, tokens, device, ahead, kept=self.room + SPARE)

    def _anew(self, sizes, done):
        super()._anew(sizes, done)
        self.launches = 0
        self._published.zero_()
        self._rested.zero_()

    def _catch_up(self, width):
        super()._catch_up(width)
        self.drafter.caught_up()

    # ---- the loop ------------------------------------------------------------------------

    def prepare(self):
        """Capture the rounds of all widths, and build the loop of them."""
        super().prepare()
        if self._loop is not None:
            return
        follows = self.catch_up_widths if 0 in self.widths else ()
        whole = lambda numbers: torch.tensor(numbers, dtype=torch.int64, device=self.model.device)
        place = whole([next(i for i, w in enumerate(self.widths) if w >= D) for D in range(self.most + 1)])
        records, (kept, flags) = self.ring.records, self.ring.on_device
        self._loop = WhileGraph(
            TURN,
            [[self.catching_up[n] for n in follows], [self.graphs[w] for w in self.widths]],
            [records, len(records), records[0].numel(), kept, flags, self.round, self._published, self.done]
            + [self.sizes, self.cache.batch, place, self.most, whole(list(follows)), len(follows), self._rested],
            self.model.device,
        )

    def advance(self, on_tokens=None):
        """Launch the loop, if it is not running; read records that have come, or sleep a little if none has. An
        exception, of on_tokens too, cancels the loop."""
        try:
            if not self.under_way:
                self.prepare()
                self._loop.launch()
                self.launches += 1
                self.under_way.append(self._mark())
            if not self._report_all(on_tokens):
                time.sleep(NAP)
        except BaseException:
            self.cancel()
            raise

    def _report_all(self, on_tokens) -> bool:
        """Report the records that have come; returns whether there were any. Raises RoundError if the loop has ended
        before the rows have."""
        ended = not self.under_way or self._ended(self.under_way[0])  # asked first: then all its records have come
        count, before = int(self.ring.flags[ENDED]), self.known.rounds
        while self.known.rounds < count:
            sizes = self.decided.popleft()
            self.counts.sizes.append(sizes)
            D = min(max(sizes), self.most)
            width = next(w for w in self.widths if w >= D)
            if self._must_follow(width):
                self._count_followed()
            self._count(D, width)
            self._report(on_tokens)
        if ended and not all(self.known.done) and not self.ring.flags[CANCELLED]:
            raise RoundError(
                f"the loop on the device has ended after {count} rounds, and rows go on ({self.known.done}); "
                "expected all to be done"
            )
        return count > before

    def _read(self, on_tokens):
        self._wait(self.under_way[0], idle=False)
        self._report_all(on_tokens)
        self.under_way.popleft()

    def cancel(self) -> None:
        """Let the loop end after the round that is running, and wait for that. The caches then hold the tokens of the
        rounds that have ended, which are all known."""
        self.ring.flags[CANCELLED] = 1
        if self.under_way:
            self.finish()
