"""Self-contained source of a function: itself and all of dsv4 that it uses, as one text that imports torch alone.

The reference of a definition must run where dsv4 is not installed. It is made from our own references, so that the two
cannot drift apart.
"""

import ast
import inspect
import sys
import types
from functools import cache

from dsv4.kernels.dispatch import Operation
from dsv4.probes.kernel_audit.trace import plain

ALLOWED = frozenset({"torch", "abc", "math", "enum", "typing", "functools", "collections", "contextvars", "__future__"})


class NotSelfContained(Exception):
    """A function that uses what a reference may not: the message says what."""


@cache
def _parsed(module: types.ModuleType) -> tuple[ast.Module, str]:
    text = inspect.getsource(module)
    return ast.parse(text), text


def _own(module: str | None) -> bool:
    return (module or "").startswith("dsv4")


class Bundle:
    """Statements in the order in which they must stand. `names`: (module, name there) → name in the bundle."""

    def __init__(self):
        self.imports: dict[str, None] = {"import torch": None}
        self.statements: list[str] = []
        self.names: dict[tuple[str, str], str] = {}

    def add(self, value) -> str:
        """Take in a function or class; its name in the bundle. Raises NotSelfContained."""
        if isinstance(value, Operation):
            value = value.implementations["reference"]
        if not isinstance(value, types.FunctionType | type):
            raise NotSelfContained(f"it uses {value!r}")
        return self._take(sys.modules[value.__module__], value.__name__)

    def constant(self, module: str, name: str) -> str:
        """Take in what a module of dsv4 binds to `name`; its name in the bundle. Raises NotSelfContained."""
        return self._take(sys.modules[module], name)

    def text(self, body: str) -> str:
        """The bundle, followed by `body`."""
        parts = ["\n".join(["from __future__ import annotations", "", *sorted(self.imports)]), *self.statements, body]
        return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _take(self, module: types.ModuleType, name: str) -> str:
        """The statement of `module` that binds `name`, with what it uses before it."""
        key = module.__name__, name
        if key in self.names:
            return self.names[key]
        tree, text = _parsed(module)
        found = next((s for s in tree.body if name in _bound(s)), None)
        if found is None:
            return self._imported(module, name)
        own, taken = name, set(self.names.values())
        if own in taken:
            own = f"{module.__name__.rsplit('.', 1)[-1].strip('_')}_{name.strip('_')}"
        self.names[key] = own
        renamed = {name: own} if own != name else {}
        for used in _used(found):
            if used != name and used in vars(module):
                new = self._resolve(module, used)
                if new != used:
                    renamed[used] = new
        attributes = self._attributes(module, found)
        self.statements.append(_rewritten(found, text, renamed, attributes))
        return own

    def _imported(self, module: types.ModuleType, name: str) -> str:
        """A name that `module` imports: taken from where it is defined."""
        value = vars(module)[name]
        if isinstance(value, Operation):
            return self.add(value)
        for statement in _parsed(module)[0].body:
            for alias in statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else ():
                if (alias.asname or alias.name.split(".")[0]) != name:
                    continue
                source = statement.module if isinstance(statement, ast.ImportFrom) else alias.name
                if _own(source):
                    return self._take(sys.modules[source], alias.name)
                if source == "einops" and alias.name in vars(plain):
                    return self._take(plain, alias.name)
                if source.split(".")[0] not in ALLOWED:
                    raise NotSelfContained(f"it imports {source}")
                self.imports[_one(statement, alias)] = None
                return name
        raise NotSelfContained(f"{module.__name__} does not say where {name} comes from")

    def _resolve(self, module: types.ModuleType, name: str) -> str:
        value = vars(module)[name]
        if isinstance(value, types.ModuleType) and _own(value.__name__):
            return name  # its attributes are taken one by one
        return self._take(module, name)

    def _attributes(self, module: types.ModuleType, statement: ast.stmt) -> dict[tuple[str, str], str]:
        """(module's alias, attribute) → name in the bundle, for attributes of modules of dsv4."""
        found = {}
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                value = vars(module).get(node.value.id)
                if isinstance(value, types.ModuleType) and _own(value.__name__):
                    found[node.value.id, node.attr] = self._resolve(value, node.attr)
        return found


def _bound(statement: ast.stmt) -> list[str]:
    """Names that a statement of a module defines; imports define none here."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _used(statement: ast.stmt) -> list[str]:
    """Names that a statement reads when it runs, in order; annotations are text there."""
    annotations: set[int] = set()
    for node in ast.walk(statement):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                annotations |= {id(n) for n in ast.walk(part)}
    names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and id(n) not in annotations]
    return list(dict.fromkeys(names))


def _rewritten(statement: ast.stmt, text: str, renamed: dict, attributes: dict) -> str:
    """The text of a statement; only where a name changes is it written anew from its tree, without comments."""
    if not renamed and not attributes:
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        return "\n".join(text.split("\n")[first - 1 : statement.end_lineno])

    class Names(ast.NodeTransformer):
        def visit_Name(self, node):
            return ast.Name(renamed.get(node.id, node.id), node.ctx)

        def visit_Attribute(self, node):
            if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in attributes:
                return ast.Name(attributes[node.value.id, node.attr], node.ctx)
            return self.generic_visit(node)

        def visit_FunctionDef(self, node):
            node.name = renamed.get(node.name, node.name)
            return self.generic_visit(node)

    copied = ast.parse(ast.unparse(statement)).body[0]
    return ast.unparse(Names().visit(copied))


def _one(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """An import statement with one of its names."""
    if isinstance(statement, ast.Import):
        return ast.unparse(ast.Import([alias]))
    return ast.unparse(ast.ImportFrom(statement.module, [alias], 0))
