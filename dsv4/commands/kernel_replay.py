"""`dsv4 kernel replay`: one case of a report, run again, with the numbers that were found and expected.

`dsv4.commands.kernel` registers the command."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.commands.console import folder
from dsv4.commands.terminal import errors, wide
from dsv4.errors import InputError

if TYPE_CHECKING:
    import torch

    from dsv4.probes.kernel_audit.acceptance import Truth
    from dsv4.probes.kernel_audit.audit import KernelAudit

NEEDED = "operation", "kernel", "convention", "shapes", "accuracy", "seed", "repeats", "checks", "about"
NUMBERS = 8  # shown of a wrong row


def replay(
    report: Annotated[Path, typer.Argument(help="audit.json of dsv4 kernel audit.", show_default=False)],
    case: Annotated[
        str | None, typer.Argument(help="Name of a case, or a part of it; default: the smallest with a finding.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="The kernel, where the report's is not found from here.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; default: the report's.", show_default=False)] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one answer before the process is ended.")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for case.safetensors: arguments, what was expected and what was found.", callback=folder
        ),
    ] = None,
):
    """Run one case of a report again and show what differs. Exit code 0: it is right now, 1: findings, 2: it could not
    run."""
    from dsv4.probes.kernel_audit.audit import audit_kernel
    from dsv4.probes.kernel_audit.document import finding_line, source_hash

    given = read(report)
    spec, clauses, name = asked(given, case, kernel, device)
    if given.get("source_sha256") not in (None, source_hash(spec.kernel)):
        errors.print(f"{spec.kernel.rpartition(':')[0]} has changed since the report was written")
    found = audit_kernel(
        *(spec, given["shapes"], given["seed"]), only=clauses, repeats=given["repeats"], limit=limit, case=name
    )
    console = wide()
    for line in shown(found):
        console.print(line)
    if out is not None:
        console.print(f"wrote {save(found, out)}")
    for check in found.findings:
        console.print(finding_line(check))
    if not found.findings:
        console.print(f"{found.verdict}: {name}: no finding of {', '.join(clauses)}")
    raise typer.Exit(1 if found.findings else 0)


def read(file: Path) -> dict:
    """A report of `dsv4 kernel audit`. Raises InputError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"report {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict) or not set(NEEDED) <= set(found):
        raise InputError(f"report {file} is none of dsv4 kernel audit; expected its audit.json")
    return found


def asked(given: dict, case: str | None, kernel: str | None, device: str):
    """(subject, clauses, case): of the first clause with a finding in that case, behind the gate. Raises InputError."""
    from dsv4.probes.kernel_audit.subject import SubjectSpec

    device = device or given["about"]["device"].split(" ")[0]
    spec = SubjectSpec(
        *(given["operation"], kernel or given["kernel"], device, bool(given.get("out_arguments"))),
        convention=given["convention"] if kernel or ":" in given["kernel"] else "dsv4",
        accuracy="" if " or " in given["accuracy"] else given["accuracy"],
    )
    file = spec.kernel.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise InputError(f"{file} is not here; name the kernel: --kernel FOLDER/{spec.kernel}")
    findings = [c for c in given["checks"] if c["status"] in ("FAIL", "ERROR") and c["name"] != "not run"]
    mine = [c for c in findings if case is None or case in c["where"]]
    if case is None:
        if not findings:
            raise InputError("the report has no finding; name a case: dsv4 kernel replay REPORT CASE")
        mine = [c for c in findings if c["part"] == findings[0]["part"]]
    clauses = tuple(dict.fromkeys(("gate", *(c["part"] for c in mine[:1]))))
    return spec, clauses, case or smallest(given, [c["where"] for c in mine])


