"""A part of the device's multiprocessors: grids, waits between programs and splits must not count on all of them."""

from collections.abc import Iterator

import torch

from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, check, not_run
from dsv4.probes.result import Check

SHARES = 4, 2  # a quarter and a half of them


def supported(harness) -> str:
    """Why a part of the device cannot be used here; '' if it can."""
    try:
        from torch.cuda.green_contexts import SUPPORTED
    except ImportError:
        return f"torch {torch.__version__} has no green contexts"
    if not SUPPORTED:
        return "this torch was built without green contexts"
    try:
        _context(harness, 2)
    except RuntimeError as error:
        return (str(error).splitlines() or [""])[0][:160]
    return ""


def _context(harness, share: int):
    from torch.cuda.green_contexts import GreenContext

    whole = torch.cuda.get_device_properties(harness.device).multi_processor_count
    count = max(8, whole // share // 8 * 8)  # Hopper gives them out in eights
    return GreenContext.create(num_sms=count, device_id=harness.device.index or 0)


def partial(harness, arguments, templates, share: int):
    """Results of a call in a green context of some multiprocessors."""
    placed = harness.place(arguments)
    torch.cuda.synchronize()
    context = _context(harness, share)
    context.set_context()
    try:
        results = harness.call(placed, templates)
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    torch.cuda.synchronize()
    return raw(results)


def run(scene: Scene) -> Iterator[Check]:
    """A few cases, on CUDA."""
    if not scene.device.startswith("cuda"):
        yield not_run("processors", "parts of a device need CUDA")
        return
    why = scene.worker.ask(supported)
    if why:
        yield not_run("processors", why)
        return
    for truth in scene.few(2):
        for share in SHARES:
            statement = f"on one multiprocessor in {share} the result is right"
            found, failure = asked(scene, "processors", statement, truth, partial, share)
            yield failure or check("processors", statement, scene.label(truth), truth.judge(found))
