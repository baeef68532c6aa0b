"""Outputs are written whole, whatever their memory held before."""

from collections.abc import Iterator

from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import allocations, raw
from dsv4.probes.kernel_audit.scene import Scene, check
from dsv4.probes.result import Check

STATEMENT = "outputs are written whole over memory of"
FILLS = {"NaN": 0xFF, "a marker": 0x41}


def filled(harness, arguments, templates, fill: int):
    """Results of a call whose fresh memory holds the byte `fill`."""
    arguments = harness.place(arguments)
    with allocations(fill):
        return raw(harness.call(arguments, templates))


def run(scene: Scene) -> Iterator[Check]:
    """Both fills, in a few cases."""
    for truth in scene.few(4):
        for name, fill in FILLS.items():
            found, failure = asked(scene, "written", f"{STATEMENT} {name}", truth, filled, fill)
            yield failure or check("written", f"{STATEMENT} {name}", scene.label(truth), truth.judge(found))
