"""Imports point one way: commands → probes → engine → model → loaders → kernels. No circles, at any time of import."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (  # from the top; a module imports its own layer and those below it
    ("commands", ("dsv4.commands", "dsv4.lm_eval", "dsv4.__main__")),
    ("probes", ("dsv4.probes",)),
    (
        "engine",
        ("dsv4.engine", "dsv4.sampling", "dsv4.speculation", "dsv4.cost_model", "dsv4.runtime", "dsv4.parallel"),
    ),
    ("model", ("dsv4.model", "dsv4.cache")),
    ("loaders", ("dsv4.loaders",)),
    (
        "base",
        (
            "dsv4.errors",
            "dsv4.moved",
            "dsv4.named_values",
            "dsv4.outputs",
            "dsv4.sending",
            "dsv4.units",
            "dsv4.version",
        ),
    ),
    ("kernels", ("dsv4.kernels",)),
)


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "dsv4" else ["dsv4", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    folders = ("dsv4", "kernels", "loaders", "probes")
    return {module_of(path): path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, also inside functions; for types alone does not count."""
    for node in running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dsv4":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else node.module


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from running(node)


@cache
def graph() -> dict[str, frozenset[str]]:
    return {name: frozenset(with_packages(name, imported(name, path))) - {name} for name, path in modules().items()}


def with_packages(name: str, others: Iterator[str]) -> Iterator[str]:
    """The modules, and the packages that they lie in, which are imported first, unless `name` lies in them too."""
    for other in others:
        yield other
        parts = other.split(".")
        packages = (".".join(parts[:end]) for end in range(2, len(parts)))
        yield from (package for package in packages if not f"{name}.".startswith(f"{package}."))


def layer(name: str) -> int | None:
    """Its number from the top; None of the package itself, which holds the version and one lazy function."""
    found = [i for i, (_, rooms) in enumerate(LAYERS) for room in rooms if name == room or name.startswith(f"{room}.")]
    assert found or name == "dsv4", f"{name} has no layer; give its room one"
    return found[0] if found else None


def test_no_module_imports_a_layer_above_its_own():
    upward = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in sorted(others)
        if None not in (layer(name), layer(other)) and layer(other) < layer(name)
    ]
    assert not upward, "\n".join(upward)


def test_speculation_and_sampling_do_not_import_the_engine():
    below = ("dsv4.sampling", "dsv4.speculation")
    found = {name: others for name, others in graph().items() if name.startswith(below)}
    assert len(found) > 10 and not {
        n for n, others in found.items() if any(o.startswith("dsv4.engine") for o in others)
    }


def circles(edges: dict[str, frozenset[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in edges.get(v, ()):
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            at = stack.index(v)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for v in edges:
        if v not in index:
            visit(v)
    return found


def test_no_import_circle():
    assert not circles(graph())


@pytest.mark.parametrize("edges,wanted", [({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]), ({"a": {"b"}}, [])])
def test_circles_are_seen(edges, wanted):
    assert circles({k: frozenset(v) for k, v in edges.items()}) == wanted


def test_the_rooms_of_measurements_do_not_import_each_other():
    """What two of them need is in their base, which imports none of them."""
    room = lambda name: name.removeprefix("dsv4.probes.measure.").split(".")[0]
    inside = {name: others for name, others in graph().items() if name.startswith("dsv4.probes.measure.")}
    assert {room(name) for name in inside} == {"base", "fidelity", "recall", "sparse_prefill", "termination"}
    across = [
        f"{name} imports {other}"
        for name, others in inside.items()
        for other in sorted(others & inside.keys())
        if room(other) not in (room(name), "base")
    ]
    assert not across, "\n".join(across)
