"""Memory of an emulated kernel: the tensors that its pointers may reach, and shared memory."""

from dataclasses import dataclass, field

import torch

from tests.gluon.dtypes import OF_TORCH, bits_dtype, from_bits, size_of, to_bits
from tests.gluon.errors import EmulationError, UnknownName, refuse
from tests.gluon.values import Tensor, Type, block_data, static, static_shape, to_tensor


class Memory:
    """The storages of tensors that were given as arguments. Every access is checked against their ends."""

    def __init__(self):
        self.regions: list[tuple[int, torch.Tensor, str]] = []  # address, bytes, name
        self.changes = 0  # writes that changed something

    def add(self, t: torch.Tensor, name: str) -> int:
        """The address of t's first element."""
        storage = t.untyped_storage()
        start = storage.data_ptr()
        if all(start != known for known, _, _ in self.regions):
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.regions.append((start, flat, name))
        return t.data_ptr()

    def read(self, address: torch.Tensor, live: torch.Tensor, size: int) -> torch.Tensor:
        """Bits of elements of `size` bytes at the addresses that are live; all ones elsewhere."""
        out = torch.full(address.shape, 255 if size == 1 else -1, dtype=_bits(size))
        for flat, place, chosen in self._parts(address, live, size):
            out[chosen] = flat[place]
        return out

    def write(self, address: torch.Tensor, live: torch.Tensor, bits: torch.Tensor) -> None:
        for flat, place, chosen in self._parts(address, live, bits.element_size()):
            self.changes += not torch.equal(flat[place], bits[chosen])
            flat[place] = bits[chosen]

    def _parts(self, address, live, size):
        """For each storage that is touched: its elements, places in it, and the mask of addresses within it."""
        left = live
        while left.any():
            touched = address[left]
            low = int(touched.min())
            start, flat, name = self._region(low)
            high, end = int(touched.max()), start + flat.numel()
            chosen = left if high + size <= end else left & (address < end)
            inside = touched if chosen is left else address[chosen]
            beyond = int(inside.max()) + size - end
            refuse(beyond > 0, f"access {beyond} bytes beyond the end of {name}")
            refuse(
                bool(((inside % size != 0) | ((inside - start) % size != 0)).any()),
                f"access to {name} not aligned to {size} bytes",
            )
            yield flat[: flat.numel() // size * size].view(_bits(size)), (inside - start) // size, chosen
            left = left & ~chosen

    def _region(self, address: int):
        below = [r for r in self.regions if r[0] <= address]
        if below:
            start, flat, name = max(below, key=lambda r: r[0])
            if address < start + flat.numel():
                return start, flat, name
            near = f"{address - start - flat.numel()} bytes beyond the end of {name}"
        else:
            near = "before every argument"
        raise EmulationError(f"access to memory of no argument, {near}")


def _bits(size: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


class Descriptor:
    """A host TensorDescriptor as the kernel sees it."""

    def __init__(self, host):
        import triton.language as tl

        self.dtype, self.layout = OF_TORCH[host.base.dtype], host.layout
        self.shape = tuple(to_tensor(int(n)) for n in host.shape)
        self.strides = tuple(Tensor(torch.tensor(int(n)), tl.int64) for n in host.strides)
        self.block_type = tl.block_type(self.dtype, [int(n) for n in host.block_shape])
        self.block_shape = list(host.block_shape)
        bits = host.base.view(bits_dtype(self.dtype)) if host.base.dtype is not torch.bool else host.base
        self.rows = bits.as_strided([int(n) for n in host.shape], [int(n) for n in host.strides])
        ones = 255 if size_of(self.dtype) == 1 else -1
        self.pad = ones if getattr(host, "padding", "zero") == "nan" else 0

    def __getattr__(self, name):
        raise UnknownName(f"the emulator does not know TensorDescriptor.{name}")

    @property
    def nbytes(self) -> int:
        return self.block_type.numel * size_of(self.dtype)

    def _place(self, coordinates):
        refuse(len(coordinates) != self.rows.dim(), f"{len(coordinates)} coordinates of {self.rows.dim()} dimensions")
        starts = [int(to_tensor(c).data) for c in coordinates]
        inner = starts[-1] * size_of(self.dtype)
        refuse(inner % 16 != 0, f"TMA at {inner} bytes of its innermost dimension, which is no multiple of 16")
        spans = [
            (min(max(s, 0), n), max(min(s + b, n), 0)) for s, b, n in zip(starts, self.block_shape, self.rows.shape)
        ]
        there = tuple(slice(low, max(low, high)) for low, high in spans)
        here = tuple(slice(low - s, max(low, high) - s) for (low, high), s in zip(spans, starts))
        return there, here if all(h.start < h.stop for h in here) else None

    def read(self, coordinates) -> torch.Tensor:
        """Bits of a block, padded where it is beyond the tensor."""
        there, here = self._place(coordinates)
        block = torch.full(self.block_shape, self.pad, dtype=self.rows.dtype)
        if here is not None:
            block[here] = self.rows[there]
        return block

    def write(self, coordinates, block: torch.Tensor) -> None:
        there, here = self._place(coordinates)
        if here is not None:
            self.rows[there] = block[here]


@dataclass(eq=False)
class Allocation:
    """Shared memory from one `allocate_shared_memory`, named after the variable that takes it."""

    buffer: torch.Tensor
    name: str = ""
    overlaps: dict = field(default_factory=dict)  # by keys of two views


class Shared:
    """A view of shared memory; `bits` [*shape] are its elements."""

    def __init__(self, allocation: Allocation, bits: torch.Tensor, dtype, layout, program):
        self.allocation, self.bits, self.dtype = allocation, bits, dtype
        self.layout, self.program = layout, program

    def __getattr__(self, name):
        raise UnknownName(f"the emulator does not know shared_memory_descriptor.{name}")

    def __str__(self) -> str:
        at = self.bits.storage_offset() * self.bits.element_size()
        size = self.allocation.buffer.numel()
        own = self.bits.numel() * self.bits.element_size()
        place = "" if own == size else f"[{at // own}]" if own and at % own == 0 else f" + {at} bytes"
        return (self.allocation.name or "shared memory") + place

    @property
    def shape(self) -> list[int]:
        return list(self.bits.shape)

    @property
    def rank(self) -> int:
        return self.bits.dim()

    @property
    def numel(self) -> int:
        return self.bits.numel()

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape, self.layout)

    def _view(self, bits, dtype=None, layout=None) -> "Shared":
        return Shared(self.allocation, bits, dtype or self.dtype, layout or self.layout, self.program)

    def load(self, layout=None) -> Tensor:
        self.program.accesses.read(self)
        return Tensor(from_bits(self.bits.clone(), self.dtype), self.dtype, layout)

    def store(self, value: Tensor) -> None:
        refuse(not isinstance(value, Tensor), f"store of {value!r} to {self}")
        refuse(value.shape != self.shape, f"store of {value.shape} to {self} of {self.shape}")
        refuse(value.dtype != self.dtype, f"store of {value.dtype} to {self} of {self.dtype}")
        self.program.accesses.write(self)
        self.bits.copy_(to_bits(value.data, value.dtype))

    def index(self, index) -> "Shared":
        i = int(to_tensor(index).data)
        refuse(not 0 <= i < self.shape[0], f"index {i} of {self} of {self.shape}")
        return self._view(self.bits[i])

    def slice(self, start, length, dim=0) -> "Shared":
        start, length = static(start, "the start of a slice"), static(length, "the length of a slice")
        refuse(
            start < 0 or start + length > self.shape[dim], f"slice {start}:{start + length} of {self} of {self.shape}"
        )
        return self._view(self.bits.narrow(dim, start, length))

    def permute(self, order) -> "Shared":
        return self._view(self.bits.permute(list(order)))

    def reshape(self, shape) -> "Shared":
        return self._view(self.bits.view(static_shape(shape)))

    def _reinterpret(self, dtype, shape, layout) -> "Shared":
        refuse(not self.bits.is_contiguous(), f"_reinterpret of a part of {self} that is not contiguous")
        shape = static_shape(shape)
        flat, size = self.bits.reshape(-1).view(torch.uint8), torch.Size(shape).numel() * size_of(dtype)
        refuse(size > flat.numel(), f"_reinterpret of {flat.numel()} bytes of {self} as {shape} of {dtype}")
        return self._view(flat[:size].view(bits_dtype(dtype)).view(shape), dtype, layout)

    def _keep_alive(self) -> None:
        pass

    def marks(self) -> torch.Tensor:
        """Bool [bytes of the allocation]: those that belong to this view."""
        mark, size = torch.zeros(self.allocation.buffer.numel(), dtype=torch.bool), self.bits.element_size()
        strides = [*(s * size for s in self.bits.stride()), 1]
        mark.as_strided([*self.shape, size], strides, self.bits.storage_offset() * size)[...] = True
        return mark

    @property
    def key(self) -> tuple:
        """Equal for views of the same elements."""
        return self.bits.storage_offset(), self.bits.element_size(), tuple(self.bits.shape), self.bits.stride()

    def overlaps(self, other: "Shared") -> bool:
        """Whether views of one allocation share bytes."""
        keys, known = (self.key, other.key), self.allocation.overlaps
        if keys not in known:
            known[keys] = keys[0] == keys[1] or bool((self.marks() & other.marks()).any())
        return known[keys]


def allocate(dtype, shape, layout, program) -> Shared:
    """Fresh shared memory, all ones: NaN as floats."""
    shape = static_shape(shape)
    buffer = torch.full((torch.Size(shape).numel() * size_of(dtype),), 255, dtype=torch.uint8)
    return Shared(Allocation(buffer), buffer.view(bits_dtype(dtype)).view(shape), dtype, layout, program)


def addresses(pointer: Tensor, mask, *others) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(addresses, live, shape) of an access by a block of pointers under a mask."""
    refuse(not isinstance(pointer, Tensor) or not pointer.dtype.is_ptr(), f"access by {pointer!r}, which is no pointer")
    live = to_tensor(True if mask is None else mask)
    refuse(not live.dtype.is_int1(), f"a mask of {live.dtype}")
    shape = torch.broadcast_shapes(pointer.data.shape, live.data.shape, *(o.data.shape for o in others))
    return pointer.data.expand(shape), live.data.expand(shape), list(shape)


def load(memory: Memory, pointer: Tensor, mask=None, other=None) -> Tensor:
    dtype = pointer.dtype.element_ty
    rest = [] if other is None else [to_tensor(other)]
    refuse(mask is None and other is not None, "a load with `other` and no mask")
    address, live, shape = addresses(pointer, mask, *rest)
    bits = memory.read(address, live, size_of(dtype))
    if rest:
        bits = torch.where(live, bits, to_bits(block_data(rest[0], shape, dtype), dtype))
    return Tensor(from_bits(bits, dtype), dtype, pointer.layout)


def store(memory: Memory, pointer: Tensor, value, mask=None) -> None:
    address, live, shape = addresses(pointer, mask, to_tensor(value))
    refuse(shape != pointer.shape, f"store of {shape} by pointers of {pointer.shape}")
    dtype = pointer.dtype.element_ty
    memory.write(address, live, to_bits(block_data(to_tensor(value), shape, dtype), dtype).contiguous())
