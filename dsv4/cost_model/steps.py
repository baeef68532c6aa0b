"""The cost model of a whole decode step, fitted to measured steps, and how well it predicts those that are left out.

    step = bytes / β + layers · (c₀ + c₁)

Bytes are the weights, keys and values, and block summaries by the formulas of `dsv4.cost_model.step`. c₁, the price of
scoring and choosing, is paid by sparse steps alone. Both prices are one number in the published form. In the other c₀
grows with the rows of the batch, because linear layers multiply more rows; c₁ grows with all scored blocks, because
scores are written and read beside the summaries, and with those of one row, because one program chooses from one list.
Measured steps are documents of scripts/bench_decode.py. A step is fitted as one layer's share of it, so that steps of
fewer layers can stand beside those of all.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from dsv4.cost_model import gqa
from dsv4.cost_model.csa import FINDING
from dsv4.cost_model.defaults import flash
from dsv4.cost_model.fit import CostModel, Quality, fit_steps
from dsv4.cost_model.rows import Measured
from dsv4.cost_model.step import step_parts, weights_read
from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy, dense
from dsv4.loaders.expected import preset
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.dummy import config_of, tensors_of_geometry
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.model.numerics import numerics_named
from dsv4.model.spec import LayerKind

HELD_OUT = 0.022  # relative error of a step that was left out of the fit, as published


@dataclass(frozen=True)
class Step:
    """A measured step. share: one layer's share of its bytes and seconds; policy: of a GQA model; parts: bytes of the
    whole step by part, empty where only their sum is known."""

    share: Measured
    layers: int
    policy: Policy | None
    parts: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.share.seconds * self.layers

    @property
    def bytes(self) -> float:
        return self.share.bytes * self.layers

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, context, layers): dense and sparse steps of one shape are compared."""
        return self.share.batch, self.share.context, self.layers

    @property
    def name(self) -> str:
        return f"{self.share.policy} B{self.share.batch} {self.share.context}"

    def predicted(self, costs: CostModel) -> float:
        return costs.predict(self.share) * self.layers


@dataclass(frozen=True)
class MeasuredSteps:
    """The steps of one document. kind: of the source in reports of `dsv4 regime`; layers, weights: of the whole model,
    and bytes of weights that its step reads; held: bytes of all weights; read, copy: bytes/s of a large read and copy,
    measured in that run; heads: of a GQA model's layers."""

    kind: str
    geometry: str
    device: str
    command: str
    commit: str
    layers: int
    weights: int
    held: int
    read: float
    copy: float
    steps: tuple[Step, ...]
    heads: gqa.Geometry | None = None

    def fit(self, constant: bool = True, leave: Callable[[Step], bool] = lambda step: False) -> CostModel:
        """The cost model of the steps that `leave` does not name."""
        return fit_steps([s.share for s in self.steps if not leave(s)], constant)


def steps_of(document: object) -> MeasuredSteps:
    """The steps of a document that scripts/bench_decode.py wrote. Raises InputError for any other."""
    try:
        assert isinstance(document, dict)
        setup, machine, about = document["setup"], document["machine"], document["about"]
        make = _grouped if "pairs" in document else _latent
        kind, name, heads, layers, weights, steps = make(document)
        whole = kind, name, about["device"], about["command"], about["commit"], layers, weights
        rates = machine["bandwidth"], machine["copy"]
        return MeasuredSteps(*whole, setup["weight_bytes"], *rates, tuple(steps), heads)
    except (KeyError, TypeError, AssertionError, ValueError) as error:
        raise InputError(
            f"no measured decode steps were found ({type(error).__name__}: {error}); expected the JSON that "
            "scripts/bench_decode.py writes"
        ) from None


def _grouped(document: dict) -> tuple[str, str, gqa.Geometry, int, int, list[Step]]:
    """Dense steps of a GQA model, and those of policies, which choose in every layer."""
    setup, found = document["setup"], []
    name = setup["geometry"]
    if name not in GEOMETRIES:
        raise ValueError(f"geometry {name!r}; expected {', '.join(GEOMETRIES)}")
    policies = {p.name: p for p in map(_policy, setup.get("ways") or [setup["attention"]])}
    numerics = numerics_named(setup["numerics"])
    heads = gqa.Geometry.of(config_of(name), numerics)
    for pair in document["pairs"]:
        for p in pair["points"]:
            policy = _policy(p["policy"]) if p.get("policy") else policies.get(p["attention"], dense())
            config, tensors = config_of(name, p["layers"]), tensors_of_geometry(name, p["layers"])
            parts = step_parts(config, numerics, tensors, p["batch"], p["context"], policy)
            searched = 0 if policy.dense else gqa.searched(heads, policy, p["batch"], p["context"])
            finding = None if policy.dense else gqa.finding(policy)
            found.append(_step(p, sum(parts.values()), policy, finding, searched, parts))
    tensors = tensors_of_geometry(name)
    one = sum(weights_read(tensors, config_of(name)).values())
    return "gqa", name, heads, GEOMETRIES[name]["num_hidden_layers"], one, found


