"""An emulator of Gluon for Hopper: a `@gluon.jit` kernel runs on CPU tensors.

    launch(kernel, grid, *args, num_warps=4, seed=0, **constexprs)

runs every program of the grid, one after another; with launch_cooperative_grid=True at the same time, where each
atomic lets others run. Arguments are CPU tensors, numbers, None, tuples of these, and host
`TensorDescriptor`s. Values have Triton's dtypes and rounding. wgmma adds exactly, and rounds once.

It models what a test cannot see in values alone. Fresh shared memory is NaN. An asynchronous operation takes effect as
late or as early as it may (`timing` says which seed does what, and a test runs all of SEEDS). Partitions of
`warp_specialize` take turns. These are errors: accesses beyond a tensor, a byte count that no `mbarrier.expect` named,
more arrivals than a barrier counts, a deadlock, an accumulator read before its wait, stores to shared memory that wgmma
or TMA reads without a fence, operations that are under way when a partition ends, and cp.async to memory that is not
used later while warps exchange numbers through scratch memory, which may be the same.

It does not model layouts (`scripts/check_aot.py` compiles kernels), races between programs, clusters, multicast, or the
limited precision of FP8 sums. Loops that wait for another program never end, unless the programs run at the same time
and the loop has an atomic. What has no emulation raises UnknownName.
"""

from itertools import product

import torch
import triton.language as tl

from tests.gluon.dtypes import OF_TORCH
from tests.gluon.errors import Deadlock, EmulationError, UnknownName
from tests.gluon.memory import Descriptor, Memory
from tests.gluon.schedule import Program
from tests.gluon.source import Translation
from tests.gluon.timing import SEEDS, Timing, order
from tests.gluon.together import Together
from tests.gluon.values import NUMBERS, Tensor, to_tensor

__all__ = ["SEEDS", "Deadlock", "EmulationError", "OnCPU", "UnknownName", "launch"]

OPTIONS = ("num_ctas", "num_stages", "maxnreg", "launch_pdl", "launch_cooperative_grid")  # that change no value


def launch(kernel, grid, *args, num_warps: int = 4, seed: int = 0, asm: dict | None = None, **kwargs) -> None:
    """Run a Gluon kernel on the CPU.

    Args:
        kernel: what `gluon.jit` made.
        grid: numbers of programs, or a function of the arguments by name.
        seed: when asynchronous operations take effect, and which partition runs (`timing`).
        asm: assembly string → function of torch tensors that gives what it gives, element by element. Tensors come in
            the dtypes of `dtypes.DATA`, broadcast to one shape, and go out in those of the results.

    Raises:
        EmulationError: the kernel does what is wrong on the device.
        UnknownName: it uses what has no emulation.
    """
    current: list[Program] = []
    memory = Memory()
    function = Translation(lambda: current[-1])(kernel)
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    if options.get("num_ctas", 1) != 1:
        raise EmulationError("clusters have no emulation")
    bound = function.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    grid = grid(dict(bound.arguments)) if callable(grid) else grid
    given = {p.name: _given(bound.arguments[p.name], p, memory) for p in kernel.params}
    programs = []
    for place, ids in enumerate(order(seed, list(product(*map(range, grid))))):
        ids, sizes = (*ids, 0, 0)[:3], (*grid, 1, 1)[:3]
        programs.append(Program(ids, sizes, memory, Timing(seed, place), num_warps, asm or {}))
    if options.get("launch_cooperative_grid"):
        return Together(programs, memory, current, seed).run(lambda: function(**given))
    for program in programs:
        current[:] = [program]
        function(**given)
        program.end()


class OnCPU:
    """Stands for a kernel in its launcher: `OnCPU(kernel, seed=…)[grid](*args, num_warps=4)`."""

    def __init__(self, kernel, seed: int = 0, asm: dict | None = None):
        self.kernel, self.seed, self.asm = kernel, seed, asm

    def __getitem__(self, grid):
        return lambda *args, **kwargs: launch(self.kernel, grid, *args, seed=self.seed, asm=self.asm, **kwargs)


def _given(value, parameter, memory: Memory):
    """An argument as the kernel sees it. The number 1 is a constexpr unless the kernel does not specialise it."""
    if parameter.is_constexpr:
        return value
    name = parameter.name
    if isinstance(value, (tuple, list)):
        return tuple(_given(v, parameter, memory) for v in value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise EmulationError(f"{name} is on {value.device}; expected a tensor of the CPU")
        address = torch.tensor(memory.add(value, name), dtype=torch.int64)
        return Tensor(address, tl.pointer_type(OF_TORCH[value.dtype]))
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, NUMBERS) and not (value == 1 and type(value) is int and not parameter.do_not_specialize):
        return to_tensor(value)
    return value
