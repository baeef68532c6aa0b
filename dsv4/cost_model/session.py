"""`dsv4 regime measure`: rows to fit, the cost model, predictions on disk, and only then the rows that are held out."""

import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import Protocol

from dsv4.cost_model.fit import CostModel, Quality, fit
from dsv4.cost_model.regime import Hardware, crossover, measured_crossover, regime_map
from dsv4.cost_model.report import priced
from dsv4.cost_model.rows import Measured, Source
from dsv4.cost_model.whole import Whole
from dsv4.errors import InputError
from dsv4.speculation.documents import write_whole

FORMAT, VERSION = "dsv4-regime", 1
GOALS = {
    "R² of all rows": (0.998, ">="),
    "worst held-out error": (0.25, "<="),
    "median held-out error": (0.10, "<="),
    "worst held-out error, as published": (0.022, "<="),
}


class ShapeTimer(Protocol):
    def shape(self, source: Source, batch: int, context: int, held_out: bool) -> tuple[list[Measured], str]: ...


@dataclass(frozen=True)
class Plan:
    """Shapes (batch, context) to fit on, and those held out."""

    fitted: tuple[tuple[int, int], ...]
    held_out: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, batches: Sequence[int], contexts: Sequence[int], each: int = 3) -> "Plan":
        """Choose shapes: ordered by the tokens in all caches, every `each`-th is held out, beginning with the second,
        so the smallest and the largest are fitted."""
        shapes = sorted(
            ((b, c) for b in dict.fromkeys(batches) for c in dict.fromkeys(contexts)), key=lambda s: (s[0] * s[1], s)
        )
        held = {s for i, s in enumerate(shapes) if i % each == 1 and i < len(shapes) - 1}
        return cls(tuple(s for s in shapes if s not in held), tuple(s for s in shapes if s in held))


def run(
    source: Source,
    timer: ShapeTimer,
    plan: Plan,
    hardware: Hardware,
    contexts: Iterable[int],
    batches: Sequence[int],
    folder: Path,
    stem: str,
    about: dict,
    say: Callable[[str], None],
) -> dict:
    """The report, as JSON values. Writes STEM.predictions.json before a held-out row runs, and reads the predictions
    back from it."""
    notes: list[str] = []
    dense, ways = source.ways()
    check_priced(ways, {row.finding for shape in plan.fitted for row in source.rows(*shape)})
    measured = _measure(source, timer, plan.fitted, False, notes, say)
    costs, constant = fit(measured), fit(measured, constant=True)
    if costs.c0 < 0:
        notes.append(
            f"c₀ is {costs.c0 * 1e6:.1f} µs, less than nothing: time grows faster than bytes over these rows, and the "
            "cost model does not describe them."
        )
    prices = "".join(f", c₁ ({name}) {priced(asdict(price))}" for name, price in costs.finding.items())
    say(f"β {costs.bandwidth / 1e12:.3f} TB/s, c₀ {costs.c0 * 1e6:.2f} µs{prices}")
    check_priced(ways, costs.finding)  # rows may have failed
    crossings = [
        {"policy": way.policy, "batch": b, "predicted": crossover(costs, dense, way, b)}
        for way in ways
        for b in sorted({b for b, _ in (*plan.fitted, *plan.held_out)})
    ]
    path = folder / f"{stem}.predictions.json"
    rows = [row for shape in plan.held_out for row in source.rows(*shape)]
    write_whole(
        path,
        json.dumps(
            {
                "format": f"{FORMAT}-predictions",
                "version": VERSION,
                "about": about,
                "bill": asdict(costs),
                "rows": [
                    {
                        "policy": r.policy,
                        "batch": r.batch,
                        "context": r.context,
                        "bytes": r.bytes,
                        "seconds": costs.predict(r),
                        "with_constant_prices": constant.predict(r),
                    }
                    for r in rows
                ],
                "crossovers": crossings,
            },
            indent=1,
        )
        + "\n",
    )
    say(f"{len(rows)} predictions and {len(crossings)} crossovers written to {path}; held-out rows are measured now")
    measured += _measure(source, timer, plan.held_out, True, notes, say)
    said = json.loads(path.read_text())
    predictions = {(r["policy"], r["batch"], r["context"]): r["seconds"] for r in said["rows"]}
    judged = [judge(r, costs, predictions) for r in measured]
    plain = {(r["policy"], r["batch"], r["context"]): r["with_constant_prices"] for r in said["rows"]}
    held = [r for r in measured if r.held_out]
    if held:
        q = Quality.of(held, [plain[r.policy, r.batch, r.context] for r in held])
        notes.append(
            f"With one constant price a policy the held-out rows would be off by {q.median_error:.1%} (median) and "
            f"{q.worst_error:.1%} ({q.worst})."
        )
    for c in said["crossovers"]:
        c["measured_between"] = measured_crossover(measured, c["policy"], c["batch"])
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": about,
        "source": source.document(),
        "bill": asdict(costs),
        "quality": qualities(measured, judged),
        "rows": judged,
        "crossovers": said["crossovers"],
        "hardware": asdict(hardware),
        "notes": notes,
        "map": regime_map(costs, dense, ways, contexts, batches, hardware),
    }


