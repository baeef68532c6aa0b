"""Emulations of triton.experimental.gluon.language and triton.language: functions by the names that kernels use."""

import builtins
import functools

import torch
import triton.language as tl

from tests.gluon.dtypes import from_bits, to_bits
from tests.gluon.errors import UnknownName, refuse
from tests.gluon.hopper import Accumulator
from tests.gluon.values import (
    Tensor,
    binary,
    expand_dims,
    filled,
    joint_layout,
    mixed,
    recast,
    static,
    static_shape,
    to_tensor,
    where,
)

# Values ---------------------------------------------------------------------------------------------------------------


def arange(start, end, layout=None):
    start, end = static(start, "the start of arange"), static(end, "the end of arange")
    size = end - start
    refuse(size <= 0 or size & (size - 1) != 0, f"arange of {size} numbers, no power of two")
    return Tensor(torch.arange(start, end, dtype=torch.int32), tl.int32, layout)


def full(shape, value, dtype, layout=None):
    return filled(shape, value, dtype, layout)


def zeros(shape, dtype, layout=None):
    return filled(shape, 0, dtype, layout)


def full_like(input, value, shape=None, dtype=None, layout=None):
    return filled(input.shape if shape is None else shape, value, dtype or input.dtype, layout or input.layout)


def zeros_like(input, shape=None, dtype=None, layout=None):
    return full_like(input, 0, shape, dtype, layout)


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return recast(input, dtype, bitcast)


def convert_layout(value, layout, assert_trivial=False):
    refuse(isinstance(value, Accumulator), "an accumulator is used (convert_layout) before warpgroup_mma_wait")
    return Tensor(value.data, value.dtype, layout)


set_auto_layout = convert_layout


# Shapes ---------------------------------------------------------------------------------------------------------------


def _sizes(shape) -> list[int]:
    return static_shape(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, builtins.tuple)) else shape)


def reshape(input, *shape, can_reorder=False):
    refuse(can_reorder, "reshape with can_reorder has no emulation")
    return Tensor(input.data.reshape(_sizes(shape)), input.dtype)


def permute(input, *dims):
    return Tensor(input.data.permute(_sizes(dims)), input.dtype)


def ravel(x):
    return reshape(x, x.data.numel())


def join(a, b):
    a, b = mixed(a, b)
    pair = torch.stack(torch.broadcast_tensors(to_bits(a.data, a.dtype), to_bits(b.data, b.dtype)), -1)
    return Tensor(from_bits(pair, a.dtype), a.dtype)


def split(a):
    refuse(a.shape[-1:] != [2], f"split of {a.shape}")
    return builtins.tuple(Tensor(a.data[..., i], a.dtype) for i in (0, 1))


def broadcast(input, other):
    both = torch.broadcast_tensors(input.data, other.data)
    return builtins.tuple(Tensor(d, t.dtype, joint_layout(input, other)) for d, t in zip(both, (input, other)))


# Arithmetic -----------------------------------------------------------------------------------------------------------


def cdiv(x, div):
    return (x + (div - 1)) // div


def add(x, y):
    return binary("add", x, y)


def sub(x, y):
    return binary("sub", x, y)


def mul(x, y):
    return binary("mul", x, y)


def _extreme(x, y, most: bool, nan) -> Tensor:
    """A number is greater and smaller than NaN, unless NaN propagates. bf16 becomes fp32, and a number of the source
    takes part in the choice of the dtype."""
    x, y = (recast(t, tl.float32) if t.dtype == tl.bfloat16 else t for t in map(to_tensor, (x, y)))
    x, y = mixed(x, y)
    if x.dtype.is_floating():
        spread = torch.maximum if most else torch.minimum
        keep = torch.fmax if most else torch.fmin
        data = (spread if nan is tl.PropagateNan.ALL else keep)(x.data, y.data)
    else:
        refuse(x.dtype.name == "uint64", "maximum and minimum of uint64 have no emulation")
        data = (torch.maximum if most else torch.minimum)(x.data, y.data)
    return Tensor(data, x.dtype, joint_layout(x, y))


