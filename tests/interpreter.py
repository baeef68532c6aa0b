"""Triton's interpreter without the work whose result it throws away: the same values and the same errors in a sixth of
the time.

tests/kernels/test_interpreter.py holds it against the interpreter as it comes.
"""

from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

PLAIN: dict[tuple[object, str], object] = {}  # what `lighten` replaced: (object, name) → as it comes


def lighten() -> None:
    """Make the interpreter of this process light."""
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    options = PLAIN.setdefault((builder, "options"), builder.options)
    if not options.debug:  # every sum of integers is taken again in int64, for an assertion that returns at once
        builder.options = replace(options, sanitize_overflow=False)
    made = {
        interpreter: {
            "_get_np_dtype": _numpy_types,
            "_patch_lang": Patches,
            "_patch_attr": _members,
            "_validate_np_data_size": _widths,
        },
        handle: {"__init__": _handles},
        tl.block_type: {"__init__": _block_types},
        tl.tensor: {"__init__": _tensors},
        tl.dtype: dict.fromkeys(("is_int", "is_int_signed", "is_int_unsigned", "is_floating"), _kinds),
        TritonSemantic: {
            "binary_op_type_checking_impl": _operands,
            "broadcast_impl_value": _broadcast,
            "cast": _casts,
        },
    }
    for thing, names in made.items():
        for name, light in names.items():
            setattr(thing, name, light(PLAIN.setdefault((thing, name), getattr(thing, name))))


def _sizes(kind) -> tuple[int, ...]:
    """The shape of a type as numbers, () of a scalar."""
    return tuple(kind.shape.values) if kind.is_block() else ()


def _numpy_types(plain):
    """_get_np_dtype, which makes a dictionary of all types for each look-up."""
    known = {}

    def found(kind):
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in known:
            known[scalar.name] = plain(scalar)
        return known[scalar.name]

    return found


def _widths(plain):
    """_validate_np_data_size, which asks twice whether a type is that of a pointer."""

    def fits(array, kind):
        return type(kind) is tl.pointer_type or array.itemsize * 8 <= max(8, kind.primitive_bitwidth)

    return fits


def _handles(plain):
    """TensorHandle.__init__, which asks three functions whether its numbers are as wide as its type."""

    def made(self, data, dtype, attr=None):
        if not interpreter._validate_np_data_size(data, dtype):
            plain(self, data, dtype)
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return made


def _kinds(plain):
    """What a dtype is, which is looked for in lists that are joined for each question: the same for each name."""
    known = {}

    def found(self):
        if self.name not in known:
            known[self.name] = plain(self)
        return known[self.name]

    return found


def _operands(plain):
    """binary_op_type_checking_impl, which compares types and shapes, and fills a block with each number beside one: two
    of one dtype and shape stay as they are, and a number fills one block for each dtype and shape."""
    filled, most = {}, 4096
    halves = tl.float16.name, tl.bfloat16.name

    def made(self, lhs, rhs, *allowed, **more):
        kinds = type(lhs), type(rhs)
        if more:
            return plain(self, lhs, rhs, *allowed, **more)
        if kinds == (tl.tensor, tl.tensor):
            same = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
            if same and not lhs.dtype.is_ptr() and lhs.dtype.name not in halves:  # halves are divided in fp32
                return lhs, rhs
            return plain(self, lhs, rhs, *allowed)
        number, both = int(kinds[1] in (int, float)), (lhs, rhs)
        block = both[1 - number]
        apart = kinds[number] in (int, float) and type(block) is tl.tensor and not block.dtype.is_ptr()
        if not apart or both[number] != both[number]:  # NaN cannot be found again
            return plain(self, lhs, rhs, *allowed)
        key = block.dtype.name, _sizes(block.type), kinds[number], both[number], number, allowed
        if key in filled:
            return (block, filled[key]) if number else (filled[key], block)
        both = plain(self, lhs, rhs, *allowed)
        if both[1 - number] is block:
            if len(filled) == most:
                filled.clear()
            filled[key] = both[number]
        return both

    return made


def _broadcast(plain):
    """broadcast_impl_value, which compares two shapes number by number: the same for each two shapes."""
    known = {}

    def joint(a: tuple, b: tuple) -> list[int] | None:
        fits = len(a) == len(b) and all(m == n or 1 in (m, n) for m, n in zip(a, b))
        return [max(m, n) for m, n in zip(a, b)] if fits else None

    def made(self, lhs, rhs):
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return plain(self, lhs, rhs)
        sizes = _sizes(lhs.type), _sizes(rhs.type)
        if sizes not in known:
            known[sizes] = joint(*sizes)
        shape = known[sizes]
        if shape is None:
            return plain(self, lhs, rhs)
        spread = lambda x: self.tensor(self.builder.create_broadcast(x.handle, shape), tl.block_type(x.dtype, shape))
        return tuple(x if list(own) == shape else spread(x) for x, own in zip((lhs, rhs), sizes))

    return made


def _casts(plain):
    """cast, which compares the types even if they are one."""

    def made(self, x, dst_ty, *rounding, **more):
        return x if x.dtype is dst_ty.scalar else plain(self, x, dst_ty, *rounding, **more)

    return made


def _block_types(plain):
    """block_type.__init__, which checks its shape and writes its name: the same for each shape."""
    known = {}

    def made(self, element_ty, shape):
        sizes = tuple([n.value if type(n) is tl.constexpr else n for n in shape])
        if not all(type(n) is int for n in sizes):
            plain(self, element_ty, shape)
        elif sizes not in known:
            plain(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty, (self.shape, self.numel, said) = element_ty, known[sizes]
            self.name = f"<{said}, {element_ty}>"

    return made


def _tensors(plain):
    """tensor.__init__, which wraps each number of its shape: the same for each shape."""
    known = {}

    def made(self, handle, type):
        sizes = _sizes(type)
        if sizes not in known:
            plain(self, handle, type)
            known[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[sizes]

    return made


def _members(plain):
    """_patch_attr, which copies the keywords of each call and checks that they have what it gave."""

    def patched(thing, name, member, builder, scope) -> None:
        def replacement(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        inner = getattr(member, "__wrapped__", member)
        scope.set_attr(thing, name, replacement)

    return patched


class Patches:
    """_patch_lang, which looks through triton.language for what to replace at each launch and at each call of a
    function by a kernel: looked through once, replaced at each launch, and not again while it lasts."""

    def __init__(self, plain):
        self.plain = plain
        self.replaced: dict[frozenset, list] = {}  # by the modules that a function sees: (object, name, replacement)
        self.launch: _Launch | None = None

    def __call__(self, function):
        seen = frozenset(value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core)
        launching = self.launch is None
        if not launching and seen in self.launch.seen:
            return interpreter._LangPatchScope()
        # as it comes, nobody restores what a call replaced
        scope = _Launch(self) if launching else interpreter._LangPatchScope()
        if seen in self.replaced:
            for thing, name, value in self.replaced[seen]:
                scope.set_attr(thing, name, value)
        else:
            scope._changes = self.plain(function)._changes
            self.replaced[seen] = [(thing, name, vars(thing)[name]) for thing, name, _ in scope._changes]
        if launching:
            self.launch = scope
        self.launch.seen.add(seen)
        return scope


class _Launch(interpreter._LangPatchScope):
    def __init__(self, patches: Patches):
        super().__init__()
        self.patches, self.seen = patches, set()

    def restore(self) -> None:
        super().restore()
        self.patches.launch = None
