"""Emulations of triton.experimental.gluon.language.nvidia.hopper: copies, mbarriers and products, as asynchronous as
the seed makes them."""

import torch
import triton.language as tl

from tests.gluon.accesses import Access
from tests.gluon.dtypes import from_bits, size_of
from tests.gluon.errors import EmulationError, refuse
from tests.gluon.memory import Descriptor, Memory, Shared, addresses
from tests.gluon.schedule import Copy, Program
from tests.gluon.values import Tensor, static, to_tensor

OPERANDS = {"bf16": 2, "fp16": 2, "fp8e4nv": 1, "fp8e5": 1}  # of wgmma: bytes of an element
DEEP = 32  # bytes of K of an instruction


class Accumulator:
    """The result of an asynchronous wgmma. Only wgmma and warpgroup_mma_wait may take it before it is complete."""

    def __init__(self, a, b, acc, use_acc: bool):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Tensor | None = None
        self.reads: list = []  # of shared memory, until the wait

    def __getattr__(self, name):
        if name in ("dtype", "shape", "type", "layout"):
            return getattr(self.acc, name)
        raise EmulationError(f"an accumulator is used ({name}) before warpgroup_mma_wait has completed its product")

    def __repr__(self) -> str:
        return "an accumulator before its warpgroup_mma_wait"

    def compute(self) -> None:
        if self.result is None:
            acc = self.acc.result if isinstance(self.acc, Accumulator) else self.acc
            self.result = product(self.a, self.b, acc if self.use_acc else None, self.acc.layout)


def _unfinished(name):
    def call(self, *_):
        raise EmulationError(f"an accumulator is used ({name}) before warpgroup_mma_wait has completed its product")

    return call


for _name in "add sub mul truediv neg getitem lt le gt ge eq ne bool index radd rsub rmul rtruediv".split():
    setattr(Accumulator, f"__{_name}__", _unfinished(f"__{_name}__"))
Accumulator.__hash__ = object.__hash__


def product(a, b: Shared, acc: Tensor | None, layout) -> Tensor:
    """a @ b + acc in fp32 [M, N]: products and sums are exact until the end, where the result is rounded once."""
    left = a.data if isinstance(a, Tensor) else from_bits(a.bits, a.dtype)
    sums = left.double() @ from_bits(b.bits, b.dtype).double()
    return Tensor((sums if acc is None else sums + acc.data.double()).float(), tl.float32, layout)


