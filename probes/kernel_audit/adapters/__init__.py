"""Published kernels behind the contracts' arguments: layout alone, inputs come from the contract.

An adapter's `make(device)` gives `prepare`: the contract's arguments → (run, finish). What a server does once a step or
once a load (index types, page tables, schedules, repacked weights) is done by `prepare`; `run()` is the kernel alone,
which is timed; `finish` brings its results into the contract's form. `takes(case)` says why it cannot be asked for a
case, which the report lists; what it promises less than the contract is its accuracy class and its note."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from dsv4.kernels.contract import Case
from dsv4.probes.kernel_audit.adapters.installed import NotInstalled
from dsv4.probes.kernel_audit.errors import KernelAuditError

FILES = ("attention", "indexer", "selection", "hyper_connections", "experts", "router", "linear", "small")


def as_it_is(result):
    """`finish` of a kernel whose results have the contract's form."""
    return result


@dataclass(frozen=True)
class Adapter:
    """One published kernel for one operation.

    about: package, version, entry point. make(device) → prepare; it raises NotInstalled. takes(case) → reason or None.
    accuracy: the class that the kernel promises. differs: what its contract promises otherwise, in words.
    layout(function, device) → prepare, of any function with the published kernel's signature: its convention.
    prepared: arguments that `prepare` reads itself, once a load or a step, so that a captured call keeps theirs.
    """

    name: str
    operation: str
    about: str
    make: Callable[[str], Callable]
    takes: Callable[[Case], str | None] = lambda case: None
    accuracy: str = ""
    differs: str = ""
    layout: Callable[[Callable, str], Callable] | None = None
    prepared: tuple[str, ...] = ()

    def bind(self, device: str) -> Callable:
        """A function of the contract's arguments; raises NotInstalled."""
        return whole_call(self.make(device), self.prepared)

    def convention(self, function: Callable, device: str) -> Callable:
        """A user's function of the published signature as one of the contract's arguments."""
        if self.layout is None:
            raise KernelAuditError(
                f"{self.name} has no convention for {self.operation} that other kernels can take; use --convention dsv4"
            )
        return whole_call(self.layout(function, device), self.prepared)


def whole_call(prepare: Callable, prepared: tuple[str, ...] = ()) -> Callable:
    """prepare, run and finish as one function, which keeps `prepare` for the benchmark."""

    def function(*arguments):
        run, finish = prepare(*arguments)
        return finish(run())

    function.prepare, function.prepared = prepare, prepared
    return function


def adapters() -> list[Adapter]:
    """Every adapter, in the order of the files."""
    return [a for file in FILES for a in importlib.import_module(f"{__name__}.{file}").ADAPTERS]


def adapter(name: str, operation: str) -> Adapter:
    """Raises KernelAuditError for a name that has no adapter for the operation."""
    mine = [a for a in adapters() if a.operation == operation]
    for found in mine:
        if found.name == name:
            return found
    known = ", ".join(a.name for a in mine) or "none"
    raise KernelAuditError(
        f"kernel {name!r} is no adapter for {operation}; expected file.py:function, package.module:function, ours, or "
        f"one of: {known}"
    )


def conventions(operation: str) -> list[str]:
    """Names that --convention takes for an operation."""
    return ["dsv4", *(a.name for a in adapters() if a.operation == operation and a.layout is not None)]


def known(operation: str) -> list[tuple[str, bool, str]]:
    """(name, whether it can be called here, what it is or why not) of each adapter of the operation."""
    rows = []
    for found in adapters():
        if found.operation == operation:
            try:
                found.bind("cuda")
                rows.append((found.name, True, found.about))
            except NotInstalled as missing:
                rows.append((found.name, False, f"{found.about}: not here: {missing}"))
    return rows
