"""Results of every case against fp64; canaries say whether a case can tell."""

from collections.abc import Iterator
from dataclasses import replace

from dsv4.probes.kernel_audit.acceptance import Judgement, canaries
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene
from dsv4.probes.result import Check, Status, vacuous

STATEMENT = "results are those of fp64, as near as an honest kernel's"


def called(harness, arguments, templates):
    """Results of one call."""
    return raw(harness.call(harness.place(arguments), templates))


def run(scene: Scene) -> Iterator[Check]:
    """One check a case; VACUOUS where a wrong result would have passed."""
    for i, truth in enumerate(scene.truths):
        where = scene.label(truth)
        try:
            found = scene.judge("gate", STATEMENT, truth, called, truth.case.arguments, scene.templates(truth))
        except SubjectFailed as error:
            status = Status.WARN if error.refused else Status.ERROR
            yield Check("the kernel takes this case", status, where, "gate", note=str(error))
            continue
        except SubjectDied as error:
            yield Check("the kernel answers", Status.ERROR, where, "gate", note=str(error))
            continue
        right = found.status is Status.PASS or found.part == "state"
        scene.judged[i] = Judgement(0.0 if right else 2.0)
        failing = [
            (canary.ratio, name) for name, canary, _ in canaries(truth, scene.others.get(i)) if canary is not None
        ]
        weak = [name for ratio, name in failing if ratio <= 1]
        if weak and right:
            yield vacuous(STATEMENT, f"it would accept {', '.join(weak)} too", where=where, part="gate")
        else:
            power, name = min(failing, default=(float("inf"), "no canary"))
            yield replace(found, chance=float(f"{min(power, 1e9):.3g}"), note=found.note or f"nearest canary: {name}")
