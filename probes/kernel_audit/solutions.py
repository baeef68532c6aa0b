"""Solutions of FlashInfer-Trace as subjects: a JSON file in any of three dialects → a callable with our arguments.

Dialects differ in how a Solution is called, and a file does not name its dialect. `describe` says which one was taken
and why. A Solution is called once, in one way: nothing is tried again after a launch.
"""

import atexit
import hashlib
import importlib
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from dsv4.kernels.contract import Case, Contract
from dsv4.kernels.contracts import contracts
from dsv4.kernels.errors import UnsupportedInput
from dsv4.probes.kernel_audit.errors import KernelAuditError, SubjectFailed
from dsv4.probes.kernel_audit.trace.call import Call, short
from dsv4.probes.report import schema

SCHEMA = Path(__file__).parents[1] / "schema" / "kernel_trace-1.json"
PYTHON = frozenset("python triton tilelang pytorch cute_dsl cutile cudnn_frontend cutedsl".split())
COMPILED = frozenset("cpp cuda cutlass cudnn cublas cuda_cpp".split())
SOL_ALONE = frozenset("pytorch cute_dsl cudnn_frontend cudnn cublas cuda_cpp".split())
SOL_HARDWARE = frozenset({"B200", "LOCAL"})

folder_of_process: str | None = None  # where a worker's files are, which its parent removes: it is killed at its end


@dataclass(frozen=True, eq=False)
class Solution:
    """A Solution that was read. assumed: what the file does not say, in words."""

    document: dict
    contract: Contract
    dialect: str
    assumed: tuple[str, ...]

    @property
    def language(self) -> str:
        spec = self.document["spec"]
        return spec["languages"][0] if "languages" in spec else spec["language"]

    @property
    def passes_outputs(self) -> bool:
        """Whether results are passed behind the inputs and written."""
        return self.document["spec"].get("destination_passing_style", self.dialect != "flashinfer")

    @property
    def by_keyword(self) -> bool:
        return self.dialect == "flashinfer" and self.language in PYTHON

    def call(self, arguments: tuple) -> Call:
        """The contract's arguments as inputs of this Solution's definition. Raises UnsupportedInput where they are
        those of another definition."""
        if self.passes_outputs and not sized(arguments):
            raise UnsupportedInput("results of a tuple of weights can only be returned, not passed and written")
        inner = {str(axis) for argument in self.contract.arguments for axis in argument.shape or ()}
        sizes = {m[1]: int(m[2]) for m in re.finditer(r"(?<=_)([a-z]+)(\d+)(?=_|$)", self.document["definition"])}
        extents = lambda result, axis: None if axis in inner else sizes.get(short(axis))
        call = Call(self.contract, arguments, extents)
        if call.name != self.document["definition"]:
            raise UnsupportedInput(f"the Solution is for {self.document['definition']}; these inputs are {call.name}")
        return call


def sized(arguments: tuple) -> bool:
    """Whether the inputs say which shapes the results have: not those of a tuple of weights."""
    return not any(type(a) is tuple and any(not isinstance(v, torch.Tensor) for v in a) for a in arguments)


