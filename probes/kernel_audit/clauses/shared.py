"""The device by turns with other processes.

CUDA stops a kernel in its midst, to let another process have the device, and goes on with it milliseconds later. A copy
that was always in time is late then, and clocks have gone on. Alone on a device such a fault is not seen: attention of
this project gave up to 27 wrong results of 800 in each of six processes, and none alone.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import apart, integers, raw, same_bits
from dsv4.probes.kernel_audit.scene import LIMIT, Scene, check, held, not_run
from dsv4.probes.result import Check

PROCESSES = 4  # beside the kernel
STATEMENT = f"while {PROCESSES} other processes use the device by turns, the result is right"
SAME = "calls beside them give the same bits, as alone"
SECONDS, ALONE = 3.0, 0.5  # of calls of one case
UNDER_WAY = 64  # calls before the host waits for the device
START_LIMIT = 180.0  # seconds until all processes use the device
LEAST = 10  # stops of a kernel beside the calls, from which the device was shared
SIZE = 2048  # of the products of the other processes


def by_turns(harness, arguments, templates, seconds: float):
    """Calls for so long: (their number, how many differ from the first in a bit, the results that are furthest from
    the first, how often a kernel beside them was stopped, milliseconds of each time)."""
    from dsv4.probes.kernel_audit.stops import Stops  # it imports a compiler

    fresh, stops = harness.fresh(arguments), Stops(harness.device)
    first = [t.clone() for t in harness.ordered(harness.call(fresh(), templates))]
    worst, most = [integers(t) for t in first], torch.zeros((), device=harness.device)
    calls, differ, begun = 0, torch.zeros_like(most), time.monotonic()
    while not calls or time.monotonic() - begun < seconds:
        for _ in range(UNDER_WAY):
            stops.watch()
            found = harness.ordered(harness.call(fresh(), templates))
            far = torch.stack([apart(a, b) for a, b in zip(found, first)]).amax()
            unlike = ~torch.stack([same_bits(a, b) for a, b in zip(found, first)]).all()
            worst = [torch.where(far > most, integers(a), b) for a, b in zip(found, worst)]
            most, differ, calls = torch.maximum(most, far), differ + unlike, calls + 1
        if harness.device.type == "cuda":
            torch.cuda.synchronize()
    return calls, int(differ), raw([w.view(t.dtype) for w, t in zip(worst, first)]), *stops.read()


@contextmanager
def others(device: str, count: int = PROCESSES) -> Iterator[list[subprocess.Popen]]:
    """Processes that have begun to keep the device busy; fewer where some could not. They end with the context, or with
    this process."""
    command = [sys.executable, "-m", __name__, device]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    started = [subprocess.Popen(command, **pipes) for _ in range(count)]
    late = threading.Timer(START_LIMIT, lambda: [p.kill() for p in started])
    late.start()
    try:
        begun = [p for p in started if p.stdout.readline()]
        late.cancel()
        yield begun
    finally:
        late.cancel()
        for process in started:
            process.kill()
            process.communicate()


def run(scene: Scene) -> Iterator[Check]:
    """Two cases, on CUDA."""
    if not scene.device.startswith("cuda"):
        yield not_run("shared", "processes share a device by turns on CUDA")
        return
    cases = scene.few(2)
    before = [asked(scene, "shared", STATEMENT, truth, by_turns, ALONE) for truth in cases]
    if not cases or scene.late:
        return
    with others(scene.device) as beside:
        for truth, (alone, failure) in zip(cases, before):
            if failure is None and len(beside) == PROCESSES:
                found, failure = asked(scene, "shared", STATEMENT, truth, by_turns, SECONDS)
            if failure is not None:
                yield failure
            elif len(beside) < PROCESSES or any(p.poll() is not None for p in beside):
                yield not_run("shared", f"not all of {PROCESSES} other processes could use the device")
            else:
                yield from judged(scene, truth, alone, found)


def judged(scene: Scene, truth, alone, found) -> Iterator[Check]:
    """Checks of what `by_turns` gave beside other processes; alone: what it gave before. Bits that differ alone too are
    for the clause of repeats."""
    calls, differ, results, stops, each = found
    source = f"{calls} calls; a kernel beside them was stopped {stops} times, for {each:.2g} ms each"
    if stops < LEAST:
        yield not_run("shared", f"the device was not shared: {source}")
        return
    where = scene.label(truth)
    worst = check("shared", STATEMENT, where, truth.judge(results))
    yield replace(worst, samples=calls, source=f"{LIMIT}; the worst of {source}")
    if not alone[1]:
        yield held("shared", SAME, where, not differ, f"{differ} differ, none of {alone[0]} alone", calls, source)


def main(device: str) -> None:
    """Keeps the device busy, and writes a line when it has begun. Ends when its standard input does."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    x, begun = torch.randn(SIZE, SIZE, device=device), False
    while True:
        for _ in range(UNDER_WAY if x.is_cuda else 1):
            x @ x
        if x.is_cuda:
            torch.cuda.synchronize()
        if not begun:
            print(flush=True)
        begun = True


if __name__ == "__main__":
    main(sys.argv[1])
