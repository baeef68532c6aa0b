"""A guess fetched beside other work.

The blocks of layer i + 1 are known only when its query is: after layer i. What most of them are is known earlier, by
the choice of the step before (those are staged already: hits) and by a guessed query, of layer i + 1's projection on
layer i's input. Staging that on a branch of its own, while layer i attends and multiplies, is free: other buffers, the
link instead of the memory's bandwidth. Only what the guess missed is left for the way from query to attention.
"""

from collections.abc import Callable

import torch


class Ahead:
    """A branch of the stream. `start(run)` runs beside what follows; `join` waits for it. On the CPU both are in
    line."""

    def __init__(self, device: torch.device):
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A kernel that starts before its predecessor ends (programmatic dependent launch) must have one, on its own
        # stream, that is launched in the plain way: at each fork and join stands this.
        self.ticks = [torch.zeros((), device=device) for _ in range(2)]
        self.running, self.reads = False, ()

    def start(self, run: Callable[[], None], *reads: torch.Tensor) -> None:
        """reads: tensors of the current stream that `run` reads. They live until the branch has ended: given back
        earlier, their memory would be written again beside it."""
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
        """Nothing where nothing was started."""
        if self.running:
            torch.cuda.current_stream().wait_stream(self.side)
            self.ticks[1].zero_()
            self.running, self.reads = False, ()
