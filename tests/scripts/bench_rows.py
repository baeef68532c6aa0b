"""Rows, results, points and a clock of the benchmark harness's tests."""

import math

import torch

from scripts.bench import decode
from scripts.bench.measure import PeerResult, Result
from scripts.bench.row import Row
from scripts.bench.timing import Machine, Timing

MACHINE = Machine("NVIDIA H100 80GB HBM3", 3.0e12, 771e12, 3.7, 1.3, 2.4e12)
ABOUT = {
    "command": "python scripts/bench_kernels.py",
    "commit": "abc1234",
    "device": MACHINE.device,
    "torch": "2.11",
    "triton": "3.6",
    "python": "3.12",
}
SETUP = {
    "preset": "Flash",
    "layers": 16,
    "numerics": "native",
    "backend": "triton",
    "cache": "fp8",
    "index_cache": "fp4",
    "weight_bytes": 10**10,
}


class FakeClock:
    """Gives every run the same time, and refuses when told that nothing may be timed."""

    def __init__(self, us: float = 5.0, forbidden: bool = False):
        self.us, self.forbidden = us, forbidden

    def runs(self, runs, replays=30):
        assert not self.forbidden, "a red row was timed"
        for run in runs:
            run()
        return Timing(self.us, self.us - 1, 0.05, replays, 2)


def row(error=0.0, tolerance=1e-3, goal=10.0, **more):
    make = lambda i: (lambda: torch.ones(2) * i, lambda: (error, tolerance))
    return Row("topk", "256K B1", make, 3_000_000, 1000, goal, **more)


def result(
    us: float | None = 5.0, goal: float | None = 10.0, shape: str = "256K B1", peer_us: float | None = None, why=""
):
    timing = None if us is None else Timing(us, us - 1, 0.05, 30, 2)
    found = {"absent": PeerResult(why="not installed: x")}
    if peer_us is not None:
        found["theirs"] = PeerResult(Timing(peer_us, peer_us, 0.0, 30, 1))
    return Result("topk", shape, 3_000_000, 1000, 1.0, goal, 0.0, 1e-3, why, timing, found)


def beside_peers(ours, us, wanted, **turns):
    """A result of `ours` µs beside peers of `us`, with goals `wanted`; turns: ours as timed in turn with a peer."""
    timing = lambda value: None if value is None else Timing(value, math.nan, 0.0, 30, 1)
    found = {name: PeerResult(timing(value), beside=timing(turns.get(name))) for name, value in us.items()}
    return Result("topk", "256K B1", 3_000_000, 1000, 1.0, 10.0, 0.0, 1e-3, "", timing(ours), found, beside=wanted)


def point(batch=1, context=8192, step_ms=2.0, **more):
    return decode.Point(batch, context, 16, step_ms, step_ms, 0.01, 1.4, 4_200_000_000, 10**10, 10**8, 3.0, **more)
