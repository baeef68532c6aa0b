"""What the clauses of an audit share: the contract's cases with their truths, the subject's process, the clock."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dsv4.kernels.contract import Case, Contract, rebuilt
from dsv4.kernels.drawing import Draw
from dsv4.probes.kernel_audit.acceptance import Judgement, Truth, truth_of
from dsv4.probes.kernel_audit.errors import KernelAuditError
from dsv4.probes.kernel_audit.worker import Worker
from dsv4.probes.result import Check, Status, vacuous

LIMIT = "4 (fp32: 16) · max(d0 of nine rows in ten, d0 of the row, half an ulp); elements twice that factor"


@dataclass
class Scene:
    """One audit of one kernel. takes: case → why the kernel cannot be asked for it, or None (adapters of kernels that
    are made for some layouts alone). prepared: arguments that an adapter reads once, before its calls. case: only cases
    with this text in their label, or with whose label it begins; '' for all. Raises KernelAuditError for no case."""

    contract: Contract
    widths: object
    accuracy: str
    device: str
    seed: int
    worker: Worker
    dtypes: tuple[torch.dtype, ...]
    deadline: float = float("inf")
    repeats: int = 20
    takes: Callable | None = None
    prepared: tuple[str, ...] = ()
    case: str = ""
    truths: list[Truth] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    judged: dict[int, Judgement] = field(default_factory=dict)
    wrong: list[tuple[Truth, list]] = field(default_factory=list)

    def __post_init__(self):
        for dtype in self.dtypes:
            for case in self._cases(self.seed, dtype):
                why = self.takes(case) if self.takes else None
                if why:
                    self.skipped[self._label(case, dtype)] = why
                else:
                    self.truths.append(truth_of(self.contract, case, self.accuracy or self.contract.default(dtype)))
        if self.case and not self.truths and not self.skipped:
            raise KernelAuditError(
                f"no case of {self.contract.operation} has {self.case!r} in its name; a report of dsv4 kernel audit "
                "names them"
            )

    def _cases(self, seed: int, dtype: torch.dtype) -> Iterator[Case]:
        """The contract's cases of a seed that are asked for."""
        for case in self.contract.cases(self.widths, Draw(seed, dtype)):
            label = self._label(case, dtype)
            if self.case in label or self.case.startswith(label):
                yield case

    def _label(self, case, dtype) -> str:
        return f"{case.family}, {case.label}, {str(dtype)[6:]}"

    def label(self, truth: Truth) -> str:
        """'pointed, 8 queries, packed, bfloat16'."""
        return self._label(truth.case, activation_of(truth))

    @cached_property
    def others(self) -> dict[int, Truth]:
        """For each case the same case of another seed, by its number; made when a clause asks."""
        found: dict[int, Truth] = {}
        for dtype in self.dtypes:
            cases = self._cases(self.seed + 1, dtype)
            kept = [i for i, t in enumerate(self.truths) if activation_of(t) is dtype]
            fits = [case for case in cases if not (self.takes and self.takes(case))]
            accuracy = self.accuracy or self.contract.default(dtype)
            found |= {i: truth_of(self.contract, case, accuracy) for i, case in zip(kept, fits)}
        return found

    @property
    def late(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.deadline

    def few(self, count: int = 2, right: bool = True) -> list[Truth]:
        """Some cases that the gate found right; without `right`, of those that were answered where none is right: for
        clauses that compare bits with bits."""
        answered = sorted(self.judged, key=lambda i: self.judged[i].ratio > 1)
        good = [i for i in answered if self.judged[i].ratio <= 1]
        chosen = [self.truths[i] for i in (good if good or right else answered)]
        chosen.sort(key=lambda t: t.case.family not in ("random", "pointed"))
        return chosen[:: max(1, len(chosen) // count)][:count] if chosen else []

    def judge(self, clause: str, statement: str, truth: Truth, function, *arguments, where: str = "") -> Check:
        """The check of one answer of `function(harness, *arguments)`. A wrong one is asked for again in a new process:
        right there, it is a fault of `state`."""
        where = where or self.label(truth)
        found = self.worker.ask(function, *arguments)
        judgement = truth.judge(found)
        if judgement.ratio > 1 and self.worker.asked > 1:
            self.worker.stop()
            found = self.worker.ask(function, *arguments)
            again = truth.judge(found)
            if again.ratio <= 1:
                return check("state", "what is right in a new process is right after other problems", where, judgement)
            judgement = again
        if judgement.ratio > 1 and clause == "gate":
            self.wrong.append((truth, found))
        return check(clause, statement, where, judgement)

    def other(self, truth: Truth) -> Truth | None:
        """The same case of another seed."""
        return self.others.get(next(i for i, t in enumerate(self.truths) if t is truth))

    def templates(self, truth: Truth, queries: int | None = None) -> list:
        """Shapes and dtypes of the results, or of those of so many queries."""
        shape = lambda t: tuple(t.shape) if queries is None else (queries, *t.shape[1:])
        return [(shape(t), t.dtype) for t in truth.honest]


def activation_of(truth: Truth) -> torch.dtype:
    """The dtype of activations of a case: that of the first argument which is one, fp32 where there is none."""
    for spec, value in zip(truth.contract.arguments, truth.case.arguments):
        if spec.dtype == "activation" and isinstance(value, torch.Tensor):
            return value.dtype
    return torch.float32


def check(clause: str, statement: str, where: str, judgement: Judgement, **about) -> Check:
    """PASS or FAIL of a judgement."""
    status = Status.PASS if judgement.ratio <= 1 else Status.FAIL
    measured = dict(measured=_short(judgement.ratio), relation="<=", threshold=1.0, unit="× limit", source=LIMIT)
    fields: dict[str, Any] = measured | about
    note = judgement.what if status is Status.FAIL else ""
    return Check(
        statement, status, where, clause, samples=1, note=note, found=judgement.place if note else "", **fields
    )


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def held(
    clause: str, statement: str, where: str, right: bool, note: str = "", samples: int = 1, source: str = ""
) -> Check:
    """PASS or FAIL of a statement."""
    status = Status.PASS if right else Status.FAIL
    return Check(statement, status, where, clause, samples=samples, note="" if right else note, source=source)


def not_run(clause: str, why: str) -> Check:
    """A clause that could not be asked."""
    return vacuous("not run", why, part=clause)


def with_poison(truth: Truth) -> tuple:
    """The arguments with NaN (bytes 255, the largest integer) wherever nothing may be read."""
    names = {a.name: i for i, a in enumerate(truth.contract.arguments)}
    arguments = list(truth.case.arguments)
    for name, mask in truth.case.unread.items():
        arguments[names[name]] = rebuilt(arguments[names[name]], lambda t: poisoned(t, mask))
    return tuple(arguments)


def poisoned(t: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """NaN where `mask`: byte 255 of one-byte types, which is NaN in E4M3 and E8M0, and the largest integer of
    others."""
    if t.element_size() == 1:
        raw = t.view(torch.uint8)
        return raw.masked_fill(_fitted(mask, raw), 255).view(t.dtype)
    value = float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max
    return t.masked_fill(_fitted(mask, t), value)


def _fitted(mask: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The mask [E, 1, 1] of a stack of matrices over the tensors of a packed weight, whose trailing axes differ."""
    while mask.ndim > t.ndim and mask.shape[-1] == 1:
        mask = mask.squeeze(-1)
    return mask.expand(t.shape)
