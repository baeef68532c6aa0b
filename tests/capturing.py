"""What a stream capture refuses, refused on a CPU."""

import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
# reads of numbers by the host, shapes that depend on numbers, and tensors made from numbers of the host, which are
# copied to a device
REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "scalar_tensor")


class Refusing(TorchDispatchMode):
    """Operations of this thread raise RuntimeError, in the words of a GPU, where a capture would refuse them. but: a
    folder of the checkout whose code may run any ('kernels': on a GPU other kernels stand for those of a CPU). seen:
    operations so far."""

    def __init__(self, but: str = ""):
        super().__init__()
        self.seen, self.but = 0, but

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(t is not None and t.dtype is torch.bool for t in args[1])
        if (name in REFUSED or by_mask) and not (self.but and _innermost().is_relative_to(ROOT / self.but)):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return function(*args, **(kwargs or {}))


def _innermost() -> Path:
    """The file of the innermost code of this checkout that runs an operation."""
    frame = sys._getframe(2)
    # an environment may lie inside of the checkout, and its packages with it
    while not (file := Path(frame.f_code.co_filename)).is_relative_to(ROOT) or "site-packages" in file.parts:
        frame = frame.f_back
    return file
