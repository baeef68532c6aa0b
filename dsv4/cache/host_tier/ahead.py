"""A guessed fetch that overlaps with other work.

The blocks of layer i + 1 are known only when its query is: after layer i. Most of them are known earlier, from the
choice of the previous step (those are staged already: hits) and from a guessed query, layer i + 1's projection of layer
i's input. Staging the guess on a branch of its own, while layer i attends and multiplies, costs nothing: it uses other
buffers, and the link instead of the memory's bandwidth. Between query and attention only the missed blocks are left to
fetch.
"""

from collections.abc import Callable

import torch


class Ahead:
    """A branch of the stream. `start(run)` runs in parallel with the following work; `join` waits for it. On the CPU
    both run in line."""

    def __init__(self, device: torch.device):
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # With programmatic dependent launch a kernel starts before its predecessor ends. Such a kernel needs a
        # predecessor on its own stream that is launched in the plain way; this one is launched at each fork and join.
        self.ticks = [torch.zeros((), device=device) for _ in range(2)]
        self.running, self.reads = False, ()

    def start(self, run: Callable[[], None], *reads: torch.Tensor) -> None:
        """reads: tensors of the current stream that `run` reads. They live until the branch has ended; if they were
        freed earlier, other work would overwrite their memory."""
        if self.side is None:
            run()
            return
        self.running, self.reads = True, reads
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.ticks[0].zero_()
            run()
            self.ticks[0].zero_()

    def join(self) -> None:
        """Wait for the branch; does nothing if none was started."""
        if self.running:
            torch.cuda.current_stream().wait_stream(self.side)
            self.ticks[1].zero_()
            self.running, self.reads = False, ()
