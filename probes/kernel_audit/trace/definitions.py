"""Definitions of FlashInfer-Trace from contracts.

Dialects: `fib` (flashinfer-bench), `sol` (SOL-ExecBench), `flashinfer` (the trace dump of FlashInfer itself).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from dsv4.kernels.contract import SET, Case, Contract
from dsv4.kernels.drawing import Draw
from dsv4.kernels.widths import Widths
from dsv4.probes.kernel_audit.trace.call import Call, extents_of
from dsv4.probes.kernel_audit.trace.encoding import NotExpressible
from dsv4.probes.kernel_audit.trace.reference import reference_text

DIALECTS = ("fib", "sol", "flashinfer")
UNSAID = (
    "Not said by this schema: strides and alignment of inputs, which bytes may not be read (they may be NaN), state "
    "that is kept between calls, CUDA graphs. `dsv4 kernel audit` asks for these."
)


@dataclass(frozen=True, eq=False)
class Exported:
    """One case: its definition (dialect fib) with the call that it was made of."""

    definition: dict
    call: Call
    case: Case
    dtype: torch.dtype


@dataclass
class Exporter:
    """Cases of one contract as definitions. skipped: why → how many cases cannot be said."""

    contract: Contract
    widths: Widths
    seed: int = 0
    dtypes: tuple[torch.dtype, ...] | None = None
    definitions: dict[str, dict] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    def cases(self) -> Iterator[Exported]:
        """One case after another, in the order of the contract; each is drawn when it is asked for."""
        for dtype in self.dtypes or self.contract.dtypes:
            for case in self.contract.cases(self.widths, Draw(self.seed, dtype)):
                try:
                    call = call_of(self.contract, case.arguments)
                    yield Exported(self._definition(call), call, case, dtype)
                except NotExpressible as why:
                    self.skipped[str(why)] = self.skipped.get(str(why), 0) + 1

    def _definition(self, call: Call) -> dict:
        made = definition(call)
        if self.definitions.setdefault(call.name, made) != made:
            raise NotExpressible(f"{call.name} already names a definition with other axes or another reference")
        return self.definitions[call.name]


def call_of(contract: Contract, arguments: tuple) -> Call:
    """The call with these arguments. Only where its results cannot be sized by the inputs, they are computed to see
    their extents. Raises NotExpressible."""
    inner = {axis for argument in contract.arguments for axis in argument.shape or ()}
    alone = any(axis not in inner for output in contract.outputs for axis in output.shape)
    several = any(type(argument) is tuple for argument in arguments)  # as many axes of one name
    return Call(contract, arguments, extents_of(contract, contract.exact(*arguments)) if alone or several else None)


def definition(call: Call) -> dict:
    """A Definition in the dialect fib, as plain data."""
    contract, variable = call.contract, call.variable
    tags = ["model:deepseek-v4", f"dsv4:{contract.operation}", *_formats(call)]
    if any("−inf" in o.about for o in contract.outputs):
        tags.append("dsv4:outputs=neginf")
    if any(o.rule == SET for o in contract.outputs):
        tags.append("dsv4:outputs=any-order")
    axes = {
        axis: {"type": "var"} if axis in variable else {"type": "const", "value": size}
        for axis, size in call.sizes.items()
    }
    return {
        "name": call.name,
        "op_type": f"dsv4_{contract.operation}",
        "description": _described(call),
        "tags": tags,
        "axes": axes,
        "inputs": {part.name: _tensor(part.axes, part.dtype, part.about) for part in call.parts},
        "outputs": {r.name: _tensor(r.axes, r.dtype, _result_text(r)) for r in call.results},
        "reference": reference_text(call),
    }


def _tensor(axes, dtype: str, about: str) -> dict:
    return {"shape": None if axes is None else list(axes), "dtype": dtype, "description": about}


def _result_text(result) -> str:
    text = "; ".join(part for part in (result.output.about, result.output.liberty) if part)
    return text + ("; rows behind the last that exists are −inf" if result.counted is not None else "")


def _described(call: Call) -> str:
    contract = call.contract
    lines = [contract.about, *(f"{edge[0].upper()}{edge[1:]}." for edge in contract.edges)]
    for slot in call.slots:
        if slot.code == "None":
            lines.append(f"Without {slot.argument.name}.")
    for output in contract.outputs:
        if output.argument is not None:
            lines.append(f"In dsv4, {output.name} is written over {contract.arguments[output.argument].name}.")
    left = [slot.argument.name for slot in call.slots if slot.code is None]
    lines += [f"Left out, as hints: {', '.join(left)}."] if left else []
    return " ".join((*lines, UNSAID))


def _formats(call: Call) -> list[str]:
    found = {"fp8": "float8_e4m3fn", "fp4": "float4_e2m1", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
    return [f"quantization:{found[word]}" for word in call.format.split("_") if word in found]


def in_dialect(made: dict, dialect: str, call: Call) -> dict:
    """A definition of the dialect fib in another one. sol: fields that it does not have are left out. flashinfer: bytes
    are uint8, and arguments that may be None are `optional`; flashinfer-bench refuses such files."""
    if dialect == "sol":
        return {key: value for key, value in made.items() if key != "tags"}
    if dialect == "fib":
        return made
    inputs = {name: dict(spec) for name, spec in made["inputs"].items()}
    for part in call.parts:
        inputs[part.name] |= {"dtype": "uint8"} if part.byte else {}
        inputs[part.name] |= {"optional": True} if part.optional else {}
    return made | {"inputs": inputs}
