"""How often a device stops a kernel in its midst, for other processes to have their turn.

A kernel that waits for so many cycles does not show it: cycles are counted on while it is stopped.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

WATCH = 12_000_000  # ns that a kernel watches: longer than a turn of four other processes (9 ms on an H200)
STOP = 50_000  # ns between two readings of the clock, from which the kernel was stopped


@triton.jit
def poll(FOUND, WATCH, STOP):
    """Adds to FOUND, int64 [2], how often the time between two readings of the device's clock was longer than STOP ns
    within WATCH ns, and the ns of these times."""
    begun = globaltimer()
    last = begun
    count = begun - begun
    away = begun - begun
    while last - begun < WATCH:
        now = globaltimer()
        if now - last > STOP:
            count += 1
            away += now - last
        last = now
    tl.store(FOUND, tl.load(FOUND) + count)
    tl.store(FOUND + 1, tl.load(FOUND + 1) + away)


class Stops:
    """One warp beside other kernels, on a stream of its own. While it runs, this process gives no turn away before its
    time, though the device waits for the host between calls."""

    def __init__(self, device: torch.device):
        self.found = torch.zeros(2, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # host memory: nothing is watched
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def watch(self) -> None:
        """For `WATCH` from now on, unless it still watches."""
        if self.stream and self.stream.query():
            with torch.cuda.stream(self.stream):
                poll[(1,)](self.found, WATCH, STOP, num_warps=1)

    def read(self) -> tuple[int, float]:
        """How often it was stopped so far, and for how many milliseconds each time."""
        if self.stream:
            self.stream.synchronize()
        count, away = self.found.tolist()
        return count, away / max(count, 1) / 1e6
