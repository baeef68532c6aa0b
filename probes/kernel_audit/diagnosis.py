"""What a wrong result looks like: the planted faults whose results it equals on every case that failed.

A plant is applied to our reference. A fault explains a case where the kernel's result is four times nearer to the
plant's than to fp64's, in every row, and within the limit of an honest kernel or two hundredths.
"""

from dataclasses import replace

import torch

from dsv4.kernels.contract import outcome, rebuilt
from dsv4.probes.kernel_audit.acceptance import Truth
from dsv4.probes.kernel_audit.plants import plants
from dsv4.probes.kernel_audit.subject import reference_of

MOST_CASES = 4
NEAR, NEARER = 2e-2, 0.25


def explained(wrong: list[tuple[Truth, list[torch.Tensor]]]) -> list[str]:
    """Names of planted faults that explain all of the first wrong results, the nearest first."""
    if not wrong:
        return []
    operation, cases = wrong[0][0].contract.operation, wrong[:MOST_CASES]
    found = {}
    for plant in plants():
        if plant.operation == operation and plant.clause == "gate":
            distances = [_distance(plant, truth, results) for truth, results in cases]
            if all(d is not None for d in distances):
                found[plant.name] = max(distances)
    return sorted(found, key=found.get)


def _distance(plant, truth: Truth, results: list[torch.Tensor]) -> float | None:
    """How far a result is from the plant's, as a relative L2; None where the plant does not explain it."""
    try:
        arguments = rebuilt(truth.case.arguments, torch.clone)
        returned = plant.make(reference_of(plant.operation))(*arguments)
    except Exception:  # a plant that fails on a case does not explain it
        return None
    made = tuple(outcome(truth.contract, returned, arguments))
    if len(made) != len(results) or any(m is None or m.shape != r.shape for m, r in zip(made, results)):
        return None
    if all(_equal(m, e.to(m.dtype)) for m, e in zip(made, truth.exact)):
        return None  # the plant changes nothing here
    errors = [_error(r, m) for r, m in zip(results, made)]
    own = [_error(r, e) for r, e in zip(results, truth.exact)]
    near = max(errors)
    if near <= NEARER * max(own) and (
        near <= NEAR or replace(truth, exact=made, honest=made).judge(results).ratio <= 1
    ):
        return near
    return None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a != a) & (b != b)).all())


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The worst relative L2 of a row; of indices the share that differ; infinite where NaN and infinity are
    elsewhere."""
    if not a.is_floating_point():
        return (a.sort(-1).values != b.sort(-1).values).double().mean().item()
    a, b = a.double(), b.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    a, b = torch.where(a.isfinite(), a, 0.0), torch.where(b.isfinite(), b, 0.0)
    a, b = (t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1) for t in (a, b))
    size = b.norm(dim=1)
    off = (a - b).norm(dim=1)
    return (off / size.clamp(min=1e-9 * max(1e-30, size.max().item()))).amax().item() if len(off) else 0.0
