"""One benchmark row: an operation at a shape, what it must move and compute, and the goal.

A module `scripts/bench/rows_<name>.py` defines `rows(device) -> Iterable[Row]`. It only describes: nothing is allocated
before `make` is called, and rows must be cheap to list.

Published kernels are matched to rows by `op`, and built at the row's shape from `facts`. These are known:

| op | facts |
|---|---|
| `index_scores` | batch, entries, cache ("fp4", "fp8" or "bf16") |
| `select_entries` (scores and top-k) | batch, entries, k, cache |
| `topk` | batch, entries, k |
| `csa_decode`, `hca_decode` (with window and sink) | batch, window, entries (beside it), cache ("fp8", "bf16") |
| `csa_prefill` | tokens, window, entries (attended a query beside the window), pool (entries to choose from) |
| `index_prefill` (scores and top-k, causal) | tokens, entries, k |
| `experts` (routed, FP4) | batch |
| `linear_fp4`, `linear_fp8`, `linear_bf16` | tokens, out, width (of the input) |
| `mhc_post_pre_norm`, `mhc_pre_norm`, `mhc_post` | tokens |
| `gqa_decode`, `gqa_gather` (its peers read everything) | batch, tokens, heads, kv_heads, width |
| `chunked_prefill` (sparse, causal GQA) | tokens, heads, kv_heads, head, chunk, local, heavy, score, sets |
"""

from collections.abc import Callable
from dataclasses import dataclass, field

BANDWIDTH = 3.0e12  # bytes/s read and written by a copy, measured on an H100 80GB HBM3
MATMUL = 771e12  # bf16 FLOP/s of an 8192-cubed product, measured there

Run = Callable[[], object]
Check = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Beside:
    """A goal relative to peers of the same run: at least `times` as fast as the fastest peer in whose name the
    expression `peers` is found.
    Below 1 it is a price: 1 / 1.02 allows 2 % more than the peer's time."""

    times: float
    peers: str = ""


@dataclass(frozen=True)
class Row:
    """One operation at one shape.

    op, shape: what the tables print; `(op, shape)` is unique, and peers of `scripts/bench/peers.py` are looked up by
    `op`. make(i): builds input set i (seeded by i, so that a repeat is the same) and returns (run, check). run()
    launches the
        operation and returns its output; it must be capturable in a CUDA graph: no host sync, no data-dependent shapes.
        Sets must not share their large buffers, since they are rotated to keep L2 cold. check() → (error, tolerance)
        against the reference; it calls run itself, may sync, and is red when error > tolerance or error is NaN.
    bytes, flops: what one run must read and write and multiply (2 per multiply-add), by the formulas of perf.md §2.
    goal_us: µs with a cold L2, or None where the row has no such goal.
    beside: goals relative to peers of the same run, judged beside goal_us.
    peers: name → make(i), as above, except that it may return only run.
    interleaved: ours and each peer are replayed in turns, and ours is reported as timed beside the fastest of them.
    facts: what adapters of peers need to build the same inputs, for example {"batch": 8, "entries": 262144}.
    """

    op: str
    shape: str
    make: Callable[[int], tuple[Run, Check]]
    bytes: int
    flops: int
    goal_us: float | None = None
    peers: dict[str, Callable[[int], Run | tuple[Run, Check]]] = field(default_factory=dict)
    facts: dict[str, int | str] = field(default_factory=dict)
    interleaved: bool = False
    beside: tuple[Beside, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape}"

    def floor_us(self, bandwidth: float = BANDWIDTH, matmul: float = MATMUL) -> float:
        """µs that the bytes at `bandwidth` [B/s] or the products at `matmul` [FLOP/s] take, whichever is longer."""
        return max(self.bytes / bandwidth, self.flops / matmul) * 1e6
