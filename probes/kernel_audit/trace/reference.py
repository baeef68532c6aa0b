"""The reference of a definition: our own reference with all that it uses, and a `run` that takes its inputs."""

import re

from dsv4.kernels import cache_rows, quantize
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.kernel_audit.trace.call import Call
from dsv4.probes.kernel_audit.trace.encoding import NotExpressible
from dsv4.probes.kernel_audit.trace.source import Bundle, NotSelfContained


def reference_text(call: Call) -> str:
    """Python source with a top-level `run` whose parameters are the inputs in order; it imports torch and the standard
    library alone. Raises NotExpressible where our reference uses more than that."""
    bundle = Bundle()
    try:
        _types(bundle, call)
        function, first = _function(bundle, call.contract.operation)
    except NotSelfContained as why:
        raise NotExpressible(f"no self-contained reference: {why}") from None
    given, hinted = list(first), False
    over = [call.contract.arguments[number] for number in call.contract.written]
    over += [spec for spec in call.contract.arguments if getattr(spec, "scratch", False)]
    for slot, spec in zip(call.slots, call.contract.arguments):
        hinted |= slot.code is None
        if slot.code is not None:
            code = f"{slot.code}.clone()" if spec in over else slot.code
            given.append(f"{spec.name}={code}" if hinted else code)
    names = [result.name for result in call.results]
    lines = [
        "@torch.no_grad()",
        f"def run({', '.join(part.name for part in call.parts)}):",
        f'    """{call.contract.about}"""',
        f"    {', '.join(names)} = {function}({', '.join(given)})" if len(names) > 1 else None,
        f"    {names[0]} = {function}({', '.join(given)})" if len(names) == 1 else None,
        f"    return {', '.join(_wire(result) for result in call.results)}",
    ]
    return bundle.text("\n".join(line for line in lines if line))


def _wire(result) -> str:
    code = result.name
    if result.counted is not None:
        code += ".unflatten(-1, (-1, 64))"
    return code + (".int()" if result.dtype == "int32" and result.output.dtype == "int64" else "")


def _types(bundle: Bundle, call: Call) -> None:
    """Classes that `run` names, first, so that they keep their names."""
    codes = " ".join(slot.code or "" for slot in call.slots)
    for form in (cache_rows.RowFormat.KV_FP8, *cache_rows.KEY_FORMATS):
        if f"PackedRows({form.name}," in codes:
            bundle.constant(type(form).__module__, form.name)
    if "PackedRows(" in codes:
        bundle.add(cache_rows.PackedRows)
    for word in ("WeightFormat", "PackedWeight"):
        if f"{word}(" in codes:
            bundle.add(getattr(quantize, word))


def _function(bundle: Bundle, operation: str) -> tuple[str, tuple[str, ...]]:
    """(name of the reference in the bundle, arguments before those of the contract)."""
    known = OPERATIONS | GQA_OPERATIONS
    if operation in known:
        return bundle.add(known[operation]), ()
    if operation not in COMPOSITIONS:
        raise NotSelfContained(f"{operation} is neither an operation nor a composition")
    name, bound = bundle.add(COMPOSITIONS[operation].default), {}
    while missing := set(re.findall(r"\bop\.(\w+)", "\n".join(bundle.statements))) - set(bound):
        for used in sorted(missing):
            whole = used in COMPOSITIONS
            own = bundle.add(COMPOSITIONS[used].default if whole else known[used])
            bound[used] = f"lambda *arguments: {own}(op, *arguments)" if whole else own
    bundle.imports["from types import SimpleNamespace"] = None
    bundle.statements.append("op = SimpleNamespace(" + ", ".join(f"{k}={v}" for k, v in bound.items()) + ")")
    return name, ("op",)
