"""Loops of device code carry no variable that is one constant before the loop and another after a turn: Triton 3.6.0
and 3.7.1 take the first for all turns (a pass over warp-specialised regions propagates constants and misses the other).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for p in (ROOT / "kernels").rglob("*.py") if ".jit" in p.read_text())


def carried_constants(source: str) -> list[str]:
    """Names that a loop of a jit function assigns a constant, and that have a value before the loop."""
    return [
        f"{function.name}: {name}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list)
        for loop in ast.walk(function)
        if isinstance(loop, ast.While) or isinstance(loop, ast.For) and "static_range" not in ast.unparse(loop.iter)
        for name, line in constants(loop)
        if any(name == given and at < loop.lineno for given, at in assigned(function)) and read_first(loop, name, line)
    ]


def assigned(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every assignment."""
    for found in ast.walk(node):
        if isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store):
            yield found.id, found.lineno


def constants(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of assignments of a number, or of a name in capitals, which is known at compile time."""
    for found in ast.walk(node):
        if not isinstance(found, ast.Assign):
            continue
        for target in found.targets:
            several = isinstance(target, ast.Tuple) and isinstance(found.value, ast.Tuple)
            pairs = zip(target.elts, found.value.elts) if several else [(target, found.value)]
            for name, value in pairs:
                known = isinstance(value, ast.Constant) or isinstance(value, ast.Name) and value.id.isupper()
                if known and isinstance(name, ast.Name):
                    yield name.id, found.lineno


def read_first(loop: ast.AST, name: str, line: int) -> bool:
    """Whether a turn may read what the turn before it left."""
    return any(isinstance(n, ast.Name) and n.id == name and n.lineno < line for n in ast.walk(loop))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "kernels")))
def test_no_loop_carries_a_constant(path):
    assert not carried_constants(path.read_text())


@pytest.mark.parametrize(
    "after, found",
    [("number + 1, 0", ["f: begin"]), ("number + 1, N", ["f: begin"]), ("0, x", ["f: number"]), ("x, x", [])],
)
def test_one_that_does_is_found(after, found):
    source = f"""
@gluon.jit
def f(x, AHEAD, N):
    number, begin = 0, AHEAD
    for tile in range(x):
        for block in range(begin, number):
            g(block)
        number, begin = {after}
"""
    assert carried_constants(source) == found
