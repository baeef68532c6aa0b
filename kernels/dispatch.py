"""Which implementation of an operation runs, and the ledger of what ran.

Each folder of `kernels/` defines one or more `Operation`s. A model binds them all to
one backend when it is built (`bind`), so the choice is explicit, made once, and never
falls back silently:

- `reference`: plain torch, the definition. Always complete.
- `cpu`: the reference, with the few operations replaced that have an implementation
  arranged for low latency on a host processor. Asked for by name, or by `auto` on a CPU.
- `training`: differentiable forms over whole sequences (see `dsv4.cache.sequence`); the reference
  where it is differentiable itself.
- `triton`: GPU kernels. Every operation must have one, or binding raises.

A kernel of the user's may stand for an operation (`dsv4.kernels.replacing`): compositions that would compute it
otherwise are then run part by part.

Every bound call is counted in a `DispatchLedger`, which reports print.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace

from dsv4.kernels.errors import BackendUnavailable, KernelMismatch
from dsv4.kernels.replacing import Replaced, Replacement, check_known

BACKENDS = ("reference", "cpu", "training", "triton")


@dataclass(frozen=True)
class Operation:
    """One numeric operation and its implementations by backend name.

    Calling it runs `reference`; a model calls the bound form that `bind` returns.
    """

    name: str
    implementations: Mapping[str, Callable]

    def __post_init__(self):
        if "reference" not in self.implementations:
            raise ValueError(f"operation {self.name} has no reference, which is its definition")
        object.__setattr__(self, "implementations", MappingProxyType(dict(self.implementations)))
        object.__setattr__(self, "__doc__", self.implementations["reference"].__doc__)

    def __call__(self, *args, backend: str = "reference", **kwargs):
        function, _ = self.resolve(backend)
        return function(*args, **kwargs)

    def resolve(self, backend: str) -> tuple[Callable, str]:
        """Return (implementation, why). Raises BackendUnavailable."""
        if backend not in BACKENDS:
            raise BackendUnavailable(f"backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
        if backend in self.implementations:
            return self.implementations[backend], f"{backend} backend"
        if backend in ("cpu", "training"):
            return self.implementations["reference"], f"the {backend} backend takes the reference here"
        raise BackendUnavailable(
            f"backend {backend!r} was asked for, but operation {self.name!r} has only "
            f"{', '.join(self.implementations)}; use --backend reference"
        )


@dataclass(frozen=True)
class Composition:
    """A fixed sequence of operations that a backend may run as one kernel.

    `default(op, *args)` is the definition: the same thing through the bound operations `op`. `parts` names the
    operations that a fused implementation replaces.
    """

    name: str
    parts: tuple[str, ...]
    default: Callable
    implementations: Mapping[str, Callable] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "implementations", MappingProxyType(dict(self.implementations)))
        object.__setattr__(self, "__doc__", self.default.__doc__)


@dataclass
class DispatchLedger:
    """Calls by (operation, implementation, why). `rows()` is what reports print."""

    calls: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)

    def counter(self, name: str, implementation: str, why: str) -> list[int]:
        return self.calls.setdefault((name, implementation, why), [0])

    def rows(self) -> list[dict]:
        return [
            {"operation": name, "implementation": implementation, "why": why, "calls": count[0]}
            for (name, implementation, why), count in sorted(self.calls.items())
        ]


def bind(
    operations: Mapping[str, Operation],
    backend: str,
    ledger: DispatchLedger,
    compositions: Mapping[str, Composition] = MappingProxyType({}),
    replacements: Mapping[str, Callable | str | Replacement] = MappingProxyType({}),
) -> SimpleNamespace:
    """Resolve every operation and composition for `backend` and return them as attributes of one object. Of its other
    attributes `fused` names the compositions that run as one; `unfused` those that would, but compute an operation that
    is replaced; `replaced` has the `Replaced` by operation.

    replacements: operation → a function, or its spec as text, that runs in its place (`dsv4.kernels.user`).

    Raises BackendUnavailable when any operation lacks an implementation: before the
    model runs, not in the middle of it. Of replacements also UnknownOperation, KernelNotLoaded, KernelMismatch.
    """
    check_known(replacements, operations, compositions)
    if backend == "training" and replacements:
        raise KernelMismatch(
            f"a kernel was given for {', '.join(replacements)} on the training backend, which is differentiable; "
            "expected backend reference, cpu or triton"
        )
    others = {name: op for name, op in operations.items() if name not in replacements}
    bound = SimpleNamespace(**{name: _counted(name, *op.resolve(backend), ledger) for name, op in others.items()})
    bound.replaced = {n: Replaced(operations[n], Replacement.of(given), backend) for n, given in replacements.items()}
    for name, kernel in bound.replaced.items():
        why = f"in place of the {backend} backend's"
        setattr(bound, name, _counted(name, kernel, why, ledger, kernel.shown))
    able = {name: c for name, c in compositions.items() if backend in c.implementations}
    bound.unfused = tuple(name for name, c in able.items() if not bound.replaced.keys().isdisjoint(c.parts))
    bound.fused = frozenset(able) - frozenset(bound.unfused)
    for name, composition in compositions.items():
        if name in bound.fused:
            fused = composition.implementations[backend]
            why = f"{backend} backend" + (f", for {', '.join(composition.parts)}" if composition.parts else "")
            setattr(bound, name, _counted(name, fused, why, ledger))
        else:
            setattr(bound, name, partial(composition.default, bound))
    return bound


def _counted(
    name: str, function: Callable, why: str, ledger: DispatchLedger, implementation: str | None = None
) -> Callable:
    count = ledger.counter(name, implementation or function.__module__.rsplit(".", 1)[-1], why)

    def call(*args):
        count[0] += 1
        return function(*args)

    call.__doc__ = function.__doc__
    return call