def read(path: str | Path) -> Solution:
    """Read a Solution and decide its dialect; none of its code runs. Raises KernelAuditError."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it is not JSON"
        raise KernelAuditError(f"Solution {path} cannot be read: {why}") from None
    rules = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wrong = schema.problems(document, {"$ref": "#/$defs/solution"}, root=rules)
    spec = document["spec"] if not wrong else {}
    if not wrong and ("language" in spec) == ("languages" in spec):
        wrong = ["$.spec: expected either language or languages"]
    if wrong:
        raise KernelAuditError(f"Solution {path} does not follow the schema: {wrong[0]}")
    for source in document["sources"]:
        if ".." in PurePosixPath(source["path"]).parts:
            raise KernelAuditError(f"Solution {path} has a source at {source['path']}; expected a path without ..")
    if _entry(document)[0] not in {source["path"] for source in document["sources"]}:
        raise KernelAuditError(f"Solution {path} has no source {_entry(document)[0]}, which its entry point names")
    return Solution(document, _contract(document["definition"], path), *_dialect(spec))


def _entry(document: dict) -> tuple[str, str]:
    file, name = document["spec"]["entry_point"].split("::")
    return file, name


def _contract(name: str, path) -> Contract:
    fits = [c for operation, c in contracts().items() if name.startswith(f"dsv4_{operation}_")]
    if not fits:
        raise KernelAuditError(
            f"Solution {path} is for {name}, which is no definition of dsv4; `dsv4 kernel show OP --format fib` prints "
            "them"
        )
    return max(fits, key=lambda contract: len(contract.operation))


def _dialect(spec: dict) -> tuple[str, tuple[str, ...]]:
    """(dialect, what was assumed)."""
    if "language" in spec:
        dialect, why = "fib", ()
    else:
        hardware, words = spec.get("target_hardware", []), set(spec["languages"])
        if words & SOL_ALONE:
            dialect, why = "sol", ()
        elif words & {"triton", "cutlass", "cutile"} and set(hardware) <= SOL_HARDWARE and hardware:
            dialect, why = "sol", (f"dialect sol, for its target hardware {', '.join(hardware)}",)
        else:
            dialect, why = "flashinfer", ("dialect flashinfer, for its list of languages",)
    if "destination_passing_style" not in spec:
        how = "returned" if dialect == "flashinfer" else "passed behind the inputs and written"
        why = (*why, f"results are {how}, the default of the dialect {dialect}")
    return dialect, why


def describe(path: str | Path) -> dict:
    """What a Solution says of itself and what was assumed; none of its code runs. Raises KernelAuditError."""
    found = read(path)
    return {
        "name": found.document["name"],
        "author": found.document.get("author", ""),
        "definition": found.document["definition"],
        "operation": found.contract.operation,
        "dialect": found.dialect,
        "language": found.language,
        "entry_point": found.document["spec"]["entry_point"],
        "results": "written" if found.passes_outputs else "returned",
        "inputs": "by keyword" if found.by_keyword else "by position",
        "assumed": list(found.assumed),
    }


def takes(path: str | Path) -> Callable[[Case], str | None]:
    """case → why the Solution cannot be asked for it, or None. Raises KernelAuditError."""
    found = read(path)

    def why(case: Case) -> str | None:
        try:
            found.call(case.arguments)
        except UnsupportedInput as error:
            return str(error)
        return None

    return why


def load_solution(path: str | Path, device: str = "cpu") -> Callable:
    """A callable with the arguments of the contract. Runs the Solution's code: call it in the process of the subject.

    It raises UnsupportedInput before anything runs for inputs of another definition, and SubjectFailed for results that
    are not those of the definition. Raises KernelAuditError where the Solution cannot be read, imported or built.
    """
    found = read(path)
    function = _function(found, path)

    def run(*arguments):
        call = found.call(arguments)
        given = {
            part.name: part.value.view(torch.uint8) if part.byte and found.dialect == "flashinfer" else part.value
            for part in call.parts
        }
        shapes = [[call.sizes[axis] for axis in result.axes] for result in call.results]
        kinds = [getattr(torch, result.dtype) for result in call.results]
        outputs = (
            [torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, kinds)] if found.passes_outputs else []
        )
        behind = dict(zip((result.name for result in call.results), outputs))
        positional, named = ((), given | behind) if found.by_keyword else ((*given.values(), *outputs), {})
        _fits(function, positional, named, [*given, *behind])
        returned = function(*positional, **named)
        tensors = outputs if found.passes_outputs else _listed(returned, [result.name for result in call.results])
        for result, t, shape, kind in zip(call.results, tensors, shapes, kinds):
            if sized(arguments) and (list(t.shape) != shape or t.dtype is not kind):
                got, want = (f"{str(d)[6:]} {list(s)}" for d, s in ((t.dtype, t.shape), (kind, shape)))
                raise SubjectFailed(f"result {result.name} is {got}, expected {want}")
        back = tuple(result.back(t) for result, t in zip(call.results, tensors))
        return back if len(back) > 1 else back[0]

    return run


def _fits(function: Callable, positional: tuple, named: dict, names: list[str]) -> None:
    """Raises SubjectFailed before a launch where the function does not take these parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built functions say nothing of their parameters
        return
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        how = "by keyword" if named else "by position"
        raise SubjectFailed(f"its entry point is called {how} with {', '.join(names)}: {error}") from None


def _listed(returned, names: list[str]) -> list[torch.Tensor]:
    """Results in the order of the definition."""
    if isinstance(returned, dict):
        if set(returned) != set(names):
            raise SubjectFailed(f"it returned results called {', '.join(returned)}; expected {', '.join(names)}")
        returned = [returned[name] for name in names]
    found = list(returned) if isinstance(returned, tuple | list) else [returned]
    if len(found) != len(names) or not all(isinstance(t, torch.Tensor) for t in found):
        kinds = ", ".join(type(t).__name__ for t in found)
        raise SubjectFailed(f"it returned {kinds}; expected {len(names)} tensors: {', '.join(names)}")
    return found


def _function(found: Solution, path) -> Callable:
    """The entry point, from sources in a folder that lives as long as the process."""
    file, name = _entry(found.document)
    folder = Path(tempfile.mkdtemp(prefix="dsv4-solution-", dir=folder_of_process))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = "solution_" + hashlib.sha256(json.dumps(found.document).encode()).hexdigest()[:16]
    for source in found.document["sources"]:
        target = folder / package / source["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source["content"], encoding="utf-8")
    if found.language in PYTHON:
        module = _imported(folder, package, file, path)
    elif found.language in COMPILED:
        from dsv4.probes.kernel_audit.compiled import built

        module = built(found.document, found.dialect, folder / package, package, path)
    else:
        known = ", ".join(sorted(PYTHON | COMPILED))
        raise KernelAuditError(f"Solution {path} is in {found.language!r}; expected one of {known}")
    function = getattr(module, name, None)
    if not callable(function):
        raise KernelAuditError(f"Solution {path} has no function {name} in {file}, which its entry point names")
    return function


def _imported(folder: Path, package: str, file: str, path):
    """The entry file as a module. Sources may import each other by name or relatively."""
    sys.path[:0] = [str(folder), str(folder / package)]
    importlib.invalidate_caches()
    try:
        return importlib.import_module(".".join((package, *Path(file).with_suffix("").parts)))
    except Exception as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise KernelAuditError(f"Solution {path} cannot be imported: {type(error).__name__}: {line}") from error
