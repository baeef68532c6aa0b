"""Nothing beyond the outputs is written."""

from collections.abc import Iterator

import torch

from dsv4.kernels.contract import rebuilt
from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import GUARD, MARK, allocations, raw, touched
from dsv4.probes.kernel_audit.scene import Scene, held
from dsv4.probes.result import Check

STATEMENT = "bytes around outputs and arguments keep their values"


def guarded(harness, arguments, templates):
    """Guard bytes that changed, around every argument and every fresh buffer."""
    kept: list = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        if not t.numel() or not t.is_contiguous():
            return t.to(harness.device)
        size = t.numel() * t.element_size()
        buffer = torch.full((size + 2 * GUARD,), MARK, dtype=torch.uint8, device=harness.device)
        view = buffer[GUARD : GUARD + size].view(t.dtype).view(t.shape)
        kept.append((buffer, view.copy_(t)))
        return view

    arguments = tuple(rebuilt(a, inside) for a in arguments)
    with allocations(MARK, guard=True) as handed:
        raw(harness.call(arguments, templates))
    return touched(kept + handed)


def run(scene: Scene) -> Iterator[Check]:
    """A few cases."""
    for truth in scene.few(4, right=False):
        count, failure = asked(scene, "guard", STATEMENT, truth, guarded)
        yield failure or held("guard", STATEMENT, scene.label(truth), count == 0, f"{count} bytes were written")