def maximum(x, y, propagate_nan=tl.PropagateNan.NONE):
    return _extreme(x, y, True, propagate_nan)


def minimum(x, y, propagate_nan=tl.PropagateNan.NONE):
    return _extreme(x, y, False, propagate_nan)


def _unary(function):
    @functools.wraps(function)
    def call(x):
        x = to_tensor(x)
        refuse(x.dtype.name not in ("fp32", "fp64"), f"{function.__name__} of {x.dtype}")
        return Tensor(function(x.data), x.dtype, x.layout)

    return call


exp, exp2, log, log2 = map(_unary, (torch.exp, torch.exp2, torch.log, torch.log2))
sqrt, sqrt_rn, rsqrt, erf = map(_unary, (torch.sqrt, torch.sqrt, torch.rsqrt, torch.erf))
sin, cos, floor, ceil = map(_unary, (torch.sin, torch.cos, torch.floor, torch.ceil))


def abs(x):
    return builtins.abs(to_tensor(x))


def fdiv(x, y, ieee_rounding=False):
    return binary("truediv", x, y)


div_rn = fdiv


def fma(x, y, z):
    x, y = mixed(to_tensor(x), to_tensor(y))
    x, z = mixed(x, to_tensor(z))
    refuse(x.dtype != tl.float32, f"fma of {x.dtype} has no emulation")
    exact = x.data.double() * recast(y, x.dtype).data.double() + z.data.double()
    return Tensor(exact.float(), x.dtype, joint_layout(x, y, z))


def umulhi(x, y):
    x, y = mixed(to_tensor(x), to_tensor(y))
    refuse(x.dtype.name not in ("int32", "uint32"), f"umulhi of {x.dtype} has no emulation")
    high = (x.data.to(torch.int64) & 0xFFFFFFFF) * (y.data.to(torch.int64) & 0xFFFFFFFF) >> 32
    return recast(Tensor(high & 0xFFFFFFFF, tl.uint32, joint_layout(x, y)), x.dtype)


def gather(src, index, axis):
    place = index.data.to(torch.int64)
    refuse(bool(((place < 0) | (place >= src.shape[axis])).any()), f"gather beyond {src.shape}")
    return Tensor(from_bits(to_bits(src.data, src.dtype).gather(axis, place), src.dtype), src.dtype, index.layout)


# What the compiler is told --------------------------------------------------------------------------------------------


def static_assert(condition, message=""):
    refuse(isinstance(condition, Tensor), "static_assert of a tensor")
    refuse(not condition, f"static_assert: {message}")


def device_assert(condition, message="", mask=None):
    holds = to_tensor(condition).data | ~to_tensor(True if mask is None else mask).data
    refuse(not bool(holds.all()), f"device_assert: {message}")


def assume(condition):
    device_assert(condition, "assume")


def multiple_of(input, values):
    values = values if isinstance(values, (list, builtins.tuple)) else [values]
    refuse(len(values) == 1 and bool((input.data.reshape(-1)[:1] % values[0] != 0).any()), f"no multiple of {values}")
    return input


def max_contiguous(input, values):
    return input


max_constancy = max_contiguous


def static_print(*values, **_):
    print(*values)


device_print = static_print


def static_range(*bounds, **_):
    return range(*(static(b, "a bound of static_range") for b in bounds))


def dynamic_range(*bounds, **_):
    """range in a kernel: its variable is a tensor."""
    return map(to_tensor, range(*(int(to_tensor(b).data) for b in bounds)))


def smaller(*values):
    """Python's min in a kernel."""
    return minimum(*values) if any(isinstance(v, Tensor) for v in values) else builtins.min(*values)


def greater(*values):
    """Python's max in a kernel."""
    return maximum(*values) if any(isinstance(v, Tensor) for v in values) else builtins.max(*values)


def unknown(name: str):
    """What stands for a name that has no emulation, until it is called."""

    def call(*_, **__):
        raise UnknownName(f"the emulator does not know {name}")

    return call


__all__ = ["expand_dims", "unknown", "where"]