def _policy(document: dict) -> Policy:
    """The policy of an attention's document, or of its `policy`."""
    given = document.get("policy") or document
    if given["name"] == "dense":
        return dense()
    if "retention" in given:
        raise ValueError(f"steps of {given['name']}, which keeps single tokens and has no price of finding")
    return Policy(**{k: v for k, v in given.items() if k not in ("kept_blocks", "kept_tokens")})


def _latent(document: dict) -> tuple[str, str, None, int, int, list[Step]]:
    """Steps of a DeepSeek-V4 model: all search, in their CSA layers. Bytes are those of the document, whose routed
    experts are those that the batch's tokens reach on average."""
    setup, found = document["setup"], []
    name = setup["preset"].lower()
    raw = preset(name)
    if raw is None:
        raise ValueError(f"preset {setup['preset']!r}; expected Flash or Pro")
    config = ModelConfig.from_official(raw)
    for p in document["points"]:
        seen = [layer.kind for layer in config.layers[: p["layers"]]]
        entries = p["context"] // 4
        searched = p["batch"] * entries if entries > config.index_topk else 0
        share = searched * seen.count(LayerKind.CSA) / p["layers"]
        found.append(_step(p, p["bytes"], None, FINDING, share, {}))
    return "csa", name, None, config.num_hidden_layers, flash().weights if name == "flash" else 0, found


def _step(p: dict, nbytes: float, policy: Policy | None, finding: str | None, searched: float, parts: dict) -> Step:
    """searched: items of one layer's share."""
    layers = p["layers"]
    name = finding if policy is None else "dense" if policy.dense else f"{policy.name}, {policy.kept} blocks"
    is_dense = policy is not None and policy.dense
    seconds = p["step_ms"] * 1e-3 / layers
    row = Measured(name, p["batch"], p["context"], nbytes / layers, is_dense, finding, searched, False, seconds)
    return Step(row, layers, policy, parts)


# ---- what is left out -----------------------------------------------------------------------

LEAVES: dict[str, Callable[[Step], Hashable]] = {
    "one step": lambda s: (s.share.policy, s.shape),
    "one length": lambda s: s.share.context,
}


def left_out(found: MeasuredSteps, constant: bool, key: Callable[[Step], Hashable]) -> list[float | None]:
    """The seconds that are predicted of each step by a fit without all steps of its key; None where the others
    determine no cost model, or no price of its finding."""
    predicted = []
    for step in found.steps:
        try:
            predicted.append(step.predicted(found.fit(constant, lambda s: key(s) == key(step))))
        except InputError:
            predicted.append(None)
    return predicted


def residuals(found: MeasuredSteps, constant: bool) -> dict:
    """A fit, its errors by step (predicted / measured − 1; positive: predicted too long), and its quality, of the
    fitted steps and of those that were left out in turn."""
    costs = found.fit(constant)
    outs = {name: left_out(found, constant, key) for name, key in LEAVES.items()}
    rows = []
    for i, s in enumerate(found.steps):
        error = lambda predicted, s=s: None if predicted is None else predicted / s.seconds - 1
        rows.append(
            {
                "policy": s.share.policy,
                "batch": s.share.batch,
                "context": s.share.context,
                "layers": s.layers,
                "bytes": round(s.bytes),
                "parts": dict(s.parts),
                "seconds": s.seconds,
                "predicted": s.predicted(costs),
                "error": error(s.predicted(costs)),
                "left_out": {name: error(predicted[i]) for name, predicted in outs.items()},
            }
        )
    quality = {"fitted": _quality(found, [s.predicted(costs) for s in found.steps])}
    quality |= {f"without {name}": _quality(found, predicted) for name, predicted in outs.items()}
    return {"constant": constant, "bill": costs, "rows": rows, "quality": quality}


def _quality(found: MeasuredSteps, predicted: Sequence[float | None]) -> dict | None:
    """Errors of the steps that were predicted, and how many were not; None if none was."""
    pairs = [(s, p) for s, p in zip(found.steps, predicted) if p is not None]
    if not pairs:
        return None
    of = Quality.of([s.share for s, _ in pairs], [p / s.layers for s, p in pairs])
    return {
        "rows": of.rows,
        "undetermined": len(predicted) - of.rows,
        "median_error": of.median_error,
        "worst_error": of.worst_error,
        "worst": of.worst,
    }


def ratios(found: MeasuredSteps, seconds: Callable[[Step], float]) -> list[dict]:
    """How many times faster than dense each sparse step was, and is by `seconds`, the cost model's of a step. Steps
    without a dense one of their shape are left out."""
    whole = {s.shape: s for s in found.steps if s.share.dense}
    rows = []
    for s in found.steps:
        if s.share.dense or s.shape not in whole:
            continue
        measured, said = whole[s.shape].seconds / s.seconds, seconds(whole[s.shape]) / seconds(s)
        rows.append(
            {
                "policy": s.share.policy,
                "batch": s.share.batch,
                "context": s.share.context,
                "layers": s.layers,
                "measured": measured,
                "map": said,
                "error": said / measured - 1,
            }
        )
    return rows
