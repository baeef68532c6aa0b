"""Values of an emulated kernel: scalars and blocks, with the operators and the mixing of dtypes of the language."""

import operator
from functools import cache

import torch
import triton.language as tl
from triton.experimental.gluon.language import AutoLayout, SliceLayout

from tests.gluon.dtypes import (
    RULES,
    bitcast,
    cast,
    data_dtype,
    from_bits,
    number_data,
    number_dtype,
    size_of,
    to_bits,
    wrapped,
)
from tests.gluon.errors import EmulationError, UnknownName, refuse

NUMBERS = (bool, int, float)
COMPARISONS = {f.__name__: f for f in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)}
FLOATS_TOO = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
BITWISE = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


class Type:
    """`x.type` of a Tensor."""

    def __init__(self, scalar, shape, layout):
        self.scalar = self.element_ty = scalar
        self.shape, self.layout = shape, layout

    def is_ptr(self) -> bool:
        return self.scalar.is_ptr()


class Tensor:
    """A scalar (data of rank 0) or a block. It never changes: operators make new ones, `x += y` too."""

    __slots__ = ("data", "dtype", "layout")
    __hash__ = None

    def __init__(self, data: torch.Tensor, dtype, layout=None):
        self.data, self.dtype, self.layout = data, dtype, AutoLayout() if layout is None else layout

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape, self.layout)

    def __getattr__(self, name):
        raise UnknownName(f"the emulator does not know tensor.{name}")

    def __repr__(self) -> str:
        """Messages are made whether or not something is wrong: numbers of a block would take long."""
        return f"Tensor({self.shape if self.rank else self.data.item()}, {self.dtype})"

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False) -> "Tensor":
        refuse(fp_downcast_rounding not in (None, "rtne"), f"rounding {fp_downcast_rounding}")
        return recast(self, dtype, bitcast)

    def __bool__(self) -> bool:
        refuse(self.rank > 0, "a block where a scalar decides")
        return bool(self.data)

    def __index__(self) -> int:
        refuse(self.rank > 0 or not self.dtype.is_int(), "not a scalar integer")
        return int(self.data)

    def __getitem__(self, places) -> "Tensor":
        places, x = places if isinstance(places, tuple) else (places,), self
        for axis, place in enumerate(places):
            if place is None:
                x = expand_dims(x, axis)
            else:
                refuse(place != slice(None), "tensors take only None and : as indices")
        return x

    def __neg__(self):
        return binary("sub", Tensor(torch.zeros_like(self.data), self.dtype, self.layout), self)  # −0 becomes 0

    def __invert__(self):
        refuse(not self.dtype.is_int(), f"~ of {self.dtype}")
        data = ~self.data
        return Tensor(data if self.dtype.is_int1() else wrapped(data, self.dtype), self.dtype, self.layout)

    def __abs__(self):
        return Tensor(self.data.abs(), self.dtype, self.layout)


def _operators() -> None:
    names = [*FLOATS_TOO, *BITWISE, "truediv", "floordiv", "mod", "lshift", "rshift"]
    for name in names:
        setattr(Tensor, f"__{name}__", lambda a, b, name=name: binary(name, a, b))
        setattr(Tensor, f"__r{name}__", lambda a, b, name=name: binary(name, b, a))
    for name in COMPARISONS:
        setattr(Tensor, f"__{name}__", lambda a, b, name=name: binary(name, a, b))


_operators()


def static(number, what: str) -> int:
    """A number that must be known when the kernel is compiled."""
    refuse(isinstance(number, Tensor), f"{what} must be a constexpr; found a tensor")
    return number


def static_shape(shape) -> list[int]:
    shape = list(shape) if isinstance(shape, (list, tuple)) else [shape]
    return [static(n, "a size of a shape") for n in shape]


def to_tensor(x) -> Tensor:
    if isinstance(x, Tensor):
        return x
    refuse(not isinstance(x, NUMBERS), f"{x!r} where a tensor is needed")
    return Tensor(number_data(x, number_dtype(x)), number_dtype(x))


def recast(x: Tensor, dtype, bits: bool = False) -> Tensor:
    x = to_tensor(x)
    if x.dtype == dtype:
        return x
    return Tensor((bitcast if bits else cast)(x.data, x.dtype, dtype), dtype, x.layout)


def _typed(x, dtype) -> Tensor:
    return recast(x, dtype) if isinstance(x, Tensor) else Tensor(number_data(x, dtype), dtype)


def _kind(x):
    return x.dtype if isinstance(x, Tensor) else number_dtype(x)


def mixed(a, b, divides: bool = False) -> tuple[Tensor, Tensor]:
    """Both in the dtype of an operation on them."""
    kinds = _kind(a), _kind(b)
    if kinds[0] == kinds[1] and kinds[0].is_ptr():
        return a, b
    dtype = _common(kinds[0], isinstance(a, NUMBERS), kinds[1], isinstance(b, NUMBERS), divides)
    return _typed(a, dtype), _typed(b, dtype)


@cache
def _common(a, a_is_number: bool, b, b_is_number: bool, divides: bool):
    refuse(a.is_ptr() or b.is_ptr(), f"pointers mixed: {a} and {b}")
    return RULES.computation_type_impl(a, a_is_number, b, b_is_number, divides)


