"""`dsv4 kernel bench`: kernels of one operation against each other, each right at these shapes before it is timed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

import torch

from dsv4.kernels.contract import Case, tensors
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.drawing import Draw
from dsv4.kernels.widths import WIDTHS
from dsv4.probes.kernel_audit.acceptance import Judgement, Truth, truth_of
from dsv4.probes.kernel_audit.adapters import adapter
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.errors import KernelAuditError
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.kernel_audit.timed import answers, limits, race
from dsv4.probes.kernel_audit.worker import Worker
from dsv4.probes.report.waivers import Waiver

SUSPECT = 0.9  # share of the floor under which a time is not believed
BOOTSTRAPS = 400
NEEDED = "gate", "calls", "capture"  # clauses of the audit before a kernel is timed


@dataclass(frozen=True)
class Time:
    """One kernel on one row. verdict: 'right', 'SUSPECT …' or why it has no time; ratio: of the first kernel's time to
    this one's, with a 95 % interval; looked: timed replays whose results were looked at; unsteady: those of them whose
    results differ from those of the first. The ones that differ most were judged, and are within the limit."""

    kernel: str
    verdict: str
    cold_us: float | None = None
    hot_us: float | None = None
    share: float | None = None
    ratio: tuple[float, float, float] | None = None
    nodes: int | None = None
    looked: int = 0
    unsteady: int = 0


@dataclass(frozen=True)
class Row:
    """One case: floor in µs with its formula, and the times."""

    label: str
    bytes: int
    flops: int
    formula: str
    floor_us: float
    empty_us: float | None
    times: list[Time] = field(default_factory=list)


def bench_kernels(
    operation, kernels, shapes, device, seed, replays=30, said=lambda _: None, waivers=(), verdicts=None
) -> tuple[list[Row], dict, dict]:
    """(rows, what the device does, kernel → verdict of its audit). verdicts: those of audits that were made at these
    shapes on this device. Raises KernelAuditError."""
    contract = contract_of(operation)
    if not device.startswith("cuda"):
        raise KernelAuditError(f"kernels are timed by CUDA graphs, and the device is {device}; use --device cuda")
    specs = [_spec(operation, kernel, device) for kernel in kernels]
    verdicts = dict(verdicts or {})
    for spec in specs:
        if spec.kernel not in verdicts:
            said(f"audit of {spec.kernel}")
            verdicts[spec.kernel] = _verdict(spec, shapes, seed, waivers)
    draw, widths = (
        Draw(seed, torch.bfloat16 if torch.bfloat16 in contract.dtypes else contract.dtypes[0]),
        WIDTHS[shapes],
    )
    with Worker(specs[0], limit=600) as worker:
        found = worker.ask(limits)
        rows = []
        for case in contract.timed(widths, draw):
            said(case.label)
            rows.append(_row(contract, case, specs, verdicts, worker, found, replays))
    return rows, found, verdicts


def _spec(operation: str, kernel: str, device: str) -> SubjectSpec:
    spec = SubjectSpec(operation, kernel, device)
    return spec if spec.given else replace(spec, accuracy=adapter(kernel, operation).accuracy)


def _verdict(spec: SubjectSpec, shapes: str, seed: int, waivers: tuple[Waiver, ...]) -> str:
    try:
        return audit_kernel(spec, shapes, seed, only=NEEDED, waivers=waivers).verdict
    except KernelAuditError as error:
        return f"NOT RUN: {error}"


def _takes(spec: SubjectSpec, case: Case) -> str | None:
    return None if spec.given else adapter(spec.kernel, spec.operation).takes(case)


def _row(contract, case: Case, specs, verdicts, worker, device: dict, replays: int) -> Row:
    """Right on this case, then timed together with the others that are."""
    work = contract.work(*case.arguments)
    floor = max(work.bytes / device["bytes_per_s"], work.flops / device["flops_per_s"]) * 1e6
    why = {s.kernel: _takes(s, case) for s in specs}
    why |= {k: v for k, v in verdicts.items() if not v.startswith("PASS")}
    asked = [s for s in specs if not why.get(s.kernel)]
    truth = cache(lambda accuracy: truth_of(contract, case, accuracy))
    for spec, found in zip(asked, worker.ask(answers, asked, case.arguments)):
        why[spec.kernel] = _wrong(contract, case, spec, found, truth)
    ready = [s for s in asked if not why.get(s.kernel)]
    found = worker.ask(race, ready, case.arguments, replays) if ready else {"empty": None}
    first = next((i for i, s in enumerate(ready) if s.kernel == specs[0].kernel), None)
    times, names = [], [s.kernel for s in ready]
    for spec in specs:
        reason = why.get(spec.kernel)
        if reason:
            times.append(Time(spec.kernel, reason))
        else:
            i = names.index(spec.kernel)
            worst = max((_judge(contract, case, spec, r, truth) for r in found["judged"][i]), key=lambda j: j.ratio)
            times.append(_time(found, i, first, spec, floor, worst))
    return Row(case.label, work.bytes, work.flops, work.formula, floor, found["empty"], times)


def _wrong(contract, case: Case, spec: SubjectSpec, found, truth: Callable[[str], Truth]) -> str | None:
    """Why a kernel's results on a timed case are not right, None if they are. truth: of an accuracy class."""
    if isinstance(found, str):
        return found
    judgement = _judge(contract, case, spec, found, truth)
    return None if judgement.ratio <= 1 else f"wrong: {judgement.ratio:.3g} × limit at {judgement.place}"


def _judge(contract, case: Case, spec: SubjectSpec, found: list, truth: Callable[[str], Truth]) -> Judgement:
    """Results of a kernel on a timed case, by the accuracy class that it promises."""
    accuracy = spec.accuracy or contract.default(
        next(t.dtype for t in tensors(case.arguments) if t.is_floating_point())
    )
    return truth(accuracy).judge(found)


def _time(found: dict, i: int, first: int | None, spec: SubjectSpec, floor: float, worst: Judgement) -> Time:
    """worst: the worst judgement of the first replay and of those that wrote other bits."""
    cold, hot, nodes = median(found["cold"][i]), median(found["hot"][i]), found["nodes"][i]
    verdict, unsteady = "right", found["unlike"][i]
    if not worst.ratio <= 1:
        verdict, unsteady = f"SUSPECT: a replay's result is {worst.ratio:.3g} × limit at {worst.place}", 0
    elif nodes == 0:
        verdict = "SUSPECT: its graph is empty"
    elif cold < SUSPECT * floor:
        verdict = f"SUSPECT: {cold / floor:.2f} of the floor"
    ratio = None if first is None else ratio_of(found["cold"][first], found["cold"][i])
    share, looked = round(floor / cold, 3), found["looked"][i]
    return Time(spec.kernel, verdict, round(cold, 2), round(hot, 2), share, ratio, nodes, looked, unsteady)


def ratio_of(base: list[float], other: list[float]) -> tuple[float, float, float]:
    """Median of base/other over pairs of replays that lay beside each other, with a 95 % bootstrap interval: over 1,
    `other` is faster."""
    pairs = [a / b for a, b in zip(base, other)]
    draw = random.Random(0)
    spread = sorted(median(draw.choices(pairs, k=len(pairs))) for _ in range(BOOTSTRAPS))
    low, high = spread[int(0.025 * BOOTSTRAPS)], spread[int(0.975 * BOOTSTRAPS)]
    return round(median(pairs), 3), round(low, 3), round(high, 3)
