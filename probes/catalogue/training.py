"""Beside the catalogue: the training backend computes the model, and its operations have the right derivatives.

See training.md."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.probes.blame.consult import culprit
from dsv4.probes.catalogue.recorded import layer_checks
from dsv4.probes.compare import agreeing, oracle_of, token_errors, tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.scenes.control import chance_of
from dsv4.probes.scenes.training_cases import CASES, GradientCase
from dsv4.probes.subject import POINTS, Subject

VALUES = (1e-5, "fp32 against the definition in float64: short sums")
SLOPES = (1e-4, "fp32 against automatic differentiation of the definition in float64: sums over some hundred terms")
TOKENS = 300  # more than an HCA window, and entries for the indexer to choose among


@dataclass(frozen=True)
class Training(Probe):
    """A whole sequence, every point on the subject's own values before it; then each operation and its derivatives."""

    name: ClassVar[str] = "training"
    title: ClassVar[str] = "the training backend computes the model, and its derivatives are right"
    needs: ClassVar[frozenset[str]] = frozenset({"training", "files", "run"})
    reads: ClassVar[frozenset[str]] = frozenset(POINTS)

    def run(self, subject: Subject) -> list[Check]:
        T = min(max(TOKENS, 4 * (subject.config.index_topk + 2)), subject.config.max_position_embeddings)
        return [*self._forward(subject, T), *self._operations(subject)]

    def _forward(self, subject: Subject, T: int) -> Iterator[Check]:
        oracle, ids = oracle_of(subject), tokens(subject, T, self.seed)
        oracle.cache = None  # nothing is stored
        capture = subject.run(ids, (), tuple(POINTS))
        before = oracle.weights("embed.weight")[ids].unsqueeze(2).repeat(1, 1, oracle.config.hc_mult, 1)
        known: dict[str, tuple[str, str] | None] = {}
        for i in range(oracle.config.num_hidden_layers):
            points = {name: value for (layer, name), value in capture.points.items() if layer == i}
            yield from self._blamed(subject, i, layer_checks(subject, oracle, i, before, points, ids), known)
            before = points["streams"].double()
        wanted = oracle.head(before)
        value, source, limit = agreeing(token_errors(capture.logits, wanted), subject.numerics)
        chance = chance_of(wanted, token_errors)
        yield compare(
            "logits of the last streams", value, "<=", limit, source, T, where="head", part="head", chance=chance
        )

    def _blamed(self, subject: Subject, i: int, checks: list[Check], known: dict) -> Iterator[Check]:
        """Checks of a layer; where the output of a sublayer is wrong, the part is that of the module behind it.

        known: what was found of an output's first layer that is wrong; others are not taken apart again.
        """
        for check in checks:
            point = check.name.partition(" ")[0]
            if check.status is Status.FAIL and point in ("attn_out", "ffn_out"):
                if point not in known:
                    known[point] = culprit(subject, i, point, self.seed)
                part, why = known[point] or (check.part, check.note)
                check = replace(check, part=part, note=why)
            yield check

    def _operations(self, subject: Subject) -> Iterator[Check]:
        for name, make in CASES.items():
            function = subject.training_operations.get(name)
            if function is None:
                yield Check("the backend has the operation", Status.ERROR, part=name, note="it is not bound")
                continue
            for case in make(torch.Generator().manual_seed(self.seed)):
                yield from derived(name, function, case, subject.model.device)


def derived(name: str, function, case: GradientCase, device: torch.device) -> Iterator[Check]:
    """Values, and derivatives by every tensor that the operation is differentiable by."""
    about = dict(where=case.label, part=name, unit="relative")
    try:
        found, slopes = differentiated(lambda leaves: case.call(function, leaves), case, torch.float32, device)
    except Exception as error:  # an implementation under audit may raise anything
        note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield Check("the operation can be differentiated", Status.ERROR, case.label, name, note=note)
        return
    wanted, right = differentiated(case.definition, case, torch.float64, torch.device("cpu"))
    limit, why = VALUES
    count = sum(t.numel() for t in wanted)
    yield compare(f"{name}: values", max(map(apart, found, wanted)), "<=", limit, why, count, chance=1.0, **about)
    limit, why = SLOPES
    for leaf, slope in right.items():
        yield compare(
            f"{name}: derivative by {leaf}",
            apart(slopes[leaf], slope),
            "<=",
            limit,
            why,
            slope.numel(),
            chance=1.0,
            **about,
        )


def differentiated(run, case: GradientCase, dtype: torch.dtype, device: torch.device) -> tuple[list, dict]:
    """(results, gradient by leaf) of Σ result · weights, with the weights of the case."""
    with torch.enable_grad(), torch.inference_mode(False):
        leaves = {k: v.to(device, dtype, copy=True).requires_grad_() for k, v in case.leaves.items()}
        results = run(leaves)
        g = torch.Generator().manual_seed(1)
        weights = [torch.randn(r.shape, generator=g).to(device, dtype) for r in results]
        sum((r.to(dtype) * w).sum() for r, w in zip(results, weights)).backward()
    slopes = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
    return [r.detach().cpu() for r in results], {k: v.cpu() for k, v in slopes.items()}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖, infinite where NaN or of another shape; −inf counts where only one side has it."""
    if found.shape != wanted.shape:
        return float("inf")
    hidden = torch.isinf(wanted)
    if not torch.equal(torch.isinf(found), hidden):
        return float("inf")
    a, b = found.double().masked_fill(hidden, 0), wanted.double().masked_fill(hidden, 0)
    error = ((a - b).norm() / b.norm().clamp(min=1e-12)).item()
    return error if error == error else float("inf")


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Training)
