"""Triton's dtypes as torch holds them: in registers (`data`) and in memory (`bits`, integers of the same size).

Unsigned integers of 16 and 32 bits are int64 in registers, because torch has no arithmetic for them. Those of 64 bits
are int64 of the same bits. Pointers are int64 addresses in bytes.
"""

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic

from tests.gluon.errors import EmulationError, refuse

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
DATA = {
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.int64,
    "uint32": torch.int64,
    "uint64": torch.int64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
WIDENED = {"uint16": 0xFFFF, "uint32": 0xFFFFFFFF}
OF_TORCH = {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e8m0fnu: tl.uint8,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
RULES = TritonSemantic.__new__(TritonSemantic)  # whose rules for mixed dtypes need no builder


def size_of(dtype) -> int:
    """Bytes of an element in memory."""
    return 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)


def bits_dtype(dtype) -> torch.dtype:
    return BITS[size_of(dtype)]


def data_dtype(dtype) -> torch.dtype:
    if dtype.is_ptr():
        return torch.int64
    if dtype.name not in DATA:
        raise EmulationError(f"dtype {dtype} has no emulation")
    return DATA[dtype.name]


def to_bits(data: torch.Tensor, dtype) -> torch.Tensor:
    if not dtype.is_ptr() and (dtype.name in WIDENED or dtype.name == "int1"):
        return data.to(bits_dtype(dtype))
    return data.view(bits_dtype(dtype))


def from_bits(bits: torch.Tensor, dtype) -> torch.Tensor:
    if dtype.is_ptr():
        return bits
    if dtype.name in WIDENED:
        return bits.to(torch.int64) & WIDENED[dtype.name]
    return bits != 0 if dtype.name == "int1" else bits.view(DATA[dtype.name])


def wrapped(data: torch.Tensor, dtype) -> torch.Tensor:
    """Integers of any width as `data` of an integer dtype, modulo its range."""
    if dtype.name in WIDENED:
        return data.to(torch.int64) & WIDENED[dtype.name]
    return data.to(DATA[dtype.name])


def number_dtype(number):
    """The dtype that Triton gives a Python number."""
    if isinstance(number, bool):
        return tl.int1
    if isinstance(number, float):
        return tl.float32
    if -(2**31) <= number < 2**31:
        return tl.int32
    return tl.uint32 if 0 <= number < 2**32 else tl.int64 if number < 2**63 else tl.uint64


def number_data(number, dtype) -> torch.Tensor:
    """A Python number as a scalar of a dtype."""
    if dtype.is_int() and not isinstance(number, float):
        number = int(number)
        number = number - 2**64 if number >= 2**63 else number
        return cast(torch.tensor(number, dtype=torch.int64), tl.int64, dtype)
    return cast(torch.tensor(number, dtype=torch.float64), tl.float64, dtype)


def cast(data: torch.Tensor, source, target) -> torch.Tensor:
    """Values of dtype source in dtype target, as `Tensor.to` converts them."""
    if source.is_ptr() or target.is_ptr():
        refuse(not all(t.is_ptr() or t.name in ("int64", "uint64") for t in (source, target)), f"{source} to {target}")
    if source == target or source.is_ptr() or target.is_ptr():
        return data
    kind = data_dtype(target)
    if target.is_int1():
        return data != 0
    if target.is_int():
        return wrapped(data if source.is_int() else _truncated(data, target), target)
    if source.is_int():
        exact = data.double() + (2.0**64) * (data < 0) if source.name == "uint64" else data
        return exact.to(kind)
    if target.is_fp8():  # finite values beyond the range become the largest, and so do infinities
        most = torch.finfo(kind).max
        return data.float().clamp(-most, most).to(kind)
    return data.float().to(kind) if source.is_fp8() else data.to(kind)


def _truncated(data: torch.Tensor, target) -> torch.Tensor:
    """Floats as int64, towards zero; the ends of the target's range beyond it, and 0 for NaN."""
    signed = target.is_int_signed()
    bits = target.primitive_bitwidth - signed
    low, high = -(2.0**bits) if signed else 0.0, min(2.0**bits - 1, 2.0**63 - 1024)
    return data.double().nan_to_num(0.0, high, low).trunc().clamp(low, high).to(torch.int64)


def bitcast(data: torch.Tensor, source, target) -> torch.Tensor:
    refuse(
        size_of(source) != size_of(target) and not (source.is_ptr() and target.is_ptr()),
        f"bitcast of {source} to {target}, of another size",
    )
    return from_bits(to_bits(data, source), target)
