"""One call of an operation in the terms of the schema: inputs, axes with their extents, results, and its name."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows
from dsv4.kernels.contract import Contract, Output, tensors
from dsv4.probes.kernel_audit.trace.encoding import DTYPES, NotExpressible, Part, Slot, slot_of

VARIABLE = frozenset(  # axes whose extent a kernel must take as it comes; others are fixed by the model
    "batch tokens rows slots num_tokens num_rows num_entries windows ring_rows listed".split()
)
SHORT = {
    **dict(num_heads="h", head_dim="d", window_rows="w", topk="k", index_heads="h", index_dim="d", hidden="h"),
    **dict(out_features="n", in_features="k", experts="e", intermediate="i", groups="g", rank="r", streams="s"),
    **dict(dims="d", width="d", channels="d", columns="d", mixes="m", stream_dims="sd", page_size="ps"),
}
DERIVED = re.compile(r".*(_bytes|_blocks)|real_imag|page_bytes|twice_.*|mixes|stream_dims|parts|one|two")


@dataclass(frozen=True, eq=False)
class Result:
    """One output. counted: rows that exist where the last axes are pages; lead: extents that the first axis stands
    for; narrow: it travels as int32."""

    output: Output
    name: str
    axes: tuple[str, ...]
    dtype: str
    counted: int | None = None
    lead: tuple[int, ...] = ()

    def back(self, t: torch.Tensor) -> torch.Tensor:
        """What a Solution returned → what the contract promises."""
        if self.counted is not None:
            t = t.flatten(-2)[..., : self.counted]
        if self.lead:
            t = t.unflatten(0, self.lead)
        promised = getattr(torch, self.output.dtype, t.dtype)
        return t.to(promised) if t.dtype is torch.int32 else t


class Call:
    """arguments: of one case of the contract, or of one call of a kernel. extents(result, axis): the extent of an axis
    of a result where that is known. Raises NotExpressible."""

    def __init__(self, contract: Contract, arguments: tuple, extents: Callable[[str, str], int | None] | None = None):
        self.contract, self.extents = contract, extents or (lambda result, axis: None)
        self.narrow = any(isinstance(a, PackedRows) for a in arguments)
        self.slots: list[Slot] = [slot_of(a, v, self.narrow) for a, v in zip(contract.arguments, arguments)]
        self.sizes: dict[str, int] = {}
        self.renamed: dict[str, str] = {}
        self.parts = [self._named(part) for slot in self.slots for part in slot.parts]
        written = [contract.arguments[number] for number in contract.written]
        if written and (len(contract.outputs) > 1 or written[0].dtype != "activation"):
            names = ", ".join(argument.name for argument in written)
            raise NotExpressible(f"it writes {names} in place, and the schema has no state")
        self.results = [self._result(output) for output in contract.outputs]

    def _axis(self, axis: str, prefix: str, extent: int) -> str:
        """The name of an axis: another one where an argument has it, or where the name has another extent already."""
        if axis in {a.name for a in self.contract.arguments} | {o.name for o in self.contract.outputs}:
            axis = f"num_{axis}"
        if self.sizes.setdefault(axis, extent) != extent:
            if axis in {slot.lead[0] for slot in self.slots if slot.lead}:
                raise NotExpressible(f"leading axes {axis} of {prefix} are not those of the other inputs")
            axis = f"{prefix}_{axis}"
            self.sizes[axis] = extent
        return axis

    def _named(self, part: Part) -> Part:
        if part.axes is None:
            return part
        if 0 in part.value.shape:
            raise NotExpressible(f"input {part.name} is empty, and axes must be positive")
        axes = tuple(self._axis(axis, part.name, extent) for axis, extent in zip(part.axes, part.value.shape))
        return Part(part.name, axes, part.dtype, part.about, part.value, part.optional, part.byte)

    def _result(self, output: Output) -> Result:
        pages = {slot.pages[0]: slot.pages[1:] for slot in self.slots if slot.pages}
        leads = dict(slot.lead for slot in self.slots if slot.lead)
        axes, counted = [], None
        for axis in map(str, output.shape):
            if axis in pages and axis is output.shape[-1]:
                axes += [pages[axis][0], "page_size"]
                self.sizes["page_size"], counted = PAGE, pages[axis][1]
                continue
            axes.append(self._known(output.name, axis))
        taken = {part.name for part in self.parts}
        name = f"{output.name}_out" if output.name in taken else output.name
        dtype = self.activation if output.dtype == "activation" else output.dtype
        dtype = "int32" if self.narrow and dtype == "int64" else dtype
        if dtype not in DTYPES:
            raise NotExpressible(f"result {output.name} is {dtype}, which the schema does not have")
        return Result(output, name, tuple(axes), dtype, counted, leads.get(output.shape[0], ()))

    def _known(self, result: str, axis: str) -> str:
        """The axis of inputs that an axis of a result is, or a new one."""
        known = next((a for a in (axis, f"num_{axis}") if a in self.sizes), None)
        extent = self.extents(result, axis)
        if known and extent in (None, self.sizes[known]):
            return known
        if extent is None:
            raise NotExpressible(f"result {result} has an axis {axis} that no input has")
        alike = (a for a, n in self.sizes.items() if a.endswith(f"_{axis}") and n == extent)
        return next(alike, None) or self._axis(axis, result, extent)

    @cached_property
    def activation(self) -> str:
        """Schema dtype of the activations."""
        for slot in self.slots:
            if slot.argument.dtype == "activation" and slot.parts:
                return slot.parts[0].dtype
        return next((p.dtype for p in self.parts if p.dtype in ("float32", "bfloat16", "float16")), "float32")

    @cached_property
    def variable(self) -> frozenset[str]:
        """Axes that are `var`; each occurs in an input."""
        found = set(VARIABLE)
        for slot in self.slots:
            spec = slot.argument
            if spec.shape and spec.name in self.contract.batch:
                found.add(spec.shape[self.contract.batch[spec.name]])
            if spec.dtype == "rows" and len(spec.shape) > 1:
                found.add(spec.shape[-2])
            if slot.pages:
                found.add(slot.pages[1])
            if slot.lead:
                found.add(slot.lead[0])
        found |= {f"num_{axis}" for axis in found}
        inner = {axis for part in self.parts for axis in part.axes or ()}
        return frozenset(axis for axis in inner if axis in found)

    @cached_property
    def format(self) -> str:
        """'bf16', 'fp8', 'mxfp4_fp32', 'bf16_no_entries': formats of rows and weights, of activations where they are
        not bf16 beside them, and arguments that are None."""
        packed = [s.label for s in self.slots if s.parts and (s.pages or s.argument.dtype == "weight")]
        plain = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[self.activation]
        beside = plain == "bf16" and packed and not {"bf16", "fp32", "fp16"} & set(packed)
        words = packed if beside else [*packed, plain]
        absent = [s.label for s in self.slots if not s.parts]
        return "_".join(dict.fromkeys(w for w in [*words, *absent] if w))

    @cached_property
    def name(self) -> str:
        """`dsv4_<operation>_<format>_<const axes>`."""
        const = [(axis, size) for axis, size in self.sizes.items() if axis not in self.variable]
        halves = [(a.removesuffix("_bytes"), 2 * n) for a, n in const if a.endswith("_bytes") and a != "page_bytes"]
        const += [(a, n) for a, n in halves if a not in self.sizes]  # of E2M1 pairs, where no other input has the axis
        const = [(a, n) for a, n in const if not DERIVED.fullmatch(a) and not (a.endswith("_matrices") and n == 1)]
        words = [f"{short(axis)}{n}" for axis, n in const]
        return "_".join((f"dsv4_{self.contract.operation}_{self.format}", *words))


def short(axis: str) -> str:
    """'num_heads' → 'h'; an axis without an abbreviation is its name without underscores."""
    return SHORT.get(axis) or SHORT.get(axis.removeprefix("num_")) or axis.replace("_", "")


def extents_of(contract: Contract, results) -> Callable[[str, str], int | None]:
    """(result, axis) → its extent in the results of a call."""
    shapes = {o.name: dict(zip(map(str, o.shape), t.shape)) for o, t in zip(contract.outputs, tensors(results))}
    return lambda result, axis: shapes[result].get(axis) if len(shapes[result]) else None
