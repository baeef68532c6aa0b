"""What may not be read holds NaN: rows behind the length, rows that no list names, padding of pages."""

from collections.abc import Iterator

from dsv4.probes.kernel_audit.clauses.gate import called
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.scene import Scene, held, not_run, with_poison
from dsv4.probes.result import Check

STATEMENT = "the result is right with NaN where nothing may be read"


def taken_count(harness) -> int:
    """How many of the contract's arguments the kernel takes."""
    return harness.count


def run(scene: Scene) -> Iterator[Check]:
    """Every case that the gate found right and that has something unread."""
    left_out = [a.name for a in scene.contract.arguments[scene.worker.ask(taken_count) :] if not a.hint]
    if left_out:  # what says how much may be read
        yield not_run("poison", f"the kernel does not take {', '.join(left_out)}, so all of its arguments may be read")
        return
    asked = 0
    for i, truth in enumerate(scene.truths):
        if not truth.case.unread or i not in scene.judged or scene.judged[i].ratio > 1 or scene.late:
            continue
        asked += 1
        names = ", ".join(truth.case.unread)
        try:
            yield scene.judge(
                *("poison", STATEMENT, truth, called, with_poison(truth), scene.templates(truth)),
                where=f"{scene.label(truth)}, in {names}",
            )
        except (SubjectFailed, SubjectDied) as error:
            yield held("poison", STATEMENT, scene.label(truth), False, str(error))
    if not asked:
        yield not_run("poison", "no case that the gate found right has memory that may not be read")
