"""Planted faults: each known class of bug, in a few lines, to be found by probes that do not know which one it is.

A mutation is a function of a `Site`, registered with @mutation. It damages the site's private copy of a checkpoint, or
patches the code of the model, a kernel, a cache or the loader, or changes the loaded subject. Files of this folder
follow the sections of the list of known bugs, and the first of a section has its title (`SECTION`). `catalogue()` has
all mutations, `sections()` the titles. `dsv4.probes.selftest.run` plants them one by one and runs the probes.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dsv4.kernels.dispatch import BACKENDS, DispatchLedger, Operation, bind
from dsv4.kernels.errors import Dsv4Error
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS, TIER_OPERATIONS
from dsv4.model.gqa.model import GQA_COMPOSITIONS

Plant = Callable[["Site"], None]


@dataclass
class Site:
    """Where one fault is planted.

    checkpoint: a copy of the synthetic checkpoint, made for this fault alone and to be damaged freely before it is
    loaded. Patches last until `undo`; functions given to `after_load` are called with the loaded subject, before any
    probe.
    """

    checkpoint: Path
    loaded: list[Callable[[Any], None]] = field(default_factory=list)
    _undo: ExitStack = field(default_factory=ExitStack)

    def patch(self, owner: Any, name: str, value: Any) -> Any:
        """Replace owner.name (a module, class or object) by `value`, and return what was there. Raises Dsv4Error for a
        function that cannot be called as the one before: its callers would end in an error instead of the fault."""
        own, before = name in vars(owner), getattr(owner, name)
        _check_call(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", before, value)
        kept = vars(owner)[name] if own else None  # as stored: a staticmethod stays one
        setattr(owner, name, value)
        self._undo.callback(lambda: setattr(owner, name, kept) if own else delattr(owner, name))
        return before

    def patch_item(self, table: dict, key: Any, value: Any) -> Any:
        """Replace table[key], and return what was there."""
        before = table[key]
        table[key] = value
        self._undo.callback(lambda: table.__setitem__(key, before))
        return before

    def kernel(self, name: str, change: Callable[[Callable], Callable]) -> None:
        """Replace operation `name` by change(what ran before) on every backend but `reference`, which stays the
        definition: in every table that has it."""
        for table in (OPERATIONS, GQA_OPERATIONS, TIER_OPERATIONS):
            if name in table:
                op = table[name]
                others = {
                    backend: change(op.resolve(backend)[0])
                    for backend in ("cpu", *op.implementations)
                    if backend != "reference"
                }
                self.patch_item(table, name, Operation(name, op.implementations | others))
        self.unfused(name)

    def kernel_on(self, name: str, backend: str, function: Callable) -> None:
        """Replace operation `name` by `function` on one backend, in the table of every family that has it."""
        for table in (OPERATIONS, GQA_OPERATIONS, TIER_OPERATIONS):
            if name in table:
                others = dict(table[name].implementations) | {backend: function}
                self.patch_item(table, name, Operation(name, others))

    def unfused(self, operation: str) -> None:
        """What runs `operation` (an operation or a composition) and others as one kernel runs them one by one: neither
        a changed operation nor changed code of the model around it would run otherwise."""
        for table in (COMPOSITIONS, GQA_COMPOSITIONS):
            for composition in table.values():
                if operation in (composition.name, *composition.parts) and composition.implementations:
                    self.patch_item(table, composition.name, replace(composition, implementations={}))

    def composition(self, name: str, change: Callable[[Callable], Callable]) -> None:
        """Replace composition `name` on every backend but the reference: change(what that backend runs as one), or, of
        a backend that runs it in parts, change(its definition by the reference's operations).

        The definition may read numbers on the host, which no stream capture allows: a fault made of it on a GPU would
        end in that error instead of in wrong numbers.
        """
        held, op = COMPOSITIONS[name], bind(OPERATIONS, "reference", DispatchLedger())
        parts = partial(held.default, op)
        backends = (b for b in BACKENDS if b not in ("reference", "training"))
        others = {backend: change(held.implementations.get(backend, parts)) for backend in backends}
        for table in (COMPOSITIONS, GQA_COMPOSITIONS):
            if name in table:
                self.patch_item(table, name, replace(held, implementations=others))

    def after_load(self, change: Callable[[Any], None]) -> None:
        self.loaded.append(change)

    def undo(self) -> None:
        self._undo.close()


@dataclass(frozen=True)
class Mutation:
    """One fault. section: of the list of known bugs ('1.3'); bugs: its ids there; what: one line in the words of the
    model.

    parts: words of which a finding must name one (in its part, where or name) to have found this fault and not just
    some symptom; probes: those that are asked first, for speed (the others follow), and of them first the one that
    should name it; numerics, profile, caches: of the
    subject it is planted in (caches: formats of the main cache and of the index keys); backend: 'training' or 'cpu' for
    a fault that only this backend can have, planted in host memory; 'triton' for one that only a GPU can have, planted
    if that backend is asked for; '' for the backend that is asked for.
    """

    name: str
    section: str
    bugs: tuple[int, ...]
    what: str
    parts: tuple[str, ...]
    plant: Plant
    probes: tuple[str, ...] = ()
    numerics: str = "fp32"
    profile: str = "default"
    caches: tuple[str, str] = ("auto", "auto")
    backend: str = ""


_REGISTERED: dict[str, Mutation] = {}


def mutation(
    section: str,
    bugs: tuple[int, ...],
    parts: tuple[str, ...],
    probes: tuple[str, ...] = (),
    numerics: str = "fp32",
    profile: str = "default",
    caches: tuple[str, str] = ("auto", "auto"),
    backend: str = "",
) -> Callable[[Plant], Plant]:
    """Register a function as a mutation; its name (with spaces) and the first line of its docstring describe it."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        if name in _REGISTERED and _REGISTERED[name].plant.__module__ != plant.__module__:
            raise Dsv4Error(f"two mutations are called {name!r}; expected a name of its own for each")
        what = (plant.__doc__ or "").strip().splitlines()[0]
        _REGISTERED[name] = Mutation(
            name, section, bugs, what, parts, plant, probes, numerics, profile, caches, backend
        )
        return plant

    return register


def catalogue() -> list[Mutation]:
    """All mutations, in order of section and then of the files."""
    _modules()
    return sorted(_REGISTERED.values(), key=lambda m: _numbers(m.section))


def sections() -> dict[str, str]:
    """Number → title of the sections, in their order: what the files have as `SECTION`. Raises Dsv4Error for two titles
    of one number."""
    titles = [module.SECTION for module in _modules() if hasattr(module, "SECTION")]
    twice = [number for number, n in Counter(number for number, _ in titles).items() if n > 1]
    if twice:
        raise Dsv4Error(
            f"section {twice[0]} has a title in two files of probes/faults; expected one SECTION of a number"
        )
    return dict(sorted(titles, key=lambda title: _numbers(title[0])))


def _modules() -> list[ModuleType]:
    return [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]


def _check_call(what: str, before: Any, value: Any) -> None:
    """Raises Dsv4Error if `value` cannot be called with every argument of the function `before`, by place."""
    if not isinstance(before, FunctionType) or not isinstance(value, FunctionType):
        return
    asked = signature(before).parameters.values()
    place = [p.name for p in asked if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: None for p in asked if p.kind is p.KEYWORD_ONLY}
    try:
        signature(value).bind(*place, **named)
    except TypeError as error:
        raise Dsv4Error(
            f"a planted {what} cannot be called as what it replaces: {error}; expected {signature(before)}"
        ) from None


def _numbers(section: str) -> list[int]:
    """'1.10' → [1, 10]."""
    return [int(part) for part in section.split(".")]
