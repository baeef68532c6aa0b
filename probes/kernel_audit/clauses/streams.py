"""Another stream, arguments that are written late on it, a consumer that does not wait for the device."""

from collections.abc import Iterator

import torch

from dsv4.kernels.contract import rebuilt, tensors
from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, check, not_run
from dsv4.probes.result import Check

STATEMENT = "on a stream of its own, after a late producer, the result is right"
CYCLES = 20_000_000  # of sleep before the arguments are written: some 10 ms


def late(harness, arguments, templates):
    """Results, copied right behind the call on its stream, of arguments that are NaN until the stream writes them."""
    good = harness.place(arguments)
    harness.call(harness.place(arguments), templates)  # compiled before the clock
    placed = tuple(rebuilt(a, _spoilt) for a in good)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        for to, of in zip(tensors(placed), tensors(good)):
            to.copy_(of, non_blocking=True)
        results = [t.clone() for t in harness.call(placed, templates)]
    stream.synchronize()
    return raw(results)


def _spoilt(t: torch.Tensor) -> torch.Tensor:
    """Memory of the same shape and strides: NaN, and 0 where the values are indices."""
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride())) if t.numel() else 0
    memory = torch.zeros(size, dtype=t.dtype, device=t.device)
    if t.is_floating_point():
        memory.fill_(float("nan"))
    return memory.as_strided(t.shape, t.stride())


def run(scene: Scene) -> Iterator[Check]:
    """A few cases, on CUDA."""
    if not scene.device.startswith("cuda"):
        yield not_run("streams", "streams need a CUDA device")
        return
    for truth in scene.few(3):
        found, failure = asked(scene, "streams", STATEMENT, truth, late)
        yield failure or check("streams", STATEMENT, scene.label(truth), truth.judge(found))
