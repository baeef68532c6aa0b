"""Results of every case against fp64; canaries say whether a case can tell."""

from collections.abc import Iterator

from dsv4.probes.kernel_audit.acceptance import canaries
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, check
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
            found = scene.worker.ask(called, truth.case.arguments, scene.templates(truth))
        except SubjectFailed as error:
            status = Status.WARN if error.refused else Status.ERROR
            yield Check("the kernel takes this case", status, where, "gate", note=str(error))
            continue
        except SubjectDied as error:
            yield Check("the kernel answers", Status.ERROR, where, "gate", note=str(error))
            continue
        judgement = truth.judge(found)
        scene.judged[i] = judgement
        weak = [
            name for name, canary, _ in canaries(truth, scene.others.get(i)) if canary is not None and canary.ratio <= 1
        ]
        if weak and judgement.ratio <= 1:
            yield vacuous(STATEMENT, f"it would accept {', '.join(weak)} too", where=where, part="gate")
        else:
            yield check("gate", STATEMENT, where, judgement)
