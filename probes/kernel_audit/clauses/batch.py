"""A query's result does not depend on its neighbours: alone, in another place, beside neighbours of NaN."""

from collections.abc import Iterator

import torch

from dsv4.kernels.contract import rebuilt
from dsv4.probes.kernel_audit.acceptance import Judgement
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, check, held, not_run
from dsv4.probes.result import Check


def together(harness, sets, templates):
    """Results of several calls."""
    return [raw(harness.call(harness.place(a), t)) for a, t in zip(sets, templates)]


def _mapped(scene: Scene, truth, change) -> tuple:
    """The arguments with `change(tensor, axis)` applied to those that have queries."""
    names = [a.name for a in scene.contract.arguments]
    return tuple(
        rebuilt(a, lambda t, n=n: change(t, scene.contract.batch[n])) if n in scene.contract.batch else a
        for n, a in zip(names, truth.case.arguments)
    )


def _part(scene: Scene, truth, index: torch.Tensor) -> tuple:
    """The arguments of some of the queries of a case, in the order of `index`."""
    return _mapped(scene, truth, lambda t, axis: t.index_select(axis, index))


def _judged(truth, index: torch.Tensor, found: list[torch.Tensor]) -> Judgement:
    """Results of the queries `index` among honest results of all others: one query's own rounding, which may be small
    by luck, does not make its limit."""
    if [t.shape for t in found] != [(len(index), *t.shape[1:]) for t in truth.honest]:
        return Judgement(float("inf"), "shape", f"{[list(t.shape) for t in found]} of {len(index)} queries")
    if any(f.dtype is not h.dtype for f, h in zip(found, truth.honest)):
        return Judgement(float("inf"), "dtype", f"{[str(t.dtype)[6:] for t in found]}")
    return truth.judge([h.index_copy(0, index, f) for f, h in zip(found, truth.honest)])


def _neighbours(scene: Scene, truth, kept: int) -> tuple:
    """The arguments with NaN in every activation of the other queries."""

    def poison(t: torch.Tensor, axis: int) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        keep = t.select(axis, kept).clone()
        t = torch.full_like(t, float("nan"))
        t.select(axis, kept).copy_(keep)
        return t

    return _mapped(scene, truth, poison)


def run(scene: Scene) -> Iterator[Check]:
    """Each query of a few cases."""
    if not scene.contract.batch:
        yield not_run("batch", "the contract has no axis of queries")
        return
    asked = 0
    for truth in scene.few(3):
        n = truth.exact[0].shape[0]
        if n < 2 or any(o.argument is not None for o in scene.contract.outputs) or scene.late:
            continue
        asked += 1
        yield from _case(scene, truth, n)
    if not asked:
        yield not_run("batch", "no case that the gate found right has several queries")


def _case(scene: Scene, truth, n: int) -> Iterator[Check]:
    where, alone = scene.label(truth), "a query alone has the result that it has in the batch"
    parts = [torch.tensor([i]) for i in range(n)] + [torch.arange(n - 1, -1, -1)]
    sets = [_part(scene, truth, p) for p in parts] + [_neighbours(scene, truth, i) for i in (0, n - 1)]
    templates = [scene.templates(truth, len(p)) for p in parts] + [scene.templates(truth)] * 2
    try:
        found = scene.worker.ask(together, sets, templates)
    except (SubjectFailed, SubjectDied) as error:
        yield held("batch", alone, where, False, str(error))
        return
    for i, (part, results) in enumerate(zip(parts, found)):
        statement = alone if i < n else "queries in the opposite order have the same results"
        judgement = _judged(truth, part, results)
        if judgement.ratio > 1 or i >= n - 1:
            yield check("batch", statement, f"{where}, query {i}" if i < n else where, judgement)
    for i, results in zip((0, n - 1), found[n + 1 :]):
        judgement = _judged(truth, torch.tensor([i]), [t[i : i + 1] for t in results])
        yield check("batch", "neighbours of NaN change nothing", f"{where}, query {i}", judgement)
