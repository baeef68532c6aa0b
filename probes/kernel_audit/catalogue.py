"""What is known of each operation: its contract as plain data, our kernels and published ones."""

from importlib import import_module
from importlib.util import find_spec

from dsv4.errors import InputError
from dsv4.kernels.contract import Contract
from dsv4.kernels.contracts import contracts
from dsv4.kernels.drawing import Draw
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.kernels.widths import WIDTHS
from dsv4.probes.kernel_audit.trace.definitions import Exporter, call_of, in_dialect
from dsv4.probes.kernel_audit.trace.encoding import NotExpressible

ADAPTERS = "dsv4.probes.kernel_audit.adapters"
LAYOUTS = {
    "activation": "activations: {}",
    "rows": "activations: {}, or packed rows",
    "weight": "a weight as stored: dense, FP8, MXFP4 or NVFP4",
}


def operations() -> list[dict]:
    """One row an operation or composition: its contract's accuracy classes, our backends, published kernels."""
    return [_row(name) for name in _names()]


def with_contract() -> list[str]:
    """Names of operations that have a contract."""
    return list(contracts())


def contract_named(name: str) -> Contract:
    """Raises InputError for an operation without a contract, or no operation."""
    _known(name)
    if name not in contracts():
        raise InputError(f"{name} has no contract; expected one of {', '.join(contracts())}")
    return contracts()[name]


def contract(name: str, shapes: str) -> dict:
    """The contract as plain data, with the extents of its first case at these shapes; `contract` is False where there
    is none. Raises InputError for an unknown operation."""
    row = _row(name)
    if not row["contract"]:
        return row
    found, widths = contract_named(name), WIDTHS[shapes]
    case = next(iter(found.cases(widths, Draw(0, found.dtypes[0]))))
    try:
        sizes = call_of(found, case.arguments).sizes
    except NotExpressible:  # nor can its extents be read off
        sizes = {}
    activations = [str(dtype).removeprefix("torch.") for dtype in found.dtypes]
    parts = lambda group: [_argument(part, sizes, activations) for part in group]
    return row | {
        "shapes": shapes,
        "inputs": parts(found.arguments),
        "outputs": parts(found.outputs),
        "edges": list(found.edges),
        "activations": activations,
        "formats": _formats(found),
        "work": found.work(*case.arguments).formula,
    }


def definitions(name: str, shapes: str, dialect: str) -> tuple[list[dict], dict[str, int]]:
    """(definitions of an operation in a dialect, why cases are not among them → how many). Raises InputError."""
    exporter, calls = Exporter(contract_named(name), WIDTHS[shapes]), {}
    for exported in exporter.cases():
        calls.setdefault(exported.call.name, exported.call)
    return [in_dialect(d, dialect, calls[n]) for n, d in exporter.definitions.items()], exporter.skipped


def _names() -> list[str]:
    return sorted(OPERATIONS | GQA_OPERATIONS | COMPOSITIONS)


def _known(name: str) -> None:
    if name not in _names():
        raise InputError(f"{name!r} is neither an operation nor a composition; see: dsv4 kernel list")


def _row(name: str) -> dict:
    _known(name)
    found, alone = contracts().get(name), OPERATIONS | GQA_OPERATIONS
    known = alone[name].implementations if name in alone else ("reference", *COMPOSITIONS[name].implementations)
    about = ((alone.get(name) or COMPOSITIONS[name]).__doc__ or "").split("\n\n")[0]
    return {
        "operation": name,
        "kind": "operation" if name in alone else f"composition of {', '.join(COMPOSITIONS[name].parts) or 'no other'}",
        "about": found.about if found else " ".join(about.split()),
        "contract": found is not None,
        "accuracy": list(found.classes) if found else [],
        "ours": list(known),
        "published": published(name),
    }


def published(operation: str) -> list[dict]:
    """Published kernels that an adapter knows for an operation, and whether they are installed."""
    if find_spec(ADAPTERS) is None:
        return []
    return [
        {"name": name, "installed": installed, "about": about}
        for name, installed, about in import_module(ADAPTERS).known(operation)
    ]


def _argument(part, sizes: dict[str, int], activations: list[str]) -> dict:
    shape = part.shape and [[str(axis), sizes.get(str(axis)) or sizes.get(f"num_{axis}")] for axis in part.shape]
    said = {"optional": "may be None", "hint": "a hint, may be ignored", "scratch": "may be overwritten"}
    marks = [words for mark, words in said.items() if getattr(part, mark, False)]
    marks += [part.liberty] if getattr(part, "liberty", "") else []
    dtype = LAYOUTS.get(part.dtype, part.dtype).format(" or ".join(activations))
    return {"name": part.name, "shape": shape, "dtype": dtype, "about": "; ".join([part.about, *marks])}


def _formats(found: Contract) -> list[str]:
    """Formats of its cases at small shapes, as names of definitions have them."""
    exporter, formats = Exporter(found, WIDTHS["small"]), {}
    for exported in exporter.cases():
        formats[exported.call.format] = None
    return [*formats, *(f"not exported: {why}" for why in exporter.skipped)]
