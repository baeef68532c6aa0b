"""Ranks block-size policies: points (measured or simulated) to tables, verdicts and plots.

A benchmark on a GPU fills `Point`s with what it measured; `simulated` fills them from traces and a cost table.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dsv4.speculation import (
    MAX_DRAFTS,
    Adaptive,
    CostAware,
    CostTable,
    Informed,
    Oracle,
    Policy,
    Run,
    Static,
    Trace,
    simulate,
)
from dsv4.speculation.host_loop import AHEAD
from dsv4.speculation.oracle import bound
from dsv4.speculation.trace import mixed, stationary, synthetic_request

GOALS = {"mixed": 1.08, "stationary": 0.98, "oracle": 0.90}  # of the best static size, of it, of the oracle
JUDGED = ("ASBS", "cost-aware")
BOUNDS = ("informed", "oracle", "bound")  # need the future; not candidates for the best static size


@dataclass(frozen=True)
class Point:
    """One policy on one trace. kind: 'mixed' or 'stationary', which goal applies. tokens_per_second of all rows
    together. The rest as in `dsv4.speculation.Run`, None where it was not recorded. expected: by simulation, beside
    points that were measured.
    own_text: the model wrote its own text, so the oracle's plan, made of another run's, is out of step with it and no
    bound."""

    trace: str
    kind: str
    batch: int
    policy: str
    tokens_per_second: float
    tokens: int | None = None
    passes: int | None = None
    acceptance: float | None = None
    mean_block_size: float | None = None
    block_size_variance: float | None = None
    expected: bool = False
    own_text: bool = False

    @property
    def label(self) -> str:
        return self.policy + ", expected" * self.expected

    @property
    def static(self) -> bool:
        """No speculation is the static size 0, and competes for the best."""
        return self.policy == "no speculation" or self.policy.startswith("static ")


def point(run: Run, kind: str) -> Point:
    return Point(
        run.trace,
        kind,
        run.batch,
        run.policy,
        run.tokens_per_second,
        run.tokens,
        run.passes,
        run.acceptance,
        run.mean_block_size,
        run.block_size_variance,
    )


def default_traces(requests: int, tokens: int, seed: int) -> list[tuple[str, Trace]]:
    """(kind, trace): stationary high and low acceptance, mixed. The rates are assumptions, not measurements."""
    size = {"requests": requests, "tokens": tokens, "seed": seed}
    return [
        ("stationary", stationary("high 0.95", 0.95, **size)),
        ("stationary", stationary("low 0.35", 0.35, **size)),
        ("mixed", mixed("mixed 0.95/0.35", 0.95, 0.35, 128, **size)),
        ("mixed", mixed("mixed 0.9/0.5", 0.9, 0.5, 256, **size)),
    ]


def simulated(
    traces: Sequence[tuple[str, Trace]],
    costs: CostTable,
    batches: Sequence[int],
    said: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    points = []
    for batch in batches:
        for kind, trace in traces:
            policies: list[Policy] = [*(Static(k) for k in range(MAX_DRAFTS + 1)), Adaptive(), CostAware(costs, batch)]
            if all(r.rates is not None for r in trace.requests):
                policies.append(Informed(costs, batch))
            runs = [simulate(policy, trace, costs, batch, ahead=AHEAD) for policy in policies]
            widths = [None] if batch == 1 else [None, *range(MAX_DRAFTS + 1)]
            runs.append(
                max(
                    (simulate(Oracle(costs, batch, w), trace, costs, batch) for w in widths),
                    key=lambda r: r.tokens_per_second,
                )
            )
            points += [point(run, kind) for run in runs]
            points.append(Point(trace.name, kind, batch, "bound", bound(trace, costs, batch)))
            speeds = (f"{r['policy']} {r['of_static']:.3f}" for r in ranked(points[-len(runs) - 1 :]))
            said(f"batch {batch}, {trace.name}: " + ", ".join(speeds))
    return points


def groups(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """Points by (trace, batch), in the order of their first appearance."""
    found: dict[tuple[str, int], list[Point]] = {}
    for p in points:
        found.setdefault((p.trace, p.batch), []).append(p)
    return found


def references(points: Sequence[Point]) -> tuple[Point, Point | None]:
    """The best static size, measured or expected, and the oracle (None where there is none, or where it is no bound) of
    one group. Raises ValueError without a static size."""
    best = max((p for p in points if p.static), key=lambda p: p.tokens_per_second)
    return best, next((p for p in points if p.policy == "oracle" and not p.own_text), None)


def ranked(points: Sequence[Point]) -> list[dict]:
    """Each point with its speed relative to the best static size and to the oracle."""
    rows = []
    for group in groups(points).values():
        best, oracle = references(group)
        rows += [
            {
                **asdict(p),
                "best_static": best.policy,
                "best_static_expected": best.expected,
                "of_static": p.tokens_per_second / best.tokens_per_second,
                "of_oracle": p.tokens_per_second / oracle.tokens_per_second if oracle else None,
            }
            for p in group
        ]
    return rows


def verdicts(points: Sequence[Point]) -> list[dict]:
    """Each goal for each judged policy, trace and batch. A goal whose oracle was not run is not judged: there is no
    row.
    reference: the policy that it was measured against, expected: whether that one's speed was simulated."""
    rows = []
    for row in ranked(points):
        if row["policy"] not in JUDGED:
            continue
        goals = (
            ("best static size", row["of_static"], GOALS[row["kind"]], row["best_static"], row["best_static_expected"]),
            ("oracle", row["of_oracle"], GOALS["oracle"], "oracle", False),
        )
        for what, measured, goal, reference, expected in goals:
            if measured is not None:
                rows.append(
                    {
                        "policy": row["policy"],
                        "trace": row["trace"],
                        "batch": row["batch"],
                        "of": what,
                        "reference": reference,
                        "expected": expected,
                        "measured": measured,
                        "goal": goal,
                        "verdict": "met" if measured >= goal else "MISSED",
                    }
                )
    return rows


@dataclass(frozen=True)
class Timeline:
    """Block sizes over one text at batch 1. sizes[policy]: (tokens committed before the pass, drafted) of each pass;
    low and pressure: token ranges."""

    tokens: int
    low: tuple[int, int]
    pressure: tuple[int, int]
    sizes: dict[str, list[tuple[int, int]]]


def timeline(
    costs: CostTable,
    seed: int = 5,
    tokens: int = 900,
    low: tuple[int, int] = (300, 500),
    pressure: tuple[int, int] = (650, 800),
) -> Timeline:
    """Code, free text from low[0] to low[1], code again, with the cache under pressure for a while."""
    rates = np.full(tokens, 0.97)
    rates[low[0] : low[1]] = 0.3
    request = synthetic_request("timeline", rates, np.random.default_rng(seed))
    trace, sizes = Trace("timeline", (request,), {"kind": "synthetic", "seed": seed}), {}
    for policy in (Adaptive(), CostAware(costs, 1)):
        run, at, found = simulate(policy, trace, costs, 1, lambda done: pressure[0] <= done < pressure[1]), 0, []
        for size in run.block_size_history["timeline"]:
            found.append((at, size))
            at += min(size, int(request.accepted[at])) + 1
        sizes[policy.name] = found
    return Timeline(tokens, low, pressure, sizes)
