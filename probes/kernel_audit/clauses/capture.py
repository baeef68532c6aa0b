"""Captured in a CUDA graph with one problem and replayed with others of the same shapes: other lengths, lists,
contents."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dsv4.kernels.contract import tensors
from dsv4.probes.kernel_audit.acceptance import truth_of
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, check, held, not_run
from dsv4.probes.result import Check

REPLAY = "replayed with another problem it gives that problem's result"
SYNC = "a call does not wait for the device"


def captured(harness, first, problems, templates):
    """Results of replays with each problem; between them results are filled with NaN, and memory is given back and
    taken again."""
    static = harness.place(first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    call = harness.prepared(static, templates)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    given = {t.untyped_storage().data_ptr() for t in tensors(static)}
    found = []
    for problem in problems:
        new = harness.place(problem)
        for to, of in zip(tensors(static), tensors(new)):
            to.copy_(of)
        for i, result in enumerate(results):
            own = harness.contract.outputs[i].argument is None and result.untyped_storage().data_ptr() not in given
            if own and result.is_floating_point():
                result.fill_(float("nan"))
        torch.full((1 << 22,), float("nan"), device=harness.device)  # what a freed workspace would now hold
        graph.replay()
        found.append(raw(results))
    return found


def waits(harness, arguments, templates) -> str:
    """What waits for the device in a call after warm-up; '' if nothing does."""
    call = harness.prepared(harness.place(arguments), templates)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def run(scene: Scene) -> Iterator[Check]:
    """A few cases with partners of the same shapes, on CUDA."""
    if not scene.device.startswith("cuda"):
        yield not_run("capture", "graphs need a CUDA device")
        return
    for truth in scene.few(3):
        yield from _case(scene, truth)


def _case(scene: Scene, truth) -> Iterator[Check]:
    where, partners = scene.label(truth), _partners(scene, truth)
    problems = [t.case.arguments for t in partners]
    try:
        said = scene.worker.ask(waits, truth.case.arguments, scene.templates(truth))
        yield held("capture", SYNC, where, not said, said)
        found = scene.worker.ask(captured, truth.case.arguments, problems, scene.templates(truth))
    except (SubjectFailed, SubjectDied) as error:
        yield held("capture", "it can be captured", where, False, str(error))
        scene.worker.stop()  # a capture that failed leaves its stream unusable
        return
    for partner, results in zip(partners, found):
        yield check("capture", REPLAY, f"{where}, then {partner.case.family}", partner.judge(results))


def _partners(scene: Scene, truth) -> list:
    """Cases of the same shapes and numbers, the case itself last; of those that the gate saw, the right ones. What an
    adapter prepares beforehand is the case's own in all of them."""
    alike = lambda t: [(x.shape, x.stride(), x.dtype) for x in tensors(t.case.arguments)]
    others = lambda t: [a for a in t.case.arguments if not any(True for _ in tensors(a))]
    right = [t for i, t in enumerate(scene.truths) if i in scene.judged and scene.judged[i].ratio <= 1]
    found = [scene.other(truth), *right]
    fit = [t for t in found if t not in (None, truth) and alike(t) == alike(truth) and others(t) == others(truth)]
    return [_with_prepared(scene, t, truth) for t in fit[:3]] + [truth]


def _with_prepared(scene: Scene, partner, truth):
    """The partner with those of the case's arguments that an adapter prepares."""
    if not scene.prepared:
        return partner
    names = [a.name for a in scene.contract.arguments]
    pairs = zip(names, truth.case.arguments, partner.case.arguments)
    arguments = tuple(mine if name in scene.prepared else theirs for name, mine, theirs in pairs)
    return truth_of(scene.contract, replace(partner.case, arguments=arguments), truth.accuracy)
