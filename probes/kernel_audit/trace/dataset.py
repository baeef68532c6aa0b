"""Data sets on disk: the folders of flashinfer-bench, and the problem folders of SOL-ExecBench. Whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.kernels.contract import Contract
from dsv4.kernels.widths import Widths
from dsv4.probes.kernel_audit.acceptance import truth_of
from dsv4.probes.kernel_audit.errors import KernelAuditError
from dsv4.probes.kernel_audit.trace.definitions import Exported, Exporter, in_dialect
from dsv4.probes.kernel_audit.trace.traces import traces_of
from dsv4.probes.kernel_audit.trace.workloads import save_tensors, tolerance, uuid_of, workload

AUTHOR = "dsv4"


@dataclass
class Written:
    """What a data set holds: definition → number of workloads; operation → why cases are not in it → how many; number
    of traces."""

    definitions: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    traces: int = 0


def write_dataset(
    out: Path,
    contracts: Iterable[Contract],
    widths: Widths,
    dialect: str = "fib",
    seed: int = 0,
    said: Callable[[str], None] = lambda _: None,
    reports: Sequence[dict] = (),
) -> Written:
    """Write a new folder `out`. It is made beside its place and renamed, so that no reader sees a part of it.

    dialect: 'fib' or 'sol'. said: told each operation as it begins. reports: of kernel audits with the same widths and
    seed, whose findings become traces (fib). Raises KernelAuditError where the folder is there already or cannot be
    written.
    """
    if out.exists():
        raise KernelAuditError(f"{out} is there already; expected the name of a new folder")
    made = Written()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        partial.chmod(0o755)
        try:
            for contract in contracts:
                said(contract.operation)
                _operation(partial, Exporter(contract, widths, seed), dialect, made, reports)
            os.rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        why = error.strerror or error
        raise KernelAuditError(f"writing {out} failed ({why}); nothing of it is left") from None
    return made


def _operation(root: Path, exporter: Exporter, dialect: str, made: Written, reports: Sequence[dict]) -> None:
    for exported in exporter.cases():
        name = exported.call.name
        number = made.definitions.get(name, 0)
        if not number:
            _definition(root, exported, dialect)
        if dialect == "fib":
            made.traces += _fib(root, exported, uuid_of(exported, number), reports)
        else:
            _sol(root, exported, uuid_of(exported, number))
        made.definitions[name] = number + 1
    if exporter.skipped:
        made.skipped[exporter.contract.operation] = dict(exporter.skipped)


def _definition(root: Path, exported: Exported, dialect: str) -> None:
    made = in_dialect(exported.definition, dialect, exported.call)
    name, kind = made["name"], made["op_type"]
    solution = solution_of(exported, dialect)
    if dialect == "fib":
        _json(root / "definitions" / kind / f"{name}.json", made)
        _json(root / "solutions" / AUTHOR / kind / name / f"{solution['name']}.json", solution)
        return
    _json(root / name / "definition.json", made)
    _json(root / name / "solution.json", solution)
    (root / name / "reference.py").write_text(made["reference"], encoding="utf-8")


def _fib(root: Path, exported: Exported, uuid: str, reports: Sequence[dict]) -> int:
    name, kind = exported.call.name, exported.definition["op_type"]
    path = f"blob/workloads/{kind}/{name}/{uuid}.safetensors"
    save_tensors(exported, root / path)
    asked = workload(exported, uuid, path)
    line = {"definition": name, "workload": asked, "solution": None, "evaluation": None}
    _line(root / "workloads" / kind / f"{name}.jsonl", line)
    found = traces_of(exported, asked, reports)
    for trace in found:
        _line(root / "traces" / AUTHOR / kind / f"{name}.jsonl", trace)
    return len(found)


def _sol(root: Path, exported: Exported, uuid: str) -> None:
    folder = root / exported.call.name
    path = f"blob/{uuid}.safetensors"
    save_tensors(exported, folder / path)
    contract = exported.call.contract
    truth = truth_of(contract, exported.case, contract.default(exported.dtype))
    _line(folder / "workload.jsonl", workload(exported, uuid, path) | {"tolerance": tolerance(truth)})


def solution_of(exported: Exported, dialect: str) -> dict:
    """Our reference as a Solution."""
    spec = {"entry_point": "reference.py::run", "dependencies": ["torch"], "destination_passing_style": False}
    spec |= (
        {"languages": ["pytorch"], "target_hardware": ["LOCAL"]}
        if dialect == "sol"
        else {"language": "python", "target_hardware": ["any"]}
    )
    name = exported.call.name
    return {
        "name": f"{name}_reference",
        "definition": name,
        "author": AUTHOR,
        "description": "The definition itself, in plain torch; slow.",
        "spec": spec,
        "sources": [{"path": "reference.py", "content": exported.definition["reference"]}],
    }


def _json(file: Path, document: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _line(file: Path, document: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(document, ensure_ascii=False) + "\n")