def smallest(given: dict, places: list[str]) -> str:
    """The place whose case has the fewest bytes in its arguments."""
    from dsv4.kernels.contract import tensors
    from dsv4.kernels.contracts import contract_of
    from dsv4.kernels.drawing import Draw
    from dsv4.kernels.widths import WIDTHS

    contract, sizes = contract_of(given["operation"]), {}
    for dtype in contract.dtypes:
        for case in contract.cases(WIDTHS[given["shapes"]], Draw(given["seed"], dtype)):
            label = f"{case.family}, {case.label}, {str(dtype)[6:]}"
            sizes[label] = sum(t.nbytes for t in tensors(case.arguments))
    size = lambda place: min((n for label, n in sizes.items() if place.startswith(label)), default=float("inf"))
    return min(places, key=size)


def shown(found: "KernelAudit") -> list[str]:
    """Of each wrong result of the gate the worst row: what was found, what fp64 gives."""
    lines = []
    for truth, results in found.wrong:
        lines.append(f"{truth.case.family}, {truth.case.label}")
        for output, mine, exact in zip(truth.contract.outputs, results, truth.exact):
            if mine is None or mine.shape != exact.shape:
                got = "nothing" if mine is None else list(mine.shape)
                lines.append(f"  {output.name}: {got}, expected {list(exact.shape)}")
                continue
            row, place = worst_row(output, mine, exact)
            if row is not None:
                lines += [f"  {place} found    {numbers(row[0])}", f"  {place} expected {numbers(row[1])}"]
    return lines


def worst_row(output, found: "torch.Tensor", exact: "torch.Tensor"):
    """((found, exact) of the row with the largest relative L2, its place), or (None, '') where no row differs."""
    size = 1
    for extent in exact.shape[exact.ndim - output.row :]:
        size *= extent
    a, b = (t.double().reshape(-1, size or 1) for t in (found, exact))
    off = ((a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)).nan_to_num(nan=float("inf"))
    if not off.numel() or not off.max() > 0:
        return None, ""
    at, index = int(off.argmax()), []
    for extent in reversed(exact.shape[: exact.ndim - output.row]):
        index.append(at % extent)
        at //= extent
    at = int(off.argmax())
    return (a[at], b[at]), f"{output.name}{index[::-1]}"


def numbers(row: "torch.Tensor") -> str:
    """'0.125 -1.5 …'."""
    return " ".join(f"{x:.5g}" for x in row[:NUMBERS].tolist()) + (" …" if len(row) > NUMBERS else "")


def save(found: "KernelAudit", out: Path) -> Path:
    """case.safetensors: `argument.NAME` (of several tensors with a number), `expected.NAME` in fp64, `found.NAME`.

    Complex numbers are pairs in a last axis. Raises WriteError."""
    from safetensors.torch import save as bytes_of

    from dsv4.loaders.errors import WriteError

    held: dict[str, torch.Tensor] = {}
    wrong = {id(truth): results for truth, results in found.wrong}
    for truth in found.truths[:1]:
        held |= arguments_of(truth)
        names = [o.name for o in truth.contract.outputs]
        held |= {f"expected.{name}": plain(t) for name, t in zip(names, truth.exact)}
        held |= {f"found.{n}": plain(t) for n, t in zip(names, wrong.get(id(truth), ())) if t is not None}
    file, partial = out / "case.safetensors", out / ".case.safetensors.partial"
    try:
        out.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(bytes_of(held))
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WriteError(f"writing {file} failed ({error.strerror or error}); no file is half-written") from None
    return file


def arguments_of(truth: "Truth") -> dict[str, "torch.Tensor"]:
    """Tensors of a case's arguments by name."""
    from dsv4.kernels.contract import tensors

    held = {}
    for spec, value in zip(truth.contract.arguments, truth.case.arguments):
        parts = list(tensors(value))
        held |= {f"argument.{spec.name}" + (f".{i}" if len(parts) > 1 else ""): plain(t) for i, t in enumerate(parts)}
    return held


def plain(t: "torch.Tensor") -> "torch.Tensor":
    """A copy that a file can hold."""
    import torch

    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().cpu().contiguous().clone()
