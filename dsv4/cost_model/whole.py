"""Whole steps in a report of `dsv4 regime`: their cost model, the host tier, and a check against measured steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from dsv4.cost_model import gqa
from dsv4.cost_model.fit import CostModel
from dsv4.cost_model.regime import Hardware, Way
from dsv4.cost_model.steps import LEAVES, MeasuredSteps, Step, left_out, ratios
from dsv4.cost_model.tier import Tier, checked
from dsv4.errors import InputError, MapMismatch

BETTER = 0.001  # of the worst error of a step that was left out: less is rounding, or noise
CLOSE = 0.05  # relative difference of the map's ratio, or of a step from host memory, from the measured one


@dataclass(frozen=True)
class Whole:
    """What a map knows beyond attention: the cost model of steps and where it was fitted, and the price of the host
    tier; None for what it does not know."""

    steps: CostModel | None = None
    about: Mapping | None = None
    tier: Tier | None = None

    def document(self) -> dict:
        """As JSON values: keys of a report."""
        found = {}
        if self.steps is not None:
            found["steps"] = {"bill": asdict(self.steps), **(self.about or {})}
        if self.tier is not None:
            found["tier"] = asdict(self.tier)
        return found

    @classmethod
    def of(cls, report: Mapping, found: MeasuredSteps | None = None, tier: Tier | None = None) -> "Whole":
        """What a report knows, and instead of it the steps and the tier that are given. Raises InputError for steps of
        another model than the report's."""
        steps, about = None, None
        if (held := report.get("steps")) is not None:
            steps = CostModel.from_document(held["bill"])
            about = {key: value for key, value in held.items() if key != "bill"}
        if found is not None:
            _check_model(report, found)
            names = "geometry", "device", "command", "commit", "layers", "weights", "held"
            steps, about = best(found), {name: getattr(found, name) for name in names}
            about["dense"] = any(step.share.dense for step in found.steps)
            about["batches"] = sorted({step.share.batch for step in found.steps})
        if tier is None and report.get("tier") is not None:
            tier = Tier.from_document(report["tier"])
        return cls(steps, about, tier)


def best(found: MeasuredSteps) -> CostModel:
    """The fit of the published form, whose c₀ and c₁ are one number a layer each, unless the form in which they grow
    with rows and scored blocks predicts steps that were left out better by more than BETTER, and no fewer of them."""

    def worst(constant: bool) -> tuple[int, float]:
        predicted = left_out(found, constant, LEAVES["one step"])
        errors = [abs(p / s.seconds - 1) for p, s in zip(predicted, found.steps) if p is not None]
        return len(predicted) - len(errors), max(errors, default=0.0)

    (unknown, published), (others, priced) = worst(True), worst(False)
    return found.fit(constant=others > unknown or priced > published - BETTER)


def _check_model(report: Mapping, found: MeasuredSteps) -> None:
    source = report["source"]
    if source["kind"] != found.kind or found.heads is not None and source["geometry"] != asdict(found.heads):
        raise InputError(
            f"the steps are of {found.kind} {found.geometry}, the report is of {report['about']['model']}; expected "
            "steps of the same model"
        )


def check(report: Mapping, found: MeasuredSteps, host_tier: Mapping | None = None) -> dict:
    """The map's whole-step ratios beside the measured ones, and its steps from host memory beside those of a document
    of scripts/bench_host_tier.py. A report without a cost model of steps is checked as its map is drawn: the weights at
    β, and the attention of all layers."""
    _check_model(report, found)
    whole, attention = Whole.of(report), CostModel.from_document(report["bill"])

    def seconds(step: Step) -> float:
        way, weights = _way(report, step), step.parts and _weights(step)
        hardware = Hardware("", 0, step.layers, round(weights or 0))
        if whole.steps is not None:
            return way.step(whole.steps, hardware, *step.shape[:2])
        return weights / attention.bandwidth + step.layers * way.seconds(attention, *step.shape[:2])

    rows = {"ratios": ratios(found, seconds), "tier": []}
    if host_tier is not None and whole.tier is not None:
        sparse = {s.shape: seconds(s) for s in found.steps if not s.share.dense}
        resident = lambda batch, context: sparse[batch, context, host_tier["decode"]["layers"]]
        try:
            rows["tier"] = checked(host_tier, whole.tier, resident)
        except KeyError:
            raise InputError(
                "no sparse step of the shape that the host tier was measured at is among the steps; measure it with "
                "scripts/bench_decode.py"
            ) from None
    return rows


def _way(report: Mapping, step: Step) -> Way:
    heads = gqa.Geometry(**report["source"]["geometry"])
    bytes_of = lambda batch, context: gqa.policy_bytes(heads, step.policy, batch, context)
    searched = lambda batch, context: gqa.searched(heads, step.policy, batch, context)
    if step.policy.dense:
        return Way("dense", bytes_of)
    return Way(step.share.policy, bytes_of, gqa.finding(step.policy), 0, searched)


def _weights(step: Step) -> int:
    """Bytes of weights of a step: what is not of attention."""
    attention = "keys", "values", "block summaries", "token lists", "queries and outputs"
    return sum(nbytes for part, nbytes in step.parts.items() if part not in attention)


def expect_close(rows: Mapping[str, Sequence[Mapping]], most: float = CLOSE) -> None:
    """Raise MapMismatch if a row is further from what was measured than `most`, or if nothing was compared."""
    every = [row for part in rows.values() for row in part]
    far = [row for row in every if abs(row["error"]) > most]
    if not every:
        raise MapMismatch("no sparse step with a dense one of its shape was measured; the map was compared with none")
    if far:
        worst = max(far, key=lambda row: abs(row["error"]))
        raise MapMismatch(
            f"{len(far)} of {len(every)} whole steps are off by more than {most:.0%}, the worst {said(worst)}; "
            "expected the measured ones: fit the steps again (--steps), or measure them on this device"
        )


def said(row: Mapping) -> str:
    """'block-128 bound, 32 blocks B1 1048576: 4.50 × where 3.89 × was measured (+15.6 %)'."""
    name = f"{row.get('policy') or row['way']} B{row['batch']} {row['context']}"
    scale, unit = (1.0, "×") if "policy" in row else (1e3, "ms")
    of = lambda value: f"{value * scale:.2f} {unit}"
    return f"{name}: {of(row['map'])} where {of(row['measured'])} was measured ({row['error']:+.1%})"
