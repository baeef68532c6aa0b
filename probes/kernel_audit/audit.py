"""One kernel through all clauses: what `dsv4 kernel audit` runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from dsv4.kernels.contract import Contract
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.quantize.kept import keeping
from dsv4.kernels.widths import WIDTHS
from dsv4.probes.kernel_audit.acceptance import Truth
from dsv4.probes.kernel_audit.adapters import adapter, conventions
from dsv4.probes.kernel_audit.clauses import ORDER, clause
from dsv4.probes.kernel_audit.diagnosis import explained
from dsv4.probes.kernel_audit.errors import KernelAuditError, SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.scene import Scene, not_run
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.kernel_audit.worker import Worker
from dsv4.probes.report.waivers import Waiver
from dsv4.probes.result import Check, Status


@dataclass
class KernelAudit:
    """Result of one audit: checks by clause, and how they came about. waivers: what is accepted, each for a reason."""

    spec: SubjectSpec
    contract: Contract
    shapes: str
    accuracy: str
    seed: int
    checks: list[Check] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    repeats: int = 0
    looks_like: list[str] = field(default_factory=list)
    waivers: tuple[Waiver, ...] = ()
    case: str = ""
    truths: list[Truth] = field(default_factory=list)  # of the cases that were asked for
    wrong: list[tuple[Truth, list]] = field(default_factory=list)  # and what was returned where the gate failed

    @property
    def verdict(self) -> str:
        """FAIL, ERROR, VACUOUS, PASS, or 'PASS, limited' where a clause or a case was not run."""
        waived = [check for check, _ in self.waived]
        asked = [c for c in self.checks if c.name != "not run" and c not in waived]
        if any(c.status is Status.FAIL for c in asked):
            return "FAIL"
        if any(c.status is Status.ERROR for c in asked):
            return "ERROR"
        gate = [c for c in asked if c.part == "gate"]
        if not gate or any(c.status is Status.VACUOUS for c in gate):
            return "VACUOUS"
        if all(c.status is Status.WARN for c in gate):
            return "ERROR"
        refused = any(c.status is Status.WARN for c in asked)
        fewer = {c.part for c in asked} < set(ORDER) or len(asked) < len(self.checks) or self.skipped or self.case
        return "PASS, limited" if fewer or refused or waived else "PASS"

    @property
    def findings(self) -> list[Check]:
        """Checks that failed and are not waived, in the order of the clauses."""
        waived = [check for check, _ in self.waived]
        return [c for c in _failed(self.checks) if c not in waived]

    @property
    def waived(self) -> list[tuple[Check, str]]:
        """Checks that failed and that a waiver covers, with its reason."""
        why = lambda c: next((w.reason for w in self.waivers if w.covers(c.part, c.name, c.where)), None)
        return [(c, reason) for c in _failed(self.checks) if (reason := why(c)) is not None]

    @property
    def caught(self) -> list[str]:
        """Clauses with a finding."""
        return list(dict.fromkeys(c.part for c in self.findings))


def _failed(checks: list[Check]) -> list[Check]:
    return [c for c in checks if c.status in (Status.FAIL, Status.ERROR) and c.name != "not run"]


def audit_kernel(
    spec: SubjectSpec,
    shapes: str = "small",
    seed: int = 0,
    budget: float = float("inf"),
    dtypes: tuple[torch.dtype, ...] | None = None,
    only: tuple[str, ...] = ORDER,
    takes: Callable | None = None,
    repeats: int | None = None,
    said: Callable[[str], None] = lambda _: None,
    limit: float = 60.0,
    waivers: tuple[Waiver, ...] = (),
    case: str = "",
) -> KernelAudit:
    """Run the clauses `only` on one kernel, at most `budget` seconds: what is left then is said to be not run.

    said: told each clause as it begins. case: as Scene has it. Raises SubjectFailed where the kernel cannot be loaded,
    KernelAuditError where no case has that name.
    """
    contract, start = contract_of(spec.operation), time.monotonic()
    spec, takes, prepared = _adapted(spec, takes)
    classes = dict.fromkeys(contract.default(dtype) for dtype in dtypes or contract.dtypes)
    audit = KernelAudit(spec, contract, shapes, spec.accuracy or " or ".join(classes), seed)
    repeats = repeats or (1000 if spec.device.startswith("cuda") else 20)
    audit.repeats, audit.waivers, audit.case = repeats, tuple(waivers), case
    found: list[Check] = []
    with Worker(spec, limit) as worker, keeping():
        worker.start()
        scene = Scene(
            *(contract, WIDTHS[shapes], spec.accuracy, spec.device, seed, worker, dtypes or contract.dtypes),
            *(start + budget, repeats, takes, prepared, case),
        )
        audit.skipped, audit.truths, audit.wrong = scene.skipped, scene.truths, scene.wrong
        for name in only:
            said(name)
            if scene.late and name != ORDER[0]:  # without the gate there would be no verdict
                audit.checks.append(not_run(name, f"the budget of {budget:.0f} s was spent"))
                continue
            # What one clause leaves behind is not the next one's finding. The import of a public kernel takes as long
            # as a clause, so that its process stays while nothing was found.
            if spec.convention == "dsv4" or _failed(found):
                worker.stop()
            found = list(clause(name)(scene))
            audit.checks += found or [not_run(name, "no case that the gate found right")]
    said("diagnosis")
    audit.looks_like = explained(scene.wrong)
    audit.seconds = time.monotonic() - start
    return audit


def _adapted(spec: SubjectSpec, takes: Callable | None) -> tuple[SubjectSpec, Callable | None, tuple[str, ...]]:
    """What an adapter says of itself: its accuracy class where none was asked for, which cases it takes, and which
    arguments it prepares."""
    if spec.given:
        if spec.convention == "dsv4":
            return spec, takes, ()
        if spec.convention not in conventions(spec.operation):
            known = ", ".join(conventions(spec.operation))
            raise KernelAuditError(f"--convention is {spec.convention!r}; expected one of {known} for {spec.operation}")
        found = adapter(spec.convention, spec.operation)
        return replace(spec, accuracy=spec.accuracy or found.accuracy), takes or found.takes, found.prepared
    found = adapter(spec.kernel, spec.operation)
    spec = replace(spec, accuracy=spec.accuracy or found.accuracy, convention=found.name)
    return spec, takes or found.takes, found.prepared


__all__ = ["KernelAudit", "SubjectDied", "SubjectFailed", "audit_kernel"]