class Hopper:
    """Functions by the names that kernels use. They act on the program that runs: `running()`."""

    def __init__(self, running):
        self.running = running

    @property
    def program(self) -> Program:
        return self.running()

    # mbarriers --------------------------------------------------------------------------------------------------------

    def init(self, mbarrier, count):
        self.program.init_barrier(mbarrier, static(count, "the count of a barrier"))

    def invalidate(self, mbarrier):
        self.program.barrier(mbarrier)
        del self.program.barriers[mbarrier.allocation, mbarrier.bits.storage_offset()]

    def expect(self, mbarrier, bytes, pred=True):
        barrier = self.program.barrier(mbarrier)
        if pred:
            self.program.released(barrier)
            barrier.expect(static(bytes, "the bytes of expect"))
            self.program.pause()

    def arrive(self, mbarrier, *, count=1, pred=True):
        barrier = self.program.barrier(mbarrier)
        if pred:
            self.program.released(barrier)
            barrier.arrive(static(count, "the count of an arrival"))
            self.program.pause()

    def wait(self, mbarrier, phase, pred=True, deps=()):
        barrier = self.program.barrier(mbarrier)
        phase = int(to_tensor(phase).data)
        refuse(phase not in (0, 1), f"wait for phase {phase} of {mbarrier}, which must be 0 or 1")
        if pred:
            self.program.wait(barrier, phase)

    # TMA --------------------------------------------------------------------------------------------------------------

    def tma_load(self, tensor_desc, coord, barrier, result, pred=True):
        barrier = self.program.barrier(barrier)
        _require_block(tensor_desc, result)
        coord = list(coord)
        if not pred:
            return
        # its bytes count in the phase that is not complete
        self.program.accesses.begin(result, "a TMA load", writes=True, who=barrier, epoch=barrier.phase + 1)
        copy = Copy(lambda: result.bits.copy_(tensor_desc.read(coord)), tensor_desc.nbytes)
        if self.program.timing.copies_at_once():
            barrier.receive(copy)
            self.program.pause()
        else:
            barrier.pending.append(copy)

    def tma_store(self, tensor_desc, coord, src):
        _require_block(tensor_desc, src)
        program, coord = self.program, list(coord)
        program.accesses.require_fence(src, "a TMA store")
        store = _Store(tensor_desc, coord, src, program.accesses.begin(src, "a TMA store"))
        if program.timing.reads_at_once():
            store.read()
        program.current.stores.append(store)

    def store_wait(self, pendings=0):
        """Complete the reads of all but the last `pendings` stores; global memory is written when the program ends."""
        stores = self.program.current.stores
        while len(stores) > static(pendings, "the number of stores under way"):
            store = stores.pop(0)
            store.read()
            self.program.accesses.complete(store.access)
            if self.program.timing.copies_at_once():
                store.write()
            else:
                self.program.final.append(store.write)

    # cp.async ---------------------------------------------------------------------------------------------------------

    def copy(self, smem, pointer, mask=None, cache_modifier="", eviction_policy="", volatile=False):
        program, memory = self.program, self.program.memory
        address, live, shape = addresses(pointer, mask)
        refuse(shape != smem.shape, f"cp.async of {shape} to {smem} of {smem.shape}")
        refuse(pointer.dtype.element_ty != smem.dtype, f"cp.async of {pointer.dtype.element_ty} to {smem.dtype}")
        access = program.accesses.begin(smem, "an asynchronous copy", writes=True)
        access.unfenced = True  # cp.async writes as registers do
        copy = Copy(lambda: _copied(memory, smem, address, live), access=access)
        if program.timing.copies_at_once():
            copy.land()
            copy.land = lambda: None
        program.current.copies.append(copy)

    def commit_group(self):
        here = self.program.current
        here.groups.append(here.copies)
        here.copies = []

    def wait_group(self, num_outstanding=0):
        groups = self.program.current.groups
        while len(groups) > static(num_outstanding, "the number of groups under way"):
            for copy in groups.pop(0):
                copy.land()
                self.program.accesses.complete(copy.access)

    def copies_arrive(self, mbarrier, increment_count=True):
        """Every thread of the partition arrives once its copies so far have landed."""
        here, barrier = self.program.current, self.program.barrier(mbarrier)
        copies, threads = [c for g in here.groups for c in g] + here.copies, 32 * here.warps
        here.groups, here.copies = [], []
        barrier.missing += threads if increment_count else 0
        for copy in copies:
            copy.access.who, copy.access.epoch = barrier, barrier.phase + 1
        self.program.released(barrier)
        arrival = Copy(lambda: [c.land() for c in copies], arrivals=threads)
        if self.program.timing.copies_at_once():
            barrier.receive(arrival)
            self.program.pause()
        else:
            barrier.pending.append(arrival)

    # wgmma ------------------------------------------------------------------------------------------------------------

    def fence_async_shared(self, cluster=False):
        self.program.accesses.fence()

    def mma_init(self, value):
        return value

    def mma(self, a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
        program = self.program
        _require_product(a, b, acc)
        made, products = Accumulator(a, b, acc, bool(use_acc)), program.current.products
        for operand in (a, b):
            if isinstance(operand, Shared):
                program.accesses.require_fence(operand, "wgmma")
                made.reads.append(program.accesses.begin(operand, "wgmma"))
        products.append(made)
        if not is_async:
            self._complete(0)
            return made.result
        if program.timing.reads_at_once():
            for under_way in products:
                under_way.compute()
        return made

    def mma_wait(self, num_outstanding=0, deps=None):
        refuse(deps is None, "warpgroup_mma_wait needs deps")
        products = self.program.current.products
        self._complete(static(num_outstanding, "the number of products under way"))
        under_way = [id(p) for p in products]
        got = tuple(d.result if isinstance(d, Accumulator) and id(d) not in under_way else d for d in deps)
        return got[0] if len(got) == 1 else got

    def _complete(self, outstanding: int) -> None:
        products = self.program.current.products
        while len(products) > outstanding:
            product = products.pop(0)
            product.compute()
            for access in product.reads:
                self.program.accesses.complete(access)


class _Store:
    """A TMA store under way."""

    def __init__(self, descriptor: Descriptor, coordinates, source: Shared, access: Access):
        self.descriptor, self.coordinates, self.source = descriptor, coordinates, source
        self.block: torch.Tensor | None = None
        self.access = access

    def read(self) -> None:
        self.block = self.source.bits.clone() if self.block is None else self.block

    def write(self) -> None:
        self.descriptor.write(self.coordinates, self.block)


def _copied(memory: Memory, smem: Shared, address, live) -> None:
    """Zeros where the mask is off."""
    bits = memory.read(address, live, size_of(smem.dtype))
    smem.bits.copy_(torch.where(live, bits, torch.zeros_like(bits)))


def _require_block(descriptor: Descriptor, block: Shared) -> None:
    refuse(not isinstance(descriptor, Descriptor), f"{descriptor!r} is no TensorDescriptor")
    refuse(block.shape != descriptor.block_shape, f"TMA of {descriptor.block_shape} and {block} of {block.shape}")
    refuse(block.dtype != descriptor.dtype, f"TMA of {descriptor.dtype} and {block} of {block.dtype}")
    # a swizzle is that of addresses, over 8 rows
    step, at = max(128, 8 * block.layout.swizzle_byte_width), block.bits.storage_offset() * block.bits.element_size()
    refuse(at % step != 0, f"TMA and {block}, at {at} bytes of its memory, which is no multiple of {step}")


def _require_product(a, b, acc) -> None:
    refuse(not isinstance(b, Shared), "wgmma takes its second operand from shared memory")
    refuse(not isinstance(a, (Tensor, Shared)), f"wgmma of {a!r}")
    size = OPERANDS.get(a.dtype.name)
    refuse(size is None or OPERANDS.get(b.dtype.name) != size, f"wgmma of {a.dtype} and {b.dtype} has no emulation")
    (M, K), (depth, N) = a.shape, b.shape
    refuse(K != depth or acc.shape != [M, N], f"wgmma of {a.shape} and {b.shape} to {acc.shape}")
    refuse(bool(M % 64 or N % 8 or K * size % DEEP), f"wgmma of {a.shape} and {b.shape}: no such instruction")
    instruction = getattr(acc.layout, "instr_shape", [16, 8, DEEP // size])
    refuse(instruction[-1] * size != DEEP or N % instruction[1], f"wgmma of {a.dtype} with instructions {instruction}")
    refuse(acc.dtype != tl.float32, f"wgmma to {acc.dtype} has no emulation")
    if size == 1:  # only 16-bit operands may be transposed
        for x, k in ((a, 1), (b, 0)):
            refuse(isinstance(x, Shared) and x.bits.stride(k) != 1, f"{x.dtype} operand {x} is not contiguous along K")
