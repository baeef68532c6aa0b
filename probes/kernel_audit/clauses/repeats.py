"""The same bits, many times. On a GPU other kernels run beside it, and its caches are emptied in between."""

from collections.abc import Iterator

import torch

from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import same_bits
from dsv4.probes.kernel_audit.scene import Scene, held
from dsv4.probes.result import Check


def repeated(harness, arguments, templates, times: int):
    """How many of `times` calls gave other bits than the first."""
    fresh = harness.fresh(arguments)
    if harness.device.type != "cuda":
        first = harness.bits(fresh(), templates)
        return sum(harness.bits(fresh(), templates) != first for _ in range(times - 1))
    first = [t.clone() for t in harness.ordered(harness.call(fresh(), templates))]
    return _disturbed(harness, fresh, templates, first, times)


def _disturbed(harness, fresh, templates, first, times: int) -> int:
    side, other = torch.cuda.Stream(), torch.randn(2048, 2048, device=harness.device)
    flush = torch.empty(64 << 20, dtype=torch.uint8, device=harness.device)
    differ = torch.zeros(times, dtype=torch.bool, device=harness.device)
    for i in range(1, times):
        if i % 3 == 0:
            with torch.cuda.stream(side):
                other @ other
        if i % 7 == 0:
            flush.fill_(i % 251)
        if i % 11 == 0:
            torch.cuda._sleep(2000 * (i % 13))
        found = harness.ordered(harness.call(fresh(), templates))
        unlike = [~same_bits(a, b) for a, b in zip(found, first)]
        differ[i] = torch.stack(unlike).any()
    torch.cuda.synchronize()
    return int(differ.sum())


def run(scene: Scene) -> Iterator[Check]:
    """A few cases, `scene.repeats` calls in all each."""
    for truth in scene.few(2, right=False):
        statement = f"{scene.repeats} calls give the same bits"
        count, failure = asked(scene, "repeats", statement, truth, repeated, scene.repeats)
        rate = 1 - 0.05 ** (1 / scene.repeats)
        source = f"with 95 % certainty it would have seen a rate of {rate:.2g} a call"
        yield failure or held(
            "repeats", statement, scene.label(truth), count == 0, f"{count} differ", scene.repeats, source
        )
