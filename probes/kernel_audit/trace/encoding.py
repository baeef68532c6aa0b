"""How the arguments of a contract travel through the FlashInfer-Trace schema, which has dense tensors and numbers.

A pool of packed rows becomes its bytes as int8 [pages, page bytes], a quantised weight its codes and scales, a complex
tensor pairs of fp32, None no input at all. Hints are left out. Each `Slot` says by an expression how the reference
makes the argument of its inputs again.
"""

from dataclasses import dataclass, replace

import torch

from dsv4.kernels.cache_rows import PackedRows
from dsv4.kernels.contract import Argument
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.quantize import PackedWeight, WeightFormat

DTYPES = frozenset(
    {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "bool"}
)
BYTES = {torch.uint8: "torch.uint8", torch.float8_e8m0fnu: "torch.float8_e8m0fnu"}  # both travel as int8


class NotExpressible(UnsupportedInput):
    """A call that the schema cannot say: which argument, and why."""


@dataclass(frozen=True, eq=False)
class Part:
    """One input of a definition. axes: names, None for a number; value: what travels; byte: it holds bytes, which
    FlashInfer's own dialect calls uint8."""

    name: str
    axes: tuple[str, ...] | None
    dtype: str
    about: str
    value: object
    optional: bool = False
    byte: bool = False


@dataclass(frozen=True, eq=False)
class Slot:
    """One argument of the contract. code: how the reference makes it of the parts, None for a hint that is left out;
    label: its number format, '' where it says nothing; pages: (axis of rows, axis of pages, rows that exist) of packed
    rows; lead: (axis, extents) where leading axes travel as one."""

    argument: Argument
    parts: tuple[Part, ...]
    code: str | None
    label: str = ""
    pages: tuple[str, str, int] | None = None
    lead: tuple[str, tuple[int, ...]] | None = None


def slot_of(spec: Argument, value, narrow: bool) -> Slot:
    """How one argument travels. narrow: int64 tensors travel as int32, as public kernels of packed rows take them.
    Raises NotExpressible."""
    match value:
        case _ if spec.hint:
            return Slot(spec, (), None)
        case None:
            return Slot(spec, (), "None", f"no_{spec.name}")
        case PackedRows():
            return _rows(spec, value)
        case PackedWeight():
            return _weight(spec, value)
        case tuple() | list() if all(isinstance(v, torch.Tensor) for v in value) and len({v.shape for v in value}) == 1:
            found = _tensor(spec, torch.stack(tuple(value)), narrow)
            return Slot(spec, found.parts, f"tuple({found.code}.unbind(0))", found.label)
        case tuple() | list() if value and all(isinstance(v, PackedWeight) for v in value):
            inner = replace(spec, shape=spec.shape[-value[0].weight.ndim :])
            each = [_weight(inner, v, f"{spec.name}_{i}") for i, v in enumerate(value)]
            code = f"({', '.join(s.code for s in each)},)"
            return Slot(spec, sum((s.parts for s in each), ()), code, "_".join(dict.fromkeys(s.label for s in each)))
        case torch.Tensor():
            return _tensor(spec, value, narrow)
        case bool() | int() | float() if spec.shape is None and spec.dtype in DTYPES:
            return Slot(spec, (Part(spec.name, None, spec.dtype, spec.about, value, spec.optional),), spec.name)
    if (fixed := _fixed(value)) is not None:  # it is part of the definition
        return Slot(spec, (), fixed[0], f"{spec.name}_{fixed[1]}")
    raise NotExpressible(f"argument {spec.name} is a {_kind(value)}, expected tensors or a number")


def _fixed(value) -> tuple[str, str] | None:
    """(Python source, letters and digits) of a dtype, a word, or a tuple of dtypes, bools and None."""
    if isinstance(value, torch.dtype):
        return str(value), _short(value)
    if isinstance(value, str) and value.isidentifier():
        return repr(value), value
    if value is None or isinstance(value, bool):
        return repr(value), {None: "none", True: "yes", False: "no"}[value]
    if type(value) is tuple and value and all(_fixed(v) is not None for v in value):
        codes, words = zip(*(_fixed(v) for v in value))
        return f"({', '.join(codes)},)", "_".join(words)
    return None


def _kind(value) -> str:
    parts = value if isinstance(value, tuple | list) else ()
    inner = {type(v).__name__ for v in parts if v is not None}
    return type(value).__name__ + (f" of {', '.join(sorted(inner))}" if inner else "")


