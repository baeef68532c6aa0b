"""A kernel's own Python, with emulations in place of what it names of Triton."""

import ast
import inspect
import textwrap
from functools import cache
from types import CodeType, ModuleType

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language.extra import cuda
from triton.runtime.jit import ConstexprFunction, JITFunction

from tests.gluon import language as emulated
from tests.gluon import reductions
from tests.gluon.errors import EmulationError, UnknownName, refuse
from tests.gluon.hopper import Hopper
from tests.gluon.language import unknown
from tests.gluon.memory import Shared
from tests.gluon.running import Language
from tests.gluon.values import NUMBERS, Tensor, to_tensor

VALUES = (
    "arange full zeros full_like zeros_like cast set_auto_layout reshape permute ravel join split "
    "broadcast cdiv add sub mul maximum minimum exp exp2 log log2 sqrt sqrt_rn rsqrt erf sin cos floor ceil abs fdiv "
    "div_rn fma umulhi gather static_assert device_assert "
    "assume multiple_of max_contiguous max_constancy static_print device_print static_range where expand_dims"
).split()
REDUCTIONS = "reduce max min sum xor_sum reduce_or associative_scan cumsum".split()
RUNNING = (
    "program_id num_programs num_warps num_ctas load store allocate_shared_memory warp_specialize "
    "inline_asm_elementwise atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor atomic_xchg atomic_cas"
).split()
MBARRIER = "init invalidate expect arrive wait".split()


def _pairs(running: Language, device: Hopper):
    """(module, name, emulation) of everything known; names that this Triton lacks are left out below."""
    for module in (gl, tl, tl.math):
        yield from ((module, name, getattr(emulated, name)) for name in VALUES)
        yield from ((module, name, running.exchanging(getattr(reductions, name))) for name in REDUCTIONS)
        yield module, "convert_layout", running.exchanging(emulated.convert_layout)
        yield from ((module, name, getattr(running, name)) for name in RUNNING)
        yield module, "range", emulated.dynamic_range
        yield module, "to_tensor", to_tensor
        yield module, "constexpr", lambda x: x
        yield module, "tuple", tuple
        for name in ("barrier", "thread_barrier", "debug_barrier"):
            yield module, name, running.barrier
    for module in (ampere.mbarrier, hopper.mbarrier):
        yield from ((module, name, getattr(device, name)) for name in MBARRIER)
        yield module, "allocate_mbarrier", running.allocate_mbarrier
    yield hopper.tma, "async_copy_global_to_shared", device.tma_load
    yield hopper.tma, "async_copy_shared_to_global", device.tma_store
    yield hopper.tma, "store_wait", device.store_wait
    yield ampere.async_copy, "async_copy_global_to_shared", device.copy
    yield ampere.async_copy, "mbarrier_arrive", device.copies_arrive
    yield ampere.async_copy, "commit_group", device.commit_group
    yield ampere.async_copy, "wait_group", device.wait_group
    yield hopper, "fence_async_shared", device.fence_async_shared
    yield hopper, "warpgroup_mma", device.mma
    yield hopper, "warpgroup_mma_wait", device.mma_wait
    yield hopper, "warpgroup_mma_init", device.mma_init
    for name in ("gdc_wait", "gdc_launch_dependents"):
        yield cuda, name, lambda: None


class Translation:
    """What a kernel sees in place of the values in its scope. One for each launch: modules' constants may change."""

    def __init__(self, running):
        pairs = _pairs(Language(running), Hopper(running))
        self.known = {id(getattr(m, name)): made for m, name, made in pairs if hasattr(m, name)}
        self.functions: dict[int, Function] = {}

    def __call__(self, value, name: str = ""):
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, tl.constexpr):
            return self(value.value)
        if isinstance(value, ModuleType):
            return _Module(value, self)
        if isinstance(value, ConstexprFunction):
            return value
        if isinstance(value, JITFunction) or hasattr(value, "fn"):
            return self.functions.setdefault(id(value), Function(value, self))
        if hasattr(value, "__triton_builtin__"):
            return unknown(f"{value.__module__}.{value.__name__}")
        return tuple(self(v) for v in value) if type(value) is tuple else value


class _Module:
    """A module as kernels see it."""

    def __init__(self, module: ModuleType, translate: Translation):
        self._module, self._translate = module, translate

    def __getattr__(self, name: str):
        full = f"{self._module.__name__}.{name}"
        if not hasattr(self._module, name):
            raise UnknownName(f"{full} does not exist (Triton {triton.__version__})")
        return self._translate(getattr(self._module, name), full)


class Function:
    """A jit function as kernels call it."""

    def __init__(self, kernel, translate: Translation):
        self.kernel, self.translate, self.__name__ = kernel, translate, kernel.fn.__name__
        self.signature = inspect.signature(kernel.fn)
        self.made = None

    def __call__(self, *args, **kwargs):
        self.made = self.made or self._make()
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if isinstance(value, tl.constexpr):
                bound.arguments[name] = value.value
            annotated = "constexpr" in str(self.signature.parameters[name].annotation)
            refuse(annotated and isinstance(value, (Tensor, Shared)), f"{self.__name__}: {name} must be a constexpr")
        return self.made(*bound.args, **bound.kwargs)

    def _make(self):
        function = self.kernel.fn
        code = rewritten(function)
        scope = function.__globals__ | inspect.getclosurevars(function).nonlocals
        seen = {name: self.translate(scope[name], name) for name in _names(code) if name in scope}
        own = {"range": emulated.dynamic_range, "min": emulated.smaller, "max": emulated.greater}
        namespace = {**own, **seen, "__name__": function.__module__, "_assigned_": assigned, "_value_": value_of}
        exec(code, namespace)
        return namespace[function.__name__]


def assigned(value, name: str = ""):
    """What a variable holds that is not annotated as a constexpr: numbers become tensors."""
    if isinstance(value, tuple):
        names = name.strip("()").split(", ") if name.count(",") == len(value) - 1 else [name] * len(value)
        return tuple(map(assigned, value, names))
    if isinstance(value, Shared) and not value.allocation.name:
        value.allocation.name = name
    return to_tensor(value) if isinstance(value, NUMBERS) else value


def value_of(x):
    """`x.value` of a constexpr."""
    return x if isinstance(x, (*NUMBERS, str)) or x is None else x.value


def _names(code: CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


@cache
def rewritten(function) -> CodeType:
    """The function's definition, compiled with the line numbers of its file."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise EmulationError(f"{function} is not defined by def")
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]  # `Function` gives all arguments
    tree = ast.fix_missing_locations(_Assignments().visit(tree))
    return compile(tree, inspect.getsourcefile(function), "exec")


class _Assignments(ast.NodeTransformer):
    """`x = value` becomes `x = _assigned_(value, "x")`, and `x.value` becomes `_value_(x)`."""

    def visit_Assign(self, node):
        self.generic_visit(node)
        node.value = _call("_assigned_", node.value, ast.Constant(ast.unparse(node.targets[0])))
        return node

    def visit_AugAssign(self, node):
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        value = ast.BinOp(left=read, op=node.op, right=node.value)
        made = ast.Assign(targets=[node.target], value=ast.copy_location(value, node))
        return self.visit(ast.copy_location(made, node))

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is None:
            return node
        value = node.value if "constexpr" in ast.unparse(node.annotation) else _call("_assigned_", node.value)
        return ast.copy_location(ast.Assign(targets=[node.target], value=value), node)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "value" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(_call("_value_", node.value), node)
        return node


def _call(name: str, *args) -> ast.Call:
    made = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(args), keywords=[])
    return ast.copy_location(made, args[0])
