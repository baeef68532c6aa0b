"""Emulations of functions of triton.experimental.gluon.language that act on the program that runs: memory, atomics,
partitions, inline assembly."""

import torch
import triton.language as tl

from tests.gluon import memory
from tests.gluon.dtypes import DATA, from_bits, to_bits
from tests.gluon.errors import UnknownName, refuse
from tests.gluon.language import add, maximum, minimum
from tests.gluon.values import Tensor, joint_layout, recast, to_tensor

ATOMICS = {
    "add": add,
    "max": maximum,
    "min": minimum,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "xchg": lambda old, new: new,
}


class Language:
    """Functions that act on the program that runs: `running()`."""

    def __init__(self, running):
        self.running = running
        for name, change in ATOMICS.items():
            setattr(self, f"atomic_{name}", lambda *args, change=change, **kw: self._atomic(change, *args, **kw))

    @property
    def program(self):
        return self.running()

    def exchanging(self, function):
        """`function`, in which warps exchange numbers through scratch memory."""

        def call(*args, **kwargs):
            self.program.exchanges(function.__name__)
            return function(*args, **kwargs)

        return call

    def program_id(self, axis):
        return to_tensor(self.program.ids[axis])

    def num_programs(self, axis):
        return to_tensor(self.program.grid[axis])

    def num_warps(self):
        return self.program.current.warps

    def num_ctas(self):
        return 1

    def barrier(self, **_):
        pass  # warps of a partition are in step

    def load(self, pointer, mask=None, other=None, cache_modifier="", eviction_policy="", volatile=False):
        return memory.load(self.program.memory, pointer, mask, other)

    def store(self, pointer, value, mask=None, cache_modifier="", eviction_policy=""):
        memory.store(self.program.memory, pointer, value, mask)

    def allocate_shared_memory(self, element_ty, shape, layout, value=None):
        made = memory.allocate(element_ty, shape, layout, self.program)
        if value is not None:
            made.store(value)
        return made

    def allocate_mbarrier(self, batch=None, two_ctas=False):
        return memory.allocate(tl.int64, [1] if batch is None else [batch, 1], None, self.program)

    def warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs=None):
        refuse(
            worker_num_regs is not None and len(worker_num_regs) != len(worker_num_warps),
            f"{len(worker_num_warps)} workers and {len(worker_num_regs or [])} numbers of registers",
        )
        for _, args in functions_and_args[1:]:
            refuse(any(isinstance(a, Tensor) and a.rank for a in args), "a worker's argument is a block")
        calls = [(f.__name__, lambda f=f, args=args: f(*args)) for f, args in functions_and_args]
        return self.program.specialize(calls, list(worker_num_warps))

    def inline_asm_elementwise(self, asm, constraints, args, dtype, is_pure, pack):
        known = {_words(text): function for text, function in self.program.asm.items()}
        if _words(asm) not in known:
            raise UnknownName(f"inline assembly without emulation: {asm!r} is not among asm={list(self.program.asm)}")
        args = [to_tensor(a) for a in args]
        kinds = dtype if isinstance(dtype, (list, tuple)) else (dtype,)
        got = known[_words(asm)](*torch.broadcast_tensors(*(a.data for a in args)))
        got = got if isinstance(got, tuple) else (got,)
        for data, kind in zip(got, kinds, strict=True):
            refuse(data.dtype is not DATA[kind.name], f"the emulation of {asm!r} gave {data.dtype} for {kind}")
        made = tuple(Tensor(data, kind, joint_layout(*args)) for data, kind in zip(got, kinds))
        return made if isinstance(dtype, (list, tuple)) else made[0]

    def _atomic(self, change, pointer, val, mask=None, sem=None, scope=None):
        """Element after element; the values before. Other programs may run before and after it."""
        self.program.exchanges("an atomic")
        self.program.yields()
        kind, held = pointer.dtype.element_ty, self.program.memory
        address, live, shape = memory.addresses(pointer, mask)
        new = to_bits(memory.block_data(to_tensor(val), shape, kind), kind).reshape(-1)
        old = torch.zeros_like(new)
        yes = torch.ones(1, dtype=torch.bool)
        for i, (where_, live_) in enumerate(zip(address.reshape(-1), live.reshape(-1))):
            if live_:
                before = held.read(where_[None], yes, new.element_size())
                after = change(*(Tensor(from_bits(b, kind), kind) for b in (before, new[i : i + 1])))
                held.write(where_[None], yes, to_bits(after.data, kind))
                old[i] = before[0]
        self.program.yields()
        return Tensor(from_bits(old.reshape(shape), kind), kind, pointer.layout)

    def atomic_cas(self, pointer, cmp, val, sem=None, scope=None):
        refuse(pointer.rank > 0, "atomic_cas of a block has no emulation")
        self.program.yields()
        before = self.load(pointer)
        if before.data == recast(to_tensor(cmp), before.dtype).data:
            self.store(pointer, val)
        return before


def _words(text: str) -> str:
    return " ".join(text.split())
