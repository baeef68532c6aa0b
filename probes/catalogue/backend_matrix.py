"""P10: every operation of the subject's backend against the reference, at the model's own widths. See
backend_matrix.md."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.errors import BackendUnavailable
from dsv4.kernels.staging import SlotTable
from dsv4.model.numerics import Numerics
from dsv4.probes.kernel_audit.acceptance import Truth
from dsv4.probes.kernel_audit.harness import placed, results_of, taken
from dsv4.probes.kernel_audit.scene import LIMIT
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.scenes.backend_cases import Case
from dsv4.probes.scenes.compile_ahead import compile_ahead
from dsv4.probes.scenes.contract_cases import cases_beside, truths
from dsv4.probes.subject import Subject

LIMITS = {  # dtype of the activations → (relative error of a result, why)
    torch.float32: (1e-5, "two fp32 implementations that sum in another order"),
    torch.bfloat16: (1e-2, "bf16 results: a sum beside a rounding boundary moves by a step of 2^−8"),
}
CODES = "nine values in ten, as a share of their row's size: one beside a boundary of FP8 or FP4 moves by a whole step"
OF_CODES = (
    1e-2,
    "sums of simulated FP8: a value beside a boundary moves by 6 %; without the simulation all do, by 2.6 % rms",
)
EXACT = "what is copied or encoded is defined bit for bit"


@dataclass(frozen=True)
class BackendMatrix(Probe):
    """What is the reference itself is listed, not compared: it would prove nothing. In the place of an operation that a
    user's kernel stands for, that kernel is compared."""

    name: ClassVar[str] = "backend_matrix"
    title: ClassVar[str] = "operations of the backend equal the reference"
    needs: ClassVar[frozenset[str]] = frozenset({"kernels"})

    def run(self, subject: Subject) -> list[Check]:
        checks, backend = [], subject.model.backend
        if subject.model.device.type == "cuda" and backend == "triton":
            dtypes = dtypes_of(subject.model.numerics)
            compile_ahead([subject.config], dtypes, backend, str(subject.model.device), self.seed)
        operations, compositions = subject.tables
        for name, op in operations.items():
            if name in subject.model.op.replaced:
                checks += self._users(subject, name, op.implementations["reference"])
                continue
            try:
                mine = op.resolve(backend)[0]
            except BackendUnavailable as error:
                checks.append(Check("the backend has the operation", Status.ERROR, part=name, note=str(error)))
                continue
            if mine is op.implementations["reference"]:
                checks.append(
                    Check(name, Status.PASS, "the reference itself", name, samples=1, source="nothing to compare")
                )
            else:
                checks += self._cases(subject, name, mine, op.implementations["reference"])
        reference = bind(operations, "reference", DispatchLedger())
        for name, composition in compositions.items():
            if name not in subject.compositions:
                checks.append(
                    Check(
                        name,
                        Status.PASS,
                        "its operations, one after another",
                        name,
                        samples=1,
                        source="nothing to compare",
                    )
                )
                continue
            parts = lambda *arguments, default=composition.default: default(reference, *arguments)
            checks += self._cases(subject, name, subject.compositions[name], parts)
        return checks

    def _users(self, subject: Subject, name: str, reference: Callable) -> list[Check]:
        """Of the kernel that stands for operation `name`, which the note names."""
        kernel = subject.model.op.replaced[name]
        found = self._cases(subject, name, kernel, reference)
        return [replace(c, note="; ".join(filter(None, (f"kernel {kernel.shown}", c.note)))) for c in found]

    def _cases(self, subject: Subject, name: str, mine: Callable, wanted: Callable) -> list[Check]:
        """Activations in fp32, and in bf16 where the subject's are: cases of the contract against fp64, as
        `dsv4 kernel audit` judges them, most of them in the subject's own dtype; and those beside it against the
        reference."""
        found, device, own = [], subject.model.device, subject.model.numerics.activation
        for dtype in dtypes_of(subject.model.numerics):
            given = name, subject.config, dtype, self.seed
            found += [judged(name, mine, truth, dtype, device) for truth in truths(*given, own)]
            found += [compared(name, mine, wanted, case, dtype, device) for case in cases_beside(*given)]
        return found or [self._without_inputs(subject, name)]

    def _without_inputs(self, subject: Subject, name: str) -> Check:
        """What is said of an operation of which there is no case."""
        return Check(name, Status.ERROR, part=name, note=f"backend_matrix has no inputs for {name}")


