"""Kernels that may start before the one before them has ended: each program waits before it returns or writes.

Where every program of a kernel could return without waiting, the kernel would end before its predecessor, and the one
after it, which waits only for its own predecessor, would read what is not there yet. Read off the source: the
interpreter runs kernels one after another and a GPU shows such a fault rarely.
"""

import ast
import importlib
import inspect
import pkgutil

import pytest
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dsv4 import kernels

WRITES = {"store", "atomic_add", "atomic_cas", "atomic_max", "atomic_min", "atomic_xchg", "atomic_or"}


def jit_functions() -> dict[str, ast.FunctionDef]:
    """'module.name' → source of every Triton function of the package."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, "dsv4.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, (JITFunction, InterpretedFunction)) and value.fn.__module__ == module.name:
                tree = ast.parse(inspect.getsource(value.fn).lstrip())
                found[f"{module.name}.{name}"] = tree.body[0]
    return found


def called(node: ast.Call) -> str:
    """The name of what is called; a wait for a barrier in shared memory is none for another kernel."""
    if ast.unparse(node.func) == "mbarrier.wait":
        return "mbarrier.wait"
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def problems(functions: dict[str, ast.FunctionDef]) -> tuple[list[str], int]:
    """Functions that return or write before they wait, and how many wait at all."""
    calls = {
        name: [(called(n), n.lineno) for n in ast.walk(f) if isinstance(n, ast.Call)] for name, f in functions.items()
    }
    waits = {"gdc_wait"} | {
        name.rpartition(".")[2]
        for name, found in calls.items()
        if any(c == "gdc_wait" for c, _ in found) and len(functions[name].body) <= 3
    }
    wrong, waiting = [], 0
    for name, f in functions.items():
        at = min((line for c, line in calls[name] if c in waits), default=None)
        if at is None or name.rpartition(".")[2] in waits:
            continue
        waiting += 1
        early = [line for c, line in calls[name] if c in WRITES and line < at]
        early += [n.lineno for n in ast.walk(f) if isinstance(n, ast.Return) and n.lineno < at]
        wrong += [f"{name}: line {line} comes before its wait" for line in early]
    return wrong, waiting


def test_no_kernel_writes_or_returns_before_it_waits():
    wrong, waiting = problems(jit_functions())
    assert wrong == [] and waiting >= 25


@pytest.mark.parametrize("early", ["    if pid > n:\n        return\n", "    tl.store(Y, 0)\n"])
def test_one_that_does_is_found(early):
    source = (
        f"def late(Y, PDL):\n    pid = tl.program_id(0)\n{early}    if PDL:\n        gdc_wait()\n    "
        "tl.store(Y, 1)\n" + "    x = 1\n" * 3
    )
    wrong, waiting = problems({"dsv4.kernels.a.late": ast.parse(source).body[0]})
    assert waiting == 1 and len(wrong) == 1
