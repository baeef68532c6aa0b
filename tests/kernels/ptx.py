"""PTX on the host: inline assembly, which Triton's interpreter lacks, instruction by instruction.

`compiled` makes the interpreter take the paths of a GPU: assembly runs here, and products of bf16 are what a GPU makes
of them.
"""

import re

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

U32 = np.uint32


def widen(halves: np.ndarray) -> np.ndarray:
    """bf16 bits → fp32."""
    return (halves.astype(U32) << U32(16)).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """fp32 → bf16 bits, ties to even; a GPU's NaN is 0x7FFF."""
    bits = x.astype(np.float32).view(U32)
    up = (bits.astype(np.uint64) + 0x7FFF + ((bits >> U32(16)) & U32(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, up).astype(U32)


def halves(function, *registers):
    """A bf16x2 instruction: function on both halves in fp32."""
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = (narrow(function(*(widen((r >> U32(16 * i)) & U32(0xFFFF)) for r in registers))) for i in range(2))
    return low | (high << U32(16))


def permute(a, b, selector):
    """prmt.b32: byte i of the result is byte (selector nibble i) of a and b, or its sign eight times."""
    both, out = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), U32(0)
    for i in range(4):
        nibble = (selector >> U32(4 * i)) & U32(15)
        byte = (both >> (nibble & U32(7)).astype(np.uint64) * np.uint64(8)).astype(U32) & U32(0xFF)
        out = out | (np.where(nibble & U32(8), (byte >> U32(7)) * U32(0xFF), byte) << U32(8 * i))
    return out


def table(a, b, c, function):
    """lop3.b32: bit (a, b, c) of the function, for each bit."""
    out = U32(0)
    for i in range(8):
        if function >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return out


OPERATIONS = {
    "mov.b32": lambda a, *b: a | b[0] << U32(16) if b else a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "prmt.b32": permute,
    "lop3.b32": lambda a, b, c, d: table(a, b, c, int(d)),
    "fma.rn.bf16x2": lambda a, b, c: halves(lambda x, y, z: x * y + z, a, b, c),
    "min.NaN.bf16x2": lambda a, b: halves(np.minimum, a, b),
    "max.NaN.bf16x2": lambda a, b: halves(np.maximum, a, b),
}


def run(program: str, outputs: int, *inputs) -> list[np.ndarray]:
    """$0 … of a PTX block whose inputs follow its outputs."""
    registers = {f"${outputs + i}": np.asarray(value, U32) for i, value in enumerate(inputs)}
    for line in program.split(";"):
        line = line.strip().removeprefix("{ ").removesuffix("}").strip()
        if line and not line.startswith(".reg"):
            name, operands = line.split(None, 1)
            if name == "bar.warp.sync":
                continue
            target, *sources = re.split(r",\s*(?![^{]*})", operands)
            values = [registers[v] if v in registers else U32(int(v, 0)) for source in sources for v in names(source)]
            result = np.asarray(OPERATIONS[name](*values), U32)
            for i, half in enumerate(names(target)):  # two names: halves
                registers[half] = (result >> U32(16 * i)) & U32(0xFFFF) if target[0] == "{" else result
    return [registers[f"${i}"] for i in range(outputs)]


def names(operand: str) -> list[str]:
    """a, or a and b of {a, b}."""
    return re.split(r",\s*", operand.strip("{}"))


def pairs(register: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return widen(register & U32(0xFFFF)), widen(register >> U32(16))


class Results:
    def __init__(self, handles):
        self.get_result = handles.__getitem__


def _assembly(self, program, constraints, values, types, pure, pack):
    """`pack` elements in as few registers as hold them. Which ones is the compiler's choice: here, by lot."""
    shape, size = values[0].data.shape, values[0].data.size
    lot = np.random.default_rng(0).permutation(size)
    registers = []
    for value in values:
        bits = np.ascontiguousarray(value.data).reshape(-1)[lot].reshape(-1, pack)
        bits = bits.view(np.dtype(f"u{bits.itemsize}"))
        registers += list((bits.view(U32) if bits.itemsize * pack >= 4 else bits.astype(U32)).T)
    outputs = constraints.count("=")
    inputs = [c for c in constraints.split(",") if c[0] not in "=~"]
    assert len(registers) == len(inputs), "registers of the operands and constraints differ"
    out = [np.broadcast_to(r, registers[0].shape) for r in run(program, outputs, *registers)]
    handles = []
    for element in (getattr(t, "scalar", t) for t in types):
        count, kind = (
            max(1, element.primitive_bitwidth * pack // 32),
            np.uint16 if element.primitive_bitwidth == 16 else np.int32,
        )
        part, out = np.ascontiguousarray(np.stack(out[:count], -1)), out[count:]
        part = part.astype(kind) if element.primitive_bitwidth * pack < 32 else part.view(kind)
        data = np.empty(size, kind)
        data[lot] = part.reshape(-1)
        data = data.view({tl.float16: np.float16, tl.float32: np.float32}.get(element, kind))
        handles.append(TensorHandle(data.reshape(shape), element))
    assert not out, "registers of the results and constraints differ"
    return Results(handles)


def _dot(self, a, b, d, precision, imprecise):
    a, b = (widen(t.data) if t.dtype == tl.bfloat16 else t.data for t in (a, b))
    return TensorHandle(np.matmul(a, b, dtype=np.float32) + d.data.astype(np.float32), d.dtype.scalar)


def compiled(monkeypatch, *modules) -> None:
    """`modules` decide by dot_in_fp32: for bf16 they take the path of a GPU from here on."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", _assembly)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    for module in modules:
        monkeypatch.setattr(module, "dot_in_fp32", lambda x: x.dtype.itemsize == 4)
