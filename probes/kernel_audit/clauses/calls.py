"""Later calls: the hundredth, with changed contents at the same addresses, with the same contents at others."""

from collections.abc import Iterator

import torch

from dsv4.kernels.contract import tensors
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import bits, raw
from dsv4.probes.kernel_audit.scene import Scene, check, held, not_run
from dsv4.probes.result import Check

COUNT = 130


def many(harness, arguments, templates, count: int, looks: list[int]):
    """(results of some of `count` calls, bytes of device memory that the later half of them took and kept)."""
    fresh, found, memory = harness.fresh(arguments), [], lambda: 0
    if harness.device.type == "cuda":
        memory = torch.cuda.memory_allocated
    half = 0
    for i in range(count):
        if i == count // 2:
            results = None
            half = memory()
        results = harness.call(fresh(), templates)
        if i in looks:
            found.append(raw(results))
    results = None
    return found, memory() - half


def overwritten(harness, first, second, templates):
    """(results of `second` written over `first`'s addresses after calls of it, whether new addresses give the same
    bits)."""
    placed = harness.place(first)
    for _ in range(3):  # what it writes in its arguments is overwritten below
        harness.call(placed, templates)
    new = harness.place(second)
    for to, of in zip(tensors(placed), tensors(new)):
        to.copy_(of)
    placed = tuple(_numbers(a, b) for a, b in zip(placed, new))
    mine = raw(harness.call(placed, templates))
    other = harness.steady(lambda: harness.place(second), templates)
    return mine, other is None or other == bits(harness.ordered(mine))


def _numbers(a, b):
    """`b` where it is a number, else `a`, whose memory holds b's contents."""
    return a if any(True for _ in tensors(a)) else b


def run(scene: Scene) -> Iterator[Check]:
    """The smallest of a few cases, and pairs of cases of the same shapes."""
    cases = scene.few(3)
    if not cases:
        yield not_run("calls", "the gate found no case right")
        return
    truth = min(cases, key=lambda t: sum(x.numel() for x in tensors(t.case.arguments)))
    looks = [3, 10, 11, 30, 64, 65, 100, COUNT - 1]
    statement, where = f"results of later calls of {COUNT} are right", scene.label(truth)
    try:
        found, grown = scene.worker.ask(many, truth.case.arguments, scene.templates(truth), COUNT, looks)
        worst = max((truth.judge(f) for f in found), key=lambda j: j.ratio)
        yield check("calls", statement, where, worst)
        if scene.device.startswith("cuda"):
            yield held("calls", "memory does not grow with calls", where, grown <= 0, f"{grown} bytes were kept")
    except (SubjectFailed, SubjectDied) as error:
        yield held("calls", statement, where, False, str(error))
    for truth in cases:
        yield from _replaced(scene, truth)


def _replaced(scene: Scene, truth) -> Iterator[Check]:
    other = scene.other(truth)
    where = scene.label(truth)
    shapes = lambda t: [(x.shape, x.stride(), x.dtype) for x in tensors(t.case.arguments)]
    if other is None or shapes(other) != shapes(truth):
        return
    statement = "new contents at the addresses of earlier ones give their own results"
    try:
        found, same = scene.worker.ask(overwritten, truth.case.arguments, other.case.arguments, scene.templates(truth))
    except (SubjectFailed, SubjectDied) as error:
        yield held("calls", statement, where, False, str(error))
        return
    yield check("calls", statement, where, other.judge(found))
    yield held("calls", "the same contents at other addresses give the same bits", where, same, "they differ")
