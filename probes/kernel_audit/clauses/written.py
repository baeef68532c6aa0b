"""Outputs are written whole, whatever their memory held before."""

from collections.abc import Iterator

import torch

from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import allocations, bits, raw
from dsv4.probes.kernel_audit.scene import Scene, held
from dsv4.probes.result import Check

STATEMENT = "outputs are the same bits whatever their memory held"
FILLS = 0xFF, 0x41  # NaN, and a number


def filled(harness, arguments, templates):
    """(numbers of results of which some bytes are what their memory held, numbers of those that differ otherwise with
    what fresh memory holds and not between calls alike)."""
    found = []
    for fill in (*FILLS, FILLS[-1]):
        placed = harness.place(arguments)
        with allocations(fill):
            found.append(raw(harness.call(placed, templates, fill)))
    kept = [i for i, (a, b, _) in enumerate(zip(*found)) if _left(a, b)]
    as_bits = [bits(harness.ordered(results)) for results in found]
    return kept, [i for i, (a, b, again) in enumerate(zip(*as_bits)) if a != b == again and i not in kept]


def _left(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of both results is what their memory held before."""
    if not a.numel():
        return False
    here = [t.view(-1).view(torch.uint8).view(-1, t.element_size()) == f for t, f in zip((a, b), FILLS)]
    return bool((here[0].all(1) & here[1].all(1)).any())


def run(scene: Scene) -> Iterator[Check]:
    """A few cases."""
    names = [o.name for o in scene.contract.outputs]
    for truth in scene.few(4, right=False):
        found, failure = asked(scene, "written", STATEMENT, truth, filled)
        if failure:
            yield failure
            continue
        kept, other = ([names[i] for i in numbers] for numbers in found)
        said = [f"{n} is not written whole" for n in kept] + [f"{n} depends on what fresh memory held" for n in other]
        yield held("written", STATEMENT, scene.label(truth), not said, ", ".join(said), len(FILLS))
