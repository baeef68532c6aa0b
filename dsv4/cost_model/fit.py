"""The cost model: β and c₀ from dense rows, c₁ from rows that search, nothing from rows that are held out.

c₁ is the sum of a fixed price, a price for each row of the batch, which has its own list to find, and a price for each
scored item: finding among 65536 pages takes ten times as long as among 512. A cost model with one constant a policy is
also fitted, so that the report can give its error.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

from dsv4.cost_model.rows import Measured, Row
from dsv4.errors import InputError


@dataclass(frozen=True)
class Price:
    """Price of finding: `fixed` s a layer, `row` s for every row of the batch, `each` s for every block (or entry)
    scored, over all rows and heads, and `listed` s for every one of a single row, over its heads: programs that choose
    from the lists of different rows run at once, and each goes through its own list in order."""

    fixed: float
    each: float = 0.0
    row: float = 0.0
    listed: float = 0.0

    def of(self, searched: float, batch: int) -> float:
        return self.fixed + self.row * batch + self.each * searched + self.listed * searched / batch


@dataclass(frozen=True)
class CostModel:
    """bandwidth β in bytes/s, c0 in s a layer, finding: c₁, by what searches, row: s a layer that c₀ grows by with each
    row of the batch after the first (of whole steps, whose linear layers multiply more rows)."""

    bandwidth: float
    c0: float
    finding: Mapping[str, Price] = field(default_factory=dict)
    row: float = 0.0

    def launches(self, batch: int) -> float:
        """c₀ of a batch: what a layer takes beside its bytes."""
        return self.c0 + self.row * (batch - 1)

    def seconds(self, nbytes: float, finding: str | None = None, searched: int = 0, batch: int = 1) -> float:
        """bytes / β + c₀ (+ c₁). Raises InputError if the price of this finding was never measured."""
        if finding is not None and finding not in self.finding:
            raise InputError(
                f"the price of finding by {finding!r} was not fitted; fitted are {', '.join(self.finding) or 'none'}"
            )
        price = 0.0 if finding is None else self.finding[finding].of(searched, batch)
        return nbytes / self.bandwidth + self.launches(batch) + price

    def predict(self, row: Row | Measured) -> float:
        return self.seconds(row.bytes, row.finding, row.searched, row.batch)

    @classmethod
    def from_document(cls, document: Mapping) -> "CostModel":
        """The inverse of `dataclasses.asdict`."""
        prices = {name: Price(**price) for name, price in document["finding"].items()}
        return cls(document["bandwidth"], document["c0"], prices, document.get("row", 0.0))


def fit(measured: Iterable[Measured], constant: bool = False) -> CostModel:
    """Least squares of relative errors, since times span three orders of magnitude. Held-out rows are ignored.

    constant: one price a policy, however many items are searched. Raises InputError if the rows determine no cost
    model: fewer than two dense rows of different bytes, or time that falls with bytes.
    """
    rows = [r for r in measured if not r.held_out]
    dense = [r for r in rows if r.dense]
    if len({r.bytes for r in dense}) < 2:
        raise InputError(
            f"{len(dense)} dense rows to fit; expected at least two of different bytes: measure more contexts"
        )
    times = [r.seconds for r in dense]
    c0, x = least_squares([[1.0] * len(dense), [r.bytes for r in dense]], times, times)  # x = 1/β
    if x <= 0:
        raise InputError(
            f"time falls by {-x * 1e9:.3g} ns a GB over {len(dense)} dense rows; expected it to grow with bytes: the "
            "rows are noise, measure longer contexts"
        )
    costs, prices = CostModel(1 / x, c0), {}
    for name in dict.fromkeys(r.finding for r in rows if r.finding is not None):
        found = [r for r in rows if r.finding == name]
        rest, whole = [r.seconds - costs.seconds(r.bytes) for r in found], [r.seconds for r in found]
        columns = [
            [1.0] * len(found),
            [0.0 if constant else r.searched for r in found],
            [0.0 if constant else r.batch for r in found],
        ]
        prices[name] = Price(*never_negative(columns, rest, whole))
    return CostModel(costs.bandwidth, costs.c0, prices)


def fit_steps(measured: Sequence[Measured], constant: bool = True) -> CostModel:
    """β, c₀ and every c₁ at once, by `non_negative` least squares of relative errors, of whole steps: each row is one
    layer's share of a step, so bytes and seconds are those of the step over its layers.

    Dense and sparse steps share β and c₀, because both read the weights. constant: c₀ and c₁ are one number a layer
    each, as published; otherwise c₀ grows with the rows of the batch, and c₁ with the scored items of all rows and with
    those of one row, as far as the steps tell these apart. Raises InputError where the rows determine no cost model:
    fewer rows than unknowns, or time that does not grow with bytes.
    """
    rows = [r for r in measured if not r.held_out]
    names = list(dict.fromkeys(r.finding for r in rows if r.finding is not None))
    columns: dict[tuple[str, str], list[float]] = {
        ("", "bytes"): [float(r.bytes) for r in rows],
        ("", "c0"): [1.0] * len(rows),
    }
    if not constant:
        columns["", "row"] = [float(r.batch - 1) for r in rows]
    for name in names:
        found = [float(r.finding == name) for r in rows]
        columns[name, "fixed"] = found
        if not constant:
            columns[name, "each"] = [f * r.searched for f, r in zip(found, rows)]
            columns[name, "listed"] = [f * r.searched / r.batch for f, r in zip(found, rows)]
    kept = _independent(columns)
    needed = 2 + sum(any(r.finding != name for r in rows) for name in names)
    if len(kept) < needed or len(rows) < needed:
        raise InputError(
            f"{len(rows)} steps tell {len(kept)} of {needed} unknowns of the cost model apart; expected more: measure "
            "more contexts, dense and sparse"
        )
    times = [r.seconds for r in rows]
    x = dict(zip(kept, non_negative([columns[key] for key in kept], times, times)))
    if x["", "bytes"] <= 0:
        raise InputError(
            f"time does not grow with bytes over {len(rows)} steps: they are noise, or all read as much; measure "
            "longer contexts"
        )
    price = lambda name: Price(**{part: x.get((name, part), 0.0) for part in ("fixed", "each", "listed")})
    return CostModel(1 / x["", "bytes"], x["", "c0"], {name: price(name) for name in names}, x.get(("", "row"), 0.0))


def _independent(columns: Mapping[tuple[str, str], Sequence[float]]) -> list[tuple[str, str]]:
    """The columns, in their order, that are no linear combination of those before them."""
    kept: list[tuple[str, str]] = []
    scaled = lambda key: np.asarray(columns[key]) / (max(map(abs, columns[key])) or 1.0)
    for key in columns:
        if np.linalg.matrix_rank(np.array([scaled(k) for k in (*kept, key)])) > len(kept):
            kept.append(key)
    return kept


def non_negative(columns: Sequence[Sequence[float]], y: Sequence[float], whole: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises Σ ((Σ_k x_k · columns_k − y) / whole)²: the best of the unconstrained solutions of every
    subset of the columns that is not negative. Columns are few, so all subsets are tried; the optimum is among them."""
    scales = [max(map(abs, column)) or 1.0 for column in columns]
    table = np.array(columns, float).T / scales / np.asarray(whole, float)[:, None]
    wanted, best, found = np.asarray(y, float) / np.asarray(whole, float), float("inf"), [0.0] * len(columns)
    for size in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), size):
            x = np.linalg.lstsq(table[:, chosen], wanted, rcond=None)[0]
            loss = float(((table[:, chosen] @ x - wanted) ** 2).sum())
            if (x >= 0).all() and loss < best * (1 - 1e-12):
                best, found = loss, [0.0] * len(columns)
                for k, value in zip(chosen, x):
                    found[k] = float(value) / scales[k]
    return found