def part(name: str, axes: tuple[str, ...], t: torch.Tensor, about: str, optional=False) -> tuple[Part, str]:
    """A tensor as the schema knows it, and the expression that makes it again. Raises NotExpressible."""
    if t.dtype in BYTES:
        found = Part(name, axes, "int8", about, t.contiguous().view(torch.int8), optional, byte=True)
        return found, f"{name}.view({BYTES[t.dtype]})"
    if t.dtype is torch.complex64:
        pairs = torch.view_as_real(t.resolve_conj()).contiguous()
        return Part(name, (*axes, "real_imag"), "float32", f"{about}; real and imaginary part", pairs, optional), (
            f"torch.view_as_complex({name})"
        )
    dtype = str(t.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise NotExpressible(f"input {name} is {dtype}, which the schema does not have")
    return Part(name, axes, dtype, about, t.contiguous(), optional), name


def _tensor(spec: Argument, t: torch.Tensor, narrow: bool) -> Slot:
    axes, lead = tuple(str(a) if isinstance(a, str) else f"size_{a}" for a in spec.shape or ()), None
    if spec.shape is None or t.ndim < len(axes):
        raise NotExpressible(f"argument {spec.name} has {t.ndim} axes, expected {len(axes)}")
    if t.ndim > len(axes):
        if not axes:
            raise NotExpressible(f"argument {spec.name} has {t.ndim} axes that the contract does not name")
        extra = t.ndim - len(axes) + 1
        lead = axes[0], tuple(t.shape[:extra])
        t = t.flatten(0, extra - 1)
    code = ""
    if narrow and t.dtype is torch.int64:
        t, code = t.int(), ".long()"
    found, expression = part(spec.name, axes, t, spec.about, spec.optional)
    label = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(found.dtype, "")
    return Slot(spec, (found,), expression + code, label if spec.dtype in ("activation", "rows") else "", None, lead)


def pages_axis(rows: str) -> str:
    """'window_slots' → 'window_pages', 'num_entries' → 'num_pages'."""
    stem = next((rows.removesuffix(end) for end in ("_slots", "_entries", "_rows") if rows.endswith(end)), rows)
    return f"{stem}_pages"


def _rows(spec: Argument, rows: PackedRows) -> Slot:
    label, about = rows.format.option, rows.format.about
    layout, axis = rows.layout, spec.shape[-2]
    about = about.format(payload=layout.payload, rope=rows.rope)
    about = f"{spec.about}; pages of 64 rows, payloads before scales, {about}; {layout.page} bytes a page"
    axes = (*spec.shape[:-2], pages_axis(axis), "page_bytes")
    if rows.data.ndim != len(axes):
        raise NotExpressible(f"argument {spec.name} is a pool of {rows.data.ndim} axes, expected {len(axes)}")
    found, code = part(spec.name, axes, rows.data, about, spec.optional)
    code = f"PackedRows({rows.format.name}, {code}, {rows.width}, {rows.rope}, 64 * {spec.name}.shape[-2])"
    return Slot(spec, (found,), code, label, (axis, axes[-2], rows.count))


def _weight(spec: Argument, w: PackedWeight, name: str = "") -> Slot:
    name = name or spec.name
    *lead, rows, columns = spec.shape if spec.shape and len(spec.shape) >= 2 else (None, None)
    if rows is None or w.weight.ndim != len(spec.shape):
        raise NotExpressible(f"argument {name} is a weight of {w.weight.ndim} axes, expected {spec.shape}")
    if w.format is WeightFormat.DENSE:
        found, code = part(name, tuple(spec.shape), w.weight, spec.about)
        return Slot(spec, (found,), f"PackedWeight(WeightFormat.DENSE, {code})", _short(w.weight.dtype))
    halves = w.format is not WeightFormat.FP8
    about = {
        WeightFormat.FP8: f"codes; a scale for {w.block[0]} × {w.block[1]}",
        WeightFormat.MXFP4: "pairs of E2M1 codes, low nibble first; a scale for 32 columns",
        WeightFormat.NVFP4: "pairs of E2M1 codes, low nibble first; a scale for 16 columns, one for each matrix",
    }[w.format]
    axes = (*lead, rows, f"{columns}_bytes" if halves else columns)
    codes, code = part(name, axes, w.weight, f"{spec.about}: {about}")
    axes = (*lead, rows if halves else f"{rows}_blocks", f"{columns}_blocks")
    kind = "E8M0, 2^(byte − 127)" if w.scale.dtype is torch.float8_e8m0fnu else _short(w.scale.dtype)
    scale, more = part(f"{name}_scale", axes, w.scale, f"block scales of {name}, {kind}")
    parts, code = [codes, scale], f"PackedWeight(WeightFormat.{w.format.name}, {code}, {more}"
    if w.global_scale is not None:
        top, more = part(f"{name}_global_scale", (*lead, f"{name}_matrices"), w.global_scale, f"scales of {name}")
        parts.append(top)
    code += f", {more if w.global_scale is not None else None}, {tuple(w.block)})"
    fp32 = "_fp32_scales" if w.format is WeightFormat.FP8 and w.scale.dtype is torch.float32 else ""
    return Slot(spec, tuple(parts), code, w.format.value + fp32)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", torch.float8_e4m3fn: "E4M3"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
