"""What a call leaves behind: another problem in between, NaN in between, two problems in turn, results that are
kept."""

import threading
from collections.abc import Iterator
from types import ModuleType

import torch

from dsv4.kernels.contract import rebuilt, tensors
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import bits
from dsv4.probes.kernel_audit.scene import Scene, held, not_run
from dsv4.probes.result import Check


def between(harness, mine, others, templates):
    """Whether a call's bits are the same after calls of other problems; name of the problem → answer. No answers where
    they are not even the same in two calls on end."""
    first = harness.steady(lambda: harness.place(mine), templates[0])
    answers = {}
    if first is None:
        return answers
    for (name, other), template in zip(others, templates[1:]):
        try:
            harness.call(harness.place(other), template)
        except Exception:  # a problem of NaN may be refused: what counts is the next call
            pass
        answers[name] = harness.bits(harness.place(mine), templates[0]) == first
    return answers


def kept(harness, mine, other, templates):
    """(results of the first call unchanged by the second, memory of the two apart)."""
    first = harness.call(harness.place(mine), templates[0])
    before = bits(first)
    second = harness.call(harness.place(other), templates[1])
    apart = not {t.data_ptr() for t in first if t.numel()} & {t.data_ptr() for t in second if t.numel()}
    return bits(first) == before, apart


def in_turn(harness, problems, templates):
    """What two problems in turn, and in two threads, do to each other: '' if each keeps its bits."""
    fresh = [harness.fresh(p) for p in problems]
    alone = [harness.steady(f, t) for f, t in zip(fresh, templates)]
    if harness.contract.written or None in alone:
        return ""
    found = []

    def call(which: int, how: str):
        try:
            if harness.device.type == "cuda":  # a thread has no context before
                torch.cuda.set_device(harness.device.index or 0)
            same = harness.bits(fresh[which](), templates[which]) == alone[which]
            found.append("" if same else f"bits changed {how}")
        except Exception as error:
            found.append(f"{type(error).__name__} {how}: {(str(error).splitlines() or [''])[0][:200]}")

    for i in range(6):
        call(i % 2, "in turn")
    if interpreted(harness.function):
        return next(filter(None, found), "")

    def work(which: int):
        for _ in range(4):
            call(which, "in two threads")

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next(filter(None, found), "")


def interpreted(function) -> bool:
    """Whether a kernel runs in Triton's interpreter, which is not made for threads: one is among the globals of its
    module or of modules that it names."""
    seen, waiting = set(), [getattr(function, "__globals__", {})]
    while waiting:
        names = waiting.pop()
        for value in list(names.values()):
            if type(value).__name__ == "InterpretedFunction":
                return True
            if not isinstance(value, ModuleType) or value.__name__ in seen:
                continue
            file = getattr(value, "__file__", None) or "site-packages"
            if "site-packages" not in file and not value.__name__.startswith("dsv4"):
                seen.add(value.__name__)
                waiting.append(vars(value))
    return False


def _of_nan(arguments: tuple) -> tuple:
    return tuple(
        rebuilt(a, lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() and t.element_size() > 1 else t)
        for a in arguments
    )


def run(scene: Scene) -> Iterator[Check]:
    """Two cases of other sizes where there are such."""
    cases = scene.few(4, right=False)
    if not cases:
        yield not_run("state", "the gate found no case right")
        return
    big = max(cases, key=_size)
    for truth in dict.fromkeys((cases[0], min(cases, key=_size), big)):
        others = [t for t in cases if t is not truth] or [truth]
        yield from _case(scene, truth, others)


def _size(truth) -> int:
    return sum(t.numel() for t in tensors(truth.case.arguments))


def _case(scene: Scene, truth, others) -> Iterator[Check]:
    mine, where = truth.case.arguments, scene.label(truth)
    problems = [(scene.label(t), t.case.arguments) for t in others] + [("a problem of NaN", _of_nan(mine))]
    templates = [scene.templates(t) for t in (truth, *others, truth)]
    other = others[-1]
    pair = (mine, other.case.arguments), [scene.templates(truth), scene.templates(other)]
    statement = "a call has the same bits after another problem"
    try:
        for name, right in scene.worker.ask(between, mine, problems, templates).items():
            if not right or name == problems[-1][0]:
                yield held("state", statement, where, right, f"other bits after {name}")
        alike = scene.other(truth) or other
        for second in {id(t): t for t in (other, alike)}.values():
            both = scene.templates(truth), scene.templates(second)
            unchanged, apart = scene.worker.ask(kept, mine, second.case.arguments, both)
            yield held("state", "results of an earlier call stay as they were", where, unchanged, "they changed")
            free = apart or bool(scene.contract.written)
            yield held("state", "results of two calls lie in memory of their own", where, free, "they share memory")
        said = scene.worker.ask(in_turn, *pair)
        yield held("state", "two problems in turn and in two threads keep their bits", where, not said, said)
    except (SubjectFailed, SubjectDied) as error:
        yield held("state", statement, where, False, str(error))
