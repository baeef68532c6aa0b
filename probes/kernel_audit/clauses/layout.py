"""Strides, offsets and addresses; and no queries at all.

A kernel may refuse a layout by raising; a wrong result is a finding.
"""

from collections.abc import Iterator

import torch

from dsv4.kernels.contract import rebuilt
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, held, not_run
from dsv4.probes.result import Check, Status


def asked(scene: Scene, clause: str, statement: str, truth, function, *more):
    """(answer, None) of one question about a case, or (None, the check that says how it failed)."""
    try:
        return scene.worker.ask(function, truth.case.arguments, scene.templates(truth), *more), None
    except (SubjectFailed, SubjectDied) as error:
        return None, held(clause, statement, scene.label(truth), False, str(error))


def shifted(t: torch.Tensor, elements: int, device) -> torch.Tensor:
    """The same values `elements` behind the start of a buffer, which is aligned."""
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride())) if t.numel() else 0
    buffer = torch.zeros(size + elements, dtype=t.dtype, device=device)
    return buffer.as_strided(t.shape, t.stride(), elements).copy_(t)


def spaced(t: torch.Tensor, device) -> torch.Tensor:
    """The same values with a gap behind each row of the last axis."""
    if t.ndim < 2:
        return t.to(device)
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), 1, dtype=t.dtype, device=device)
    return wide[..., : t.shape[-1]].copy_(t)


def swapped(t: torch.Tensor, device) -> torch.Tensor:
    """The same values with the first two axes exchanged in memory."""
    if t.ndim < 2:
        return t.to(device)
    return t.transpose(0, 1).contiguous().to(device).clone().transpose(0, 1)


HOW = {
    "4 bytes off": lambda t, d: shifted(t, max(1, 4 // t.element_size()), d),
    "8 bytes off": lambda t, d: shifted(t, max(1, 8 // t.element_size()), d),
    "a gap behind each row": spaced,
    "the first two axes exchanged": swapped,
}


def laid_out(harness, arguments, templates, how: str, which: int):
    """Results of a call with argument `which` laid out otherwise."""
    placed = list(harness.place(arguments))
    placed[which] = rebuilt(arguments[which], lambda t: HOW[how](t, harness.device))
    return raw(harness.call(tuple(placed), templates))


def run(scene: Scene) -> Iterator[Check]:
    """Every plain tensor argument in turn, in every layout. Pools and weights keep their layouts, which are formats."""
    for truth in scene.few(2):
        for i, spec in enumerate(scene.contract.arguments):
            value = truth.case.arguments[i]
            if not isinstance(value, torch.Tensor) or i in scene.contract.written or scene.late:
                continue
            for how in HOW:
                yield _one(scene, truth, i, spec.name, how)


def _one(scene: Scene, truth, i: int, name: str, how: str) -> Check:
    statement, where = f"the result is right with {name} laid out with {how}", scene.label(truth)
    try:
        arguments = truth.case.arguments, scene.templates(truth), how, i
        return scene.judge("layout", statement, truth, laid_out, *arguments)
    except SubjectFailed as error:
        return Check(statement, Status.PASS, where, "layout", samples=1, note=f"refused: {error}")
    except SubjectDied as error:
        return held("layout", statement, where, False, str(error))


def cut(harness, arguments, templates, axes: dict):
    """Results of a call without queries."""
    names = [a.name for a in harness.contract.arguments]
    some = tuple(
        rebuilt(a, lambda t, n=n: t.narrow(axes[n], 0, 0)) if n in axes and isinstance(a, torch.Tensor) else a
        for n, a in zip(names, arguments)
    )
    return [list(t.shape) for t in raw(harness.call(harness.place(some), templates))]


def empty(scene: Scene) -> Iterator[Check]:
    """No queries: results of no rows, and no error."""
    axes, statement = dict(scene.contract.batch), "no queries give an empty result"
    plain = [t for t in scene.few(9) if _all_plain(scene, t)][:2]
    if not scene.contract.empty or not axes or not plain:
        yield not_run("empty", "the contract has no axis of queries, or no case of plain tensors was right")
        return
    for truth in plain:
        shapes, failure = None, None
        templates = scene.templates(truth, 0)
        try:
            shapes = scene.worker.ask(cut, truth.case.arguments, templates, axes)
        except (SubjectFailed, SubjectDied) as error:
            failure = held("empty", statement, scene.label(truth), False, str(error))
        wanted = [[0, *t.shape[1:]] for t in truth.exact]
        yield failure or held(
            "empty", statement, scene.label(truth), shapes == wanted, f"shapes {shapes}, expected {wanted}"
        )


def _all_plain(scene: Scene, truth) -> bool:
    """Whether every argument that has queries is a tensor."""
    names = [a.name for a in scene.contract.arguments]
    values = dict(zip(names, truth.case.arguments))
    return all(values[n] is None or isinstance(values[n], torch.Tensor) for n in scene.contract.batch)
