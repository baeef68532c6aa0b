"""The bill: β and c₀ from dense rows, c₁ from rows that search, nothing from rows that are held out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from dsv4.bill.rows import Measured, Row
from dsv4.errors import InputError


@dataclass(frozen=True)
class Bill:
    """bandwidth β in bytes/s, c0 in s a layer, finding: c₁ in s a layer, by what searches."""

    bandwidth: float
    c0: float
    finding: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, nbytes: float, finding: str | None = None) -> float:
        """bytes / β + c₀ (+ c₁). Raises InputError where the price of this finding was never measured."""
        if finding is not None and finding not in self.finding:
            raise InputError(f"the price of finding by {finding!r} was not fitted; fitted are {', '.join(self.finding) or 'none'}")
        return nbytes / self.bandwidth + self.c0 + (0.0 if finding is None else self.finding[finding])

    def predict(self, row: Row | Measured) -> float:
        return self.seconds(row.bytes, row.finding)


def fit(measured: Iterable[Measured]) -> Bill:
    """Least squares of relative errors, since times span three orders of magnitude. Rows that are held out are not looked at.

    Raises InputError where the rows determine no bill: fewer than two dense rows of different bytes, or time that falls with bytes.
    """
    rows = [r for r in measured if not r.held_out]
    dense = [r for r in rows if r.dense]
    if len({r.bytes for r in dense}) < 2:
        raise InputError(f"{len(dense)} dense rows to fit; expected at least two of different bytes: measure more contexts")
    # minimise Σ (x·b/t + c0/t − 1)², x = 1/β
    u, v = [r.bytes / r.seconds for r in dense], [1 / r.seconds for r in dense]
    uu, uv, vv = (sum(a * b for a, b in zip(p, q)) for p, q in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    x, c0 = (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant
    if x <= 0:
        raise InputError(f"time falls by {-x * 1e9:.3g} ns a GB over {len(dense)} dense rows; expected it to grow with bytes: the rows are "
                         "noise, measure longer contexts")
    bill, prices = Bill(1 / x, c0), {}
    for name in dict.fromkeys(r.finding for r in rows if r.finding is not None):
        found = [r for r in rows if r.finding == name]
        weights = [r.seconds ** -2 for r in found]
        prices[name] = sum(w * (r.seconds - bill.seconds(r.bytes)) for w, r in zip(weights, found)) / sum(weights)
    return Bill(bill.bandwidth, bill.c0, prices)


def r_squared(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """1 − Σ (t − t̂)² / Σ (t − mean)²; NaN where all were equal."""
    middle = mean(measured)
    total = sum((t - middle) ** 2 for t in measured)
    return 1 - sum((t - p) ** 2 for t, p in zip(measured, predicted)) / total if total else float("nan")


@dataclass(frozen=True)
class Quality:
    """How well predictions meet measured times: errors are (predicted − measured) / measured."""

    rows: int
    r_squared: float
    median_error: float
    worst_error: float
    worst: str

    @classmethod
    def of(cls, measured: Sequence[Measured], predicted: Sequence[float]) -> "Quality":
        errors = [abs(p / r.seconds - 1) for r, p in zip(measured, predicted)]
        at = max(range(len(errors)), key=errors.__getitem__)
        return cls(len(errors), r_squared([r.seconds for r in measured], predicted), median(errors), errors[at],
                   f"{measured[at].policy} B{measured[at].batch} {measured[at].context}")
