"""Arguments are unchanged."""

from collections.abc import Iterator

from dsv4.kernels.contract import tensors
from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import bits
from dsv4.probes.kernel_audit.scene import Scene, held
from dsv4.probes.result import Check

STATEMENT = "arguments are the same bits after the call"


def changed(harness, arguments, templates):
    """Numbers of the arguments that other bits were left in, but for those that are results."""
    placed = harness.place(arguments)
    before = [bits(list(tensors(a))) for a in placed]
    harness.call(placed, templates)
    after = [bits(list(tensors(a))) for a in placed]
    free = {i for i, a in enumerate(harness.contract.arguments) if a.scratch} | set(harness.contract.written)
    return [i for i, (a, b) in enumerate(zip(before, after)) if a != b and i not in free]


def run(scene: Scene) -> Iterator[Check]:
    """A few cases."""
    names = [a.name for a in scene.contract.arguments]
    for truth in scene.few(4, right=False):
        found, failure = asked(scene, "inputs", STATEMENT, truth, changed)
        note = "" if failure else f"{', '.join(names[i] for i in found)} changed"
        yield failure or held("inputs", STATEMENT, scene.label(truth), not found, note)