def least_squares(columns: Sequence[Sequence[float]], y: Sequence[float], whole: Sequence[float]) -> list[float]:
    """x that minimises Σ ((Σ_k x_k · columns_k − y) / whole)²; 0 for a column after the first that does not vary, and,
    from the last, for columns beyond as many as there are rows."""
    kept = [k for k, column in enumerate(columns) if k == 0 or len(set(column)) > 1][: len(y)]
    weight, x = 1 / np.asarray(whole, float), [0.0] * len(columns)
    scale = [max(map(abs, columns[k])) for k in kept]
    table = np.array([columns[k] for k in kept], float).T / scale * weight[:, None]
    for k, value, size in zip(kept, np.linalg.lstsq(table, np.asarray(y, float) * weight, rcond=None)[0], scale):
        x[k] = float(value / size)
    return x


def never_negative(columns: list[list[float]], y: Sequence[float], whole: Sequence[float]) -> list[float]:
    """`least_squares` with non-negative columns after the first: searching more never takes less time."""
    while True:
        x = least_squares(columns, y, whole)
        least = min(range(1, len(x)), key=lambda k: x[k] * max(columns[k]))
        if x[least] >= 0:
            return x
        columns = [[0.0] * len(column) if k == least else column for k, column in enumerate(columns)]


def r_squared(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """1 − Σ (t − t̂)² / Σ (t − mean)²; NaN if all are equal."""
    middle = mean(measured)
    total = sum((t - middle) ** 2 for t in measured)
    return 1 - sum((t - p) ** 2 for t, p in zip(measured, predicted)) / total if total else float("nan")


@dataclass(frozen=True)
class Quality:
    """How well predictions match measured times: errors are (predicted − measured) / measured."""

    rows: int
    r_squared: float
    median_error: float
    worst_error: float
    worst: str

    @classmethod
    def of(cls, measured: Sequence[Measured], predicted: Sequence[float]) -> "Quality":
        errors = [abs(p / r.seconds - 1) for r, p in zip(measured, predicted)]
        at = max(range(len(errors)), key=errors.__getitem__)
        return cls(
            len(errors),
            r_squared([r.seconds for r in measured], predicted),
            median(errors),
            errors[at],
            f"{measured[at].policy} B{measured[at].batch} {measured[at].context}",
        )