def check_priced(ways: Sequence, findings: Container[str]) -> None:
    """Raises InputError for policies that search, if no row to be fitted searches like them."""
    unpriced = [way.policy for way in ways if way.finding is not None and way.finding not in findings]
    if unpriced:
        raise InputError(
            f"no row to fit searches as {', '.join(unpriced)} does, so its price is unknown; measure contexts longer "
            "than what it keeps, or leave the policy out"
        )


def _measure(source: Source, timer: ShapeTimer, shapes, held_out: bool, notes: list[str], say) -> list[Measured]:
    found: list[Measured] = []
    for batch, context in shapes:
        rows, why = timer.shape(source, batch, context, held_out)
        notes += [f"not measured: {why}"] if why else []
        for r in rows:
            notes += [
                f"{r.policy} B{batch} {context}, {name}: {why}"
                for name, why in (r.others or {}).items()
                if isinstance(why, str)
            ]
            say(
                f"{'held out' if held_out else 'fitted  '} {r.policy} B{r.batch} {r.context}: "
                f"{r.seconds * 1e6:.1f} µs ({r.by})"
            )
        found += [replace(r, held_out=held_out) for r in rows if not isnan(r.seconds)]
    return found


def judge(row: Measured, costs: CostModel, predictions: dict) -> dict:
    """A row with its prediction: for a held-out row the one that was written before, for the others that of the fit."""
    if row.held_out and (row.policy, row.batch, row.context) not in predictions:
        raise InputError(
            f"{row.policy} B{row.batch} {row.context} was measured as held out and not predicted before; its "
            "error means nothing"
        )
    predicted = predictions[row.policy, row.batch, row.context] if row.held_out else costs.predict(row)
    return asdict(row) | {"predicted": predicted, "error": predicted / row.seconds - 1}


def qualities(measured: Sequence[Measured], judged: Sequence[dict]) -> dict:
    """Quality of the fitted rows, of the held-out ones and of all, and which goals they meet."""
    pairs, found = list(zip(measured, (r["predicted"] for r in judged))), {}
    for name, chosen in (
        ("fitted", [p for p in pairs if p[0].fitted]),
        ("held out", [p for p in pairs if p[0].held_out]),
        ("all", pairs),
    ):
        found[name] = asdict(Quality.of(*zip(*chosen))) if chosen else None
    held = found["held out"] or {}
    values = {
        "R² of all rows": found["all"]["r_squared"],
        "median held-out error": held.get("median_error"),
        **dict.fromkeys(("worst held-out error", "worst held-out error, as published"), held.get("worst_error")),
    }
    return found | {
        "goals": [
            {
                "goal": name,
                "wanted": f"{relation} {limit}",
                "found": values[name],
                "verdict": "not measured"
                if values[name] is None
                else "met"
                if (values[name] >= limit if relation == ">=" else values[name] <= limit)
                else "FAILED",
            }
            for name, (limit, relation) in GOALS.items()
        ]
    }


def remap(report: dict, hardware: Hardware, whole: Whole | None = None) -> dict:
    """A measured report with the map and the predicted crossovers of other hardware. c₀ and prices stay as measured.
    whole: as in `redraw`."""
    costs = CostModel.from_document(report["bill"])
    if hardware.bandwidth is not None:
        costs = replace(costs, bandwidth=hardware.bandwidth)
    dense, ways = _source_of(report["source"]).ways()
    batches = list(dict.fromkeys(c["batch"] for c in report["crossovers"]))
    note = (
        f"Not measured on {hardware.name}: the cost model of {report['about']['device']}"
        + (f" with β = {hardware.bandwidth / 1e12:.3f} TB/s" if hardware.bandwidth is not None else "")
        + "; c₀ and c₁ as they were there."
    )
    crossovers = [
        {"policy": way.policy, "batch": b, "predicted": crossover(costs, dense, way, b)}
        for way in ways
        for b in batches
    ]
    return redraw(
        report | {"bill": asdict(costs), "notes": [note], "rows": [], "quality": None, "crossovers": crossovers},
        hardware,
        whole,
    )


def redraw(report: dict, hardware: Hardware, whole: Whole | None = None) -> dict:
    """A report with its map drawn again, for its contexts and batches. All else, measured rows included, is unchanged.
    whole: the cost model of steps and the host tier, by default what the report has of them."""
    whole = Whole.of(report) if whole is None else whole
    dense, ways = _source_of(report["source"]).ways()
    contexts, batches = (list(dict.fromkeys(c[key] for c in report["map"])) for key in ("context", "batch"))
    costs, axes = CostModel.from_document(report["bill"]), (contexts, batches)
    return (
        report
        | whole.document()
        | {
            "hardware": asdict(hardware),
            "map": regime_map(costs, dense, ways, *axes, hardware, whole.steps, whole.tier),
        }
    )


def _source_of(document: dict) -> Source:
    """The source that `Source.document` described, for its formulas."""
    import torch

    from dsv4.cost_model.csa import CSA
    from dsv4.cost_model.gqa import GQA, Geometry
    from dsv4.kernels.block_choice import Policy

    if document["kind"] == "csa":
        return CSA(torch.device("cpu"), "reference", document["index"])
    return GQA(
        Geometry(**document["geometry"]), {p["name"]: Policy(**p) for p in document["policies"]}, torch.device("cpu")
    )