def joint_layout(*tensors: Tensor):
    """The layout of the first block of the highest rank."""
    return max(tensors, key=lambda t: t.rank).layout


def binary(name: str, a, b) -> Tensor:
    for x in (a, b):
        if not isinstance(x, (Tensor, *NUMBERS)):
            raise EmulationError(f"{name} of a tensor and {x!r}")
    ranks = {x.rank for x in (a, b) if isinstance(x, Tensor)} - {0}
    refuse(len(ranks) > 1, f"{name} of blocks of ranks {sorted(ranks)}")
    if name in COMPARISONS:
        a, b = mixed(a, b)
        x, y = a.data, b.data
        if a.dtype.name == "uint64":
            x, y = x ^ -(2**63), y ^ -(2**63)
        elif a.dtype.is_fp8():
            x, y = x.float(), y.float()
        return Tensor(COMPARISONS[name](x, y), tl.int1, joint_layout(a, b))
    if _kind(a).is_ptr() or (name == "add" and _kind(b).is_ptr()):
        return _moved(name, *((a, b) if _kind(a).is_ptr() else (b, a)))
    divides = name in ("truediv", "floordiv", "mod")
    if name == "truediv" and _kind(a).is_int() and _kind(b).is_int():
        a, b = _typed(a, tl.float32), _typed(b, tl.float32)
    elif name == "truediv" and _kind(a).is_int() != _kind(b).is_int():
        dtype = _kind(b) if _kind(a).is_int() else _kind(a)
        a, b = _typed(a, dtype), _typed(b, dtype)
    a, b = mixed(a, b, divides)
    refuse(a.dtype.is_fp8(), f"{name} of {a.dtype}")
    refuse(name not in FLOATS_TOO and name not in ("truediv", "mod") and not a.dtype.is_int(), f"{name} of {a.dtype}")
    return Tensor(_computed(name, a.data, b.data, a.dtype), a.dtype, joint_layout(a, b))


def _moved(name: str, pointer: Tensor, steps) -> Tensor:
    steps = to_tensor(steps)
    refuse(name not in ("add", "sub") or not steps.dtype.is_int(), f"{name} of a pointer and {steps.dtype}")
    by = steps.data.to(torch.int64) * size_of(pointer.dtype.element_ty)
    return Tensor(pointer.data + (by if name == "add" else -by), pointer.dtype, joint_layout(pointer, steps))


def _computed(name: str, x: torch.Tensor, y: torch.Tensor, dtype) -> torch.Tensor:
    if dtype.is_floating():
        return {**FLOATS_TOO, "truediv": torch.true_divide, "mod": torch.fmod}[name](x, y)
    if name in BITWISE:
        return BITWISE[name](x, y)
    if dtype.is_int1():
        return _computed(name, x.to(torch.int32), y.to(torch.int32), tl.int32) % 2 == 1
    unsigned = dtype.name == "uint64"
    if name in ("floordiv", "mod"):
        refuse(unsigned and bool(((x < 0) | (y < 0)).any()), f"{name} of uint64 above 2**63")
        refuse(bool((y == 0).any()), "an integer divided by 0")
        return wrapped(torch.div(x, y, rounding_mode="trunc") if name == "floordiv" else torch.fmod(x, y), dtype)
    if name in ("lshift", "rshift"):
        refuse(bool(((y < 0) | (y >= dtype.primitive_bitwidth)).any()), f"{dtype} shifted by its width or more")
        if name == "rshift" and unsigned:
            return torch.where(y == 0, x, (x >> y) & ~(torch.full_like(x, -1) << (64 - y).clamp(max=63)))
        return wrapped(x << y if name == "lshift" else x >> y, dtype)
    return wrapped(FLOATS_TOO[name](x, y), dtype)


def where(condition, x, y) -> Tensor:
    condition, (x, y) = to_tensor(condition), mixed(x, y)
    dtype = x.dtype
    data = torch.where(condition.data != 0, to_bits(x.data, dtype), to_bits(y.data, dtype))
    return Tensor(from_bits(data, dtype), dtype, joint_layout(condition, x, y))


def expand_dims(x: Tensor, axis: int) -> Tensor:
    axis = axis + x.rank + 1 if axis < 0 else axis
    layout = x.layout
    if isinstance(layout, SliceLayout):
        refuse(layout.dim != axis, f"expand_dims at {axis} of a layout sliced at {layout.dim}")
        layout = layout.parent
    return Tensor(x.data.unsqueeze(axis), x.dtype, layout)


def filled(shape, value, dtype, layout=None) -> Tensor:
    shape, value = static_shape(shape), _typed(value, dtype)
    bits = to_bits(value.data, dtype).expand(shape).clone()
    return Tensor(from_bits(bits, dtype), dtype, layout)


def block_data(x: Tensor, shape, dtype) -> torch.Tensor:
    """A scalar or block, broadcast to a shape, as data of a dtype."""
    return from_bits(to_bits(recast(x, dtype).data, dtype).expand(shape), dtype)


__all__ = ["Tensor", "binary", "data_dtype", "filled", "mixed", "static", "static_shape", "to_tensor", "where"]
