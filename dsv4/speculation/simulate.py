"""Runs a policy over a trace with a cost table: which tokens it would commit, and how long that would take."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import fmean, pvariance

from dsv4.errors import InputError
from dsv4.speculation.costs import CostTable, after_rest
from dsv4.speculation.policy import Policy, room
from dsv4.speculation.trace import Request, Trace


@dataclass
class Run:
    """The result. seconds: of the passes by the cost table, without the policy's own time. block_size_history[request]:
    drafted tokens of each of its passes (of requests that began). widths: of all passes. Acceptance is None if nothing
    was drafted; mean and variance of the block size are over all passes of all rows."""

    policy: str
    trace: str
    batch: int
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    block_size_history: dict[str, list[int]] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_block_size(self) -> float:
        return fmean(self._sizes())

    @property
    def block_size_variance(self) -> float:
        return pvariance(self._sizes())

    def _sizes(self) -> list[int]:
        return [size for sizes in self.block_size_history.values() for size in sizes]

    def document(self, history: bool = False) -> dict:
        kept = asdict(self)
        if not history:
            del kept["block_size_history"], kept["widths"]
        return {
            **kept,
            "tokens_per_second": self.tokens_per_second,
            "acceptance": self.acceptance,
            "mean_block_size": self.mean_block_size,
            "block_size_variance": self.block_size_variance,
        }


@dataclass
class _Row:
    request: Request
    state: object
    history: list[int]
    at: int = 0

    @property
    def room(self) -> int:
        """The largest useful number of drafts."""
        return room(len(self.request) - self.at, len(self.request) - self.at)


class _Decisions:
    """Sizes of the next passes: a decision before a pass applies to the pass that is `ahead` − 1 passes later."""

    def __init__(self, ahead: int):
        self.ahead, self.waiting = ahead, deque()

    def next(self, decided: list[int], fresh: set[int]) -> list[int]:
        """Sizes of the pass that begins now. fresh: rows whose request begins with it, so that no earlier decision
        exists."""
        while len(self.waiting) < self.ahead - 1:
            self.waiting.append(list(decided))
        for sizes in self.waiting:
            for b in fresh:
                sizes[b] = decided[b]
        self.waiting.append(decided)
        return self.waiting.popleft()


def simulate(
    policy: Policy,
    trace: Trace,
    costs: CostTable,
    batch: int,
    pressure: Callable[[int], bool] = lambda tokens: False,
    ahead: int = 1,
) -> Run:
    """Decode the requests of `trace` in `batch` rows; a row whose request has ended takes the next one.

    It ends when a row finds no request left, so every pass has all its rows, and at batch 1 the whole trace is decoded.
    pressure(tokens committed so far) says whether the cache is under pressure in the next pass. A policy that never
    drafts needs no drafter. For other policies the drafter runs after passes without drafts as on a device
    (`BatchCost.catch_up`). ahead: as in `Rounds`; with 2 a pass has the sizes and the width that were decided before
    the previous pass. Raises InputError with fewer requests than rows.
    """
    if len(trace.requests) < batch:
        raise InputError(
            f"trace {trace.name!r} has {len(trace.requests)} requests for {batch} rows; expected at least one a row"
        )
    run, waiting, cost, rested = Run(policy.name, trace.name, batch), iter(trace.requests), costs.of(batch), 0
    rows = [_begin(policy, next(waiting), run) for _ in range(batch)]
    decisions, fresh = _Decisions(ahead), set(range(batch))
    while True:
        chosen = policy.choose([row.state for row in rows], pressure(run.tokens))
        decided = decisions.next([min(size, row.room) for size, row in zip(chosen, rows)], fresh)
        width, sizes = max(decided), [min(size, row.room) for size, row in zip(decided, rows)]
        run.passes, fresh = run.passes + 1, set()
        run.widths.append(width)
        if policy.drafts:
            run.seconds += costs.seconds(batch, sizes, width) + (
                cost.following(rested) if width or rested == cost.rests else 0.0
            )
            rested = 0 if width else after_rest(rested, cost.rests)
        else:
            run.seconds += cost.step
        for b, (row, size) in enumerate(zip(rows, sizes)):
            accepted = min(size, int(row.request.accepted[row.at]))
            row.at += accepted + 1
            row.history.append(size)
            run.tokens, run.drafted, run.accepted = (
                run.tokens + accepted + 1,
                run.drafted + size,
                run.accepted + accepted,
            )
            if row.at < len(row.request):
                row.state = policy.observe(row.state, accepted, size)
                continue
            rested = rested if batch > 1 else 0  # the drafter runs the prompt before anything is decoded
            following = next(waiting, None)
            fresh.add(b)
            rows[b] = _begin(policy, following, run) if following is not None else None
        if None in rows:
            return run


def _begin(policy: Policy, request: Request, run: Run) -> _Row:
    return _Row(request, policy.initial(request), run.block_size_history.setdefault(request.name, []))
