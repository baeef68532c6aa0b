"""Outputs are written whole, whatever their memory held before."""

from collections.abc import Iterator

from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import allocations, bits
from dsv4.probes.kernel_audit.scene import Scene, held
from dsv4.probes.result import Check

STATEMENT = "outputs are the same bits whatever their memory held"
FILLS = {"NaN": 0xFF, "a marker": 0x41}


def filled(harness, arguments, templates):
    """Numbers of results that differ between calls whose fresh memory holds NaN and a marker."""
    found = []
    for fill in FILLS.values():
        placed = harness.place(arguments)
        with allocations(fill):
            found.append(bits(harness.call(placed, templates, fill)))
    return [i for i, (a, b) in enumerate(zip(*found)) if a != b]


def run(scene: Scene) -> Iterator[Check]:
    """A few cases."""
    names = [o.name for o in scene.contract.outputs]
    for truth in scene.few(4, right=False):
        found, failure = asked(scene, "written", STATEMENT, truth, filled)
        note = "" if failure else f"{', '.join(names[i] for i in found)} is not written whole"
        yield failure or held("written", STATEMENT, scene.label(truth), not found, note, len(FILLS))
