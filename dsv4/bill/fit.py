"""The bill: β and c₀ from dense rows, c₁ from rows that search, nothing from rows that are held out.

c₁ is a fixed price and one for each thing that is scored: to find among 65536 pages takes ten times as long as among 512. A bill with
one constant a policy is fitted beside it, so that the report can say what that would have missed by.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from dsv4.bill.rows import Measured, Row
from dsv4.errors import InputError


@dataclass(frozen=True)
class Price:
    """Of finding: `fixed` s a layer, and `each` s for every block (or entry) that is scored, of all rows and heads."""

    fixed: float
    each: float = 0.0

    def of(self, searched: int) -> float:
        return self.fixed + self.each * searched


@dataclass(frozen=True)
class Bill:
    """bandwidth β in bytes/s, c0 in s a layer, finding: c₁, by what searches."""

    bandwidth: float
    c0: float
    finding: Mapping[str, Price] = field(default_factory=dict)

    def seconds(self, nbytes: float, finding: str | None = None, searched: int = 0) -> float:
        """bytes / β + c₀ (+ c₁). Raises InputError where the price of this finding was never measured."""
        if finding is not None and finding not in self.finding:
            raise InputError(f"the price of finding by {finding!r} was not fitted; fitted are {', '.join(self.finding) or 'none'}")
        return nbytes / self.bandwidth + self.c0 + (0.0 if finding is None else self.finding[finding].of(searched))

    def predict(self, row: Row | Measured) -> float:
        return self.seconds(row.bytes, row.finding, row.searched)

    @classmethod
    def from_document(cls, document: Mapping) -> "Bill":
        """What `dataclasses.asdict` made of one."""
        return cls(document["bandwidth"], document["c0"], {name: Price(**price) for name, price in document["finding"].items()})


def fit(measured: Iterable[Measured], constant: bool = False) -> Bill:
    """Least squares of relative errors, since times span three orders of magnitude. Rows that are held out are not looked at.

    constant: one price a policy, whatever is searched. Raises InputError where the rows determine no bill: fewer than two dense rows of
    different bytes, or time that falls with bytes.
    """
    rows = [r for r in measured if not r.held_out]
    dense = [r for r in rows if r.dense]
    if len({r.bytes for r in dense}) < 2:
        raise InputError(f"{len(dense)} dense rows to fit; expected at least two of different bytes: measure more contexts")
    c0, x = line([r.bytes for r in dense], [r.seconds for r in dense], [r.seconds for r in dense])  # x = 1/β
    if x <= 0:
        raise InputError(f"time falls by {-x * 1e9:.3g} ns a GB over {len(dense)} dense rows; expected it to grow with bytes: the rows are "
                         "noise, measure longer contexts")
    bill, prices = Bill(1 / x, c0), {}
    for name in dict.fromkeys(r.finding for r in rows if r.finding is not None):
        found = [r for r in rows if r.finding == name]
        rest, whole = [r.seconds - bill.seconds(r.bytes) for r in found], [r.seconds for r in found]
        fixed, each = line([r.searched for r in found], rest, whole)
        prices[name] = Price(*(line([0] * len(found), rest, whole) if constant or each < 0 else (fixed, each)))
    return Bill(bill.bandwidth, bill.c0, prices)


def line(x: Sequence[float], y: Sequence[float], whole: Sequence[float]) -> tuple[float, float]:
    """a, b that minimise Σ ((a + b·x − y) / whole)²; b = 0 where x does not vary."""
    u, v, t = [1 / w for w in whole], [n / w for n, w in zip(x, whole)], [n / w for n, w in zip(y, whole)]
    uu, uv, vv, ut, vt = (sum(p * q for p, q in zip(*pair)) for pair in ((u, u), (u, v), (v, v), (u, t), (v, t)))
    if len(set(x)) < 2:
        return ut / uu, 0.0
    determinant = uu * vv - uv * uv
    return (ut * vv - vt * uv) / determinant, (vt * uu - ut * uv) / determinant


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
