"""One benchmark row, measured: the correctness gate first, then ours, then each peer that is installed."""

import gc
import math
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace

import torch

from scripts.bench import peers
from scripts.bench.limits import Kernel, look
from scripts.bench.row import Beside, Row
from scripts.bench.timing import FLUSH_BYTES, Clock, Machine, Timing, capture

SETS = 3  # input sets that are rotated, where one does not fill L2 by itself


class DeviceLost(Exception):
    """A kernel broke the CUDA context; only a new process can go on."""


@dataclass
class PeerResult:
    """A peer's time, or why there is none. tolerance is NaN where the peer has no check of its own; beside: ours, if
    timed in turns."""

    timing: Timing | None = None
    error: float = math.nan
    tolerance: float = math.nan
    why: str = ""
    beside: Timing | None = None


@dataclass
class Result:
    """A row's figures. timing is None when the row is red: a wrong kernel has no speed."""

    op: str
    shape: str
    bytes: int
    flops: int
    floor_us: float
    goal_us: float | None
    error: float = math.nan
    tolerance: float = math.nan
    why: str = ""
    timing: Timing | None = None
    peers: dict[str, PeerResult] = field(default_factory=dict)
    limits: list[Kernel] = field(default_factory=list)  # of a row that missed its goal
    beside: list[Beside] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape}"

    @property
    def red(self) -> bool:
        return self.timing is None

    @property
    def share_of_floor(self) -> float | None:
        """floor / time: 1 is the speed of light."""
        return None if self.red else self.floor_us / self.timing.cold_us

    @property
    def verdict(self) -> str:
        if self.red:
            return "RED"
        if self.goal_us is None:
            return ""
        return "met" if self.timing.cold_us <= self.goal_us else "MISSED"

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """(name, cold µs) of the fastest peer."""
        timed = [(p.timing.cold_us, name) for name, p in self.peers.items() if p.timing is not None]
        return min(timed)[::-1] if timed else None

    def document(self) -> dict:
        best = self.best_peer
        return asdict(self) | {
            "verdict": self.verdict,
            "share_of_floor": self.share_of_floor,
            "best_peer": None if best is None else {"name": best[0], "cold_us": best[1]},
        }


def passes(error: float, tolerance: float) -> bool:
    return error <= tolerance  # False for NaN


def measure(
    row: Row,
    clock: Clock,
    machine: Machine,
    replays: int,
    with_peers: bool = True,
    begin: Callable[[str], None] = lambda part: None,
    crashed: Collection[str] = (),
    left_out: str | None = None,
) -> Result:
    """Gate, then times. Any exception of the row makes it red; an exception of a peer is noted beside its name.

    begin(part) is told what runs next: "" for the row itself, or a peer's name; parts in `crashed` are not run, and
    neither are peers in whose name the expression `left_out` is found.
    """
    result = Result(
        row.op,
        row.shape,
        row.bytes,
        row.flops,
        row.floor_us(machine.bandwidth, machine.matmul),
        row.goal_us,
        beside=list(row.beside),
    )
    begin("")
    if "" in crashed:
        result.why = "crashed the process"
        return result
    try:
        sets = [row.make(i) for i in range(SETS if row.bytes <= FLUSH_BYTES else 1)]
        result.error, result.tolerance = map(float, sets[0][1]())
        if not passes(result.error, result.tolerance):
            result.why = f"error {result.error:.2e} over {result.tolerance:.2e}"
            return result
        runs = [run for run, _ in sets]
        result.timing = clock.runs(runs, replays)
        ours = [capture(run) for run in runs] if row.interleaved and with_peers else None
    except Exception as failure:  # a row that does not run is a red row of the table, not the end of the others
        result.why = _one_line(failure)
        return result
    finally:
        sets = runs = None
        release()
    if with_peers:
        for name, make in (row.peers | peers.for_row(row)).items():
            if left_out and re.search(left_out, name):
                result.peers[name] = PeerResult(why="left out on the command line")
                continue
            begin(name)
            if name in crashed:
                result.peers[name] = PeerResult(why="crashed the process")
            else:
                result.peers[name] = measure_peer(row, make, clock, replays, ours)
        if ours and result.best_peer:
            result.timing = replace(result.peers[result.best_peer[0]].beside, hot_us=result.timing.hot_us)
        ours = None
        release()
    return result


def examine(row: Row, result: Result) -> None:
    """Add what the row's kernels are made of. Call it when all rows are timed."""
    try:
        (run, _) = row.make(0)
        result.limits = look(run)
    except Exception as failure:  # the time stands without its explanation, and the notes say so
        result.why = f"not profiled: {_one_line(failure)}"
    finally:
        run = None
        release()


def measure_peer(row: Row, make: Callable, clock: Clock, replays: int, ours: list | None = None) -> PeerResult:
    """ours: graphs of our own runs, to be timed in turns with the peer's."""
    result = PeerResult()
    try:
        sets = [_pair(make(i)) for i in range(SETS if row.bytes <= FLUSH_BYTES else 1)]
        if sets[0][1] is not None:
            result.error, result.tolerance = map(float, sets[0][1]())
            if not passes(result.error, result.tolerance):
                result.why = f"error {result.error:.2e} over {result.tolerance:.2e}: not timed"
                return result
        if ours is None:
            result.timing = clock.runs([run for run, _ in sets], replays)
        else:
            result.beside, result.timing = clock.in_turn([ours, [capture(run) for run, _ in sets]], replays)
    except peers.NotInstalled as missing:
        result.why = f"not installed: {missing}"
    except Exception as failure:  # other people's code: whatever it raises, the table says so and goes on
        result.why = _one_line(failure)
    finally:
        sets = None
        release()
    return result


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as failure:  # an illegal access is for ever: nothing runs in this process any more
            raise DeviceLost(str(failure)) from failure


def _pair(made):
    return made if isinstance(made, tuple) else (made, None)


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