def judged(name: str, mine: Callable, truth: Truth, dtype: torch.dtype, device: torch.device) -> Check:
    """One call on `device`, of the arguments that the function takes, against fp64."""
    where = f"{truth.case.family}, {truth.case.label}, {str(dtype).removeprefix('torch.')}"
    try:
        arguments = placed(truth.case.arguments[: taken(mine, truth.contract, False)], device)
        returned = mine(*arguments)
        found = [None if t is None else t.cpu() for t in results_of(truth.contract, returned, arguments)]
    except Exception as error:  # an implementation under audit may raise anything
        note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Check("the operation takes these inputs", Status.ERROR, where, name, note=note)
    verdict = truth.judge(found)
    if verdict.what in ("shape and dtype", "results"):
        return compare(
            f"{name}: dtypes and shapes", verdict.place, "==", "the contract's", "", 1, where=where, part=name
        )
    about = dict(where=where, part=name, unit="× limit", found=verdict.place if verdict.ratio > 1 else "")
    count = sum(t.numel() for t in truth.exact)
    return compare(f"{name} against fp64", float(f"{verdict.ratio:.3g}"), "<=", 1.0, LIMIT, count, **about)


def dtypes_of(numerics: Numerics) -> tuple[torch.dtype, ...]:
    """fp32, and what activations are held in."""
    return tuple(dict.fromkeys((torch.float32, numerics.activation)))


def compared(
    name: str, mine: Callable, reference: Callable, case: Case, dtype: torch.dtype, device: torch.device
) -> Check:
    """One call on `device` against the reference's in host memory."""
    try:
        found, wanted = results(mine, case, device), results(reference, case, torch.device("cpu"))
    except Exception as error:  # an implementation under audit may raise anything
        note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Check("the operation takes these inputs", Status.ERROR, case.label, name, note=note)
    count = sum(t.numel() for t in wanted)
    if len(found) != len(wanted) or any(a.shape != b.shape or a.dtype is not b.dtype for a, b in zip(found, wanted)):
        said = [" and ".join(f"{t.dtype} {list(t.shape)}" for t in side) for side in (found, wanted)]
        return compare(
            f"{name}: dtypes and shapes",
            said[0],
            "==",
            said[1],
            "the reference is the definition",
            count,
            where=case.label,
            part=name,
        )
    if case.rule == "bits":
        wrong = sum(differing(a, b) for a, b in zip(found, wanted))
        return compare(
            f"{name}: numbers that are not the same bits", wrong, "==", 0, EXACT, count, where=case.label, part=name
        )
    limit, why = OF_CODES if case.rule == "of codes" else LIMITS[dtype]
    far, why = (most_of, CODES) if case.rule == "codes" else (error_of, why)
    return compare(
        name, max(map(far, found, wanted), default=0.0), "<=", limit, why, count, where=case.label, part=name
    )


def results(function: Callable, case: Case, device: torch.device) -> list[torch.Tensor]:
    """What the function returns and what it writes, in host memory; its arguments are copies on `device`."""
    arguments = placed(case.arguments, device)
    returned = function(*arguments)
    return [t.cpu() for value in (returned, *(arguments[place] for place in case.written)) for t in flat(value)]


def flat(value) -> list[torch.Tensor]:
    """Tensors of a result, or of what was written, in tuples or not; None for nothing; of a table what both sides
    define."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedRows):
        return [value.data]
    if isinstance(value, SlotTable):
        value = value.state
    return [] if value is None else [tensor for part in value for tensor in flat(part)]


def differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Numbers of other bits; any NaN is any other."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    same = found.contiguous().view(bits) == wanted.contiguous().view(bits)
    return int((~(same | found.isnan() & wanted.isnan()) if wanted.is_floating_point() else ~same).sum())


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; of indices how many differ, in any order; infinite where NaN, or −inf is
    elsewhere."""
    if not wanted.is_floating_point():
        return float((found.sort(-1).values != wanted.sort(-1).values).sum())
    if not torch.equal(torch.isinf(found), torch.isinf(wanted)) or torch.isnan(found).any():
        return float("inf")
    a, b = (torch.where(torch.isinf(v), 0, v).double() for v in (found, wanted))
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def most_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The error that nine values in ten stay below, as a share of the size of their row; infinite where NaN."""
    size = wanted.double().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
    errors = ((found.double() - wanted.double()).abs() / size).flatten().sort().values
    return float("inf") if errors.isnan().any() else errors[int(0.9 * (len(errors) - 1))].item()


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(BackendMatrix)
