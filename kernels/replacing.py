"""A user's kernel in the place of an operation: how it is called, and what its results are held to.

It gets the reference's positional arguments, with the reference's defaults filled in. Shapes, dtypes and device of what
it returns are compared at every call (`dsv4.kernels.results`), which reads no number of a tensor.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dsv4.kernels.errors import Dsv4Error, KernelFailed, KernelMismatch, KernelNotLoaded, UnknownOperation
from dsv4.kernels.results import RESULTS, described, fits, flat, wanted
from dsv4.kernels.user import OURS, checked, load_kernel, place_of, source_sha256

if TYPE_CHECKING:
    from dsv4.kernels.dispatch import Composition, Operation

# optional arguments that change how an operation may be computed and not what comes out: a kernel may do without them
HINTS = {"sparse_attention": {"complete", "together"}, "hca_attention": {"complete"}, "topk_entries": {"visible"}}


@dataclass(frozen=True)
class Replacement:
    """What was asked for in an operation's place. shown: its spec without directories; portable: its spec for another
    process, None for a function that has none; function: None where the spec is 'ours' or 'reference'; sha256: of the
    file that defines it."""

    shown: str
    portable: str | None
    function: Callable | None
    sha256: str | None = None

    @classmethod
    def of(cls, asked: "str | Callable | Replacement") -> "Replacement":
        """Of a spec, which is loaded, or of a function. Raises KernelNotLoaded."""
        if isinstance(asked, Replacement):
            return asked
        if isinstance(asked, str):
            spec = checked(asked)
            if spec.backend is not None:
                return cls(spec.text, spec.text, None)
            function = load_kernel(asked)
            return cls(spec.shown, spec.portable, function, source_sha256(function))
        if not callable(asked):
            raise KernelNotLoaded(f"a kernel is {type(asked).__name__}; expected a function, or its spec as text")
        name = getattr(asked, "__qualname__", type(asked).__name__)
        return cls(f"{getattr(asked, '__module__', '?')}:{name}", None, asked, source_sha256(asked))


def replacements_of(asked: Mapping[str, Any] | None) -> dict[str, Replacement]:
    """Operation → Replacement, of specs or functions. Raises KernelNotLoaded."""
    return {name: Replacement.of(each) for name, each in (asked or {}).items()}


def check_known(
    names: Mapping[str, Any], operations: Mapping[str, "Operation"], compositions: Mapping[str, "Composition"]
) -> None:
    """Raises UnknownOperation for a name that is no operation."""
    for name in names:
        if name not in operations:
            parts = ", ".join(compositions[name].parts) if name in compositions else ""
            why = f"{name} is a fused form of {parts or 'steps that are no operations'}" if name in compositions else ""
            raise UnknownOperation(
                f"a kernel was given for {name!r}, which is no operation of this model{f': {why}' if why else ''}; "
                f"it has {', '.join(sorted(operations))}"
            )


class Replaced:
    """A kernel that stands for one operation of a model on `backend`. dropped: optional arguments of the reference that
    it does not take.

    Raises KernelMismatch for a function that takes fewer arguments than it must, or wants more.
    """

    def __init__(self, operation: "Operation", given: Replacement, backend: str):
        self.operation, self.given = operation.name, given
        named = {OURS: backend}.get(given.shown, given.shown)
        self.function: Callable = given.function or operation.resolve(named)[0]
        parameters = list(inspect.signature(operation.implementations["reference"]).parameters.values())
        self._defaults = tuple(p.default for p in parameters if p.default is not p.empty)
        self._most = len(parameters)
        self._takes = self._fitted(self._most, self._most - len(self._defaults))
        self.dropped = tuple(p.name for p in parameters[self._takes :])
        hints = HINTS.get(self.operation, set())
        self._needed = [(i, p) for i, p in enumerate(parameters) if p.name in self.dropped and p.name not in hints]
        self._form = RESULTS.get(self.operation)
        self.__doc__ = operation.__doc__

    @property
    def shown(self) -> str:
        return self.given.shown

    def __call__(self, *args):
        """The kernel's result. Raises KernelFailed for what it raises, and KernelMismatch for a result that is not of
        the reference's form or an argument that it does not take."""
        args += self._defaults[len(self._defaults) - self._most + len(args) :] if len(args) < self._most else ()
        for i, parameter in self._needed:
            value, usual = args[i], parameter.default
            if value is not usual and (usual is None or value != usual):
                raise KernelMismatch(
                    f"{self._who} takes no {parameter.name}, and the model calls it with {parameter.name} "
                    f"{described(value) if isinstance(value, torch.Tensor) else value!r}; add the argument"
                )
        try:
            found = self.function(*args[: self._takes])
        except Exception as error:
            if isinstance(error, (Dsv4Error, MemoryError)) or type(error).__name__ == "OutOfMemoryError":
                raise
            said = " ".join(str(error).split())[:300]
            file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
            at = place_of(error, file) or place_of(error, None)
            raise KernelFailed(f"{self._who} raised {type(error).__name__}: {said}{at}") from error
        self._check(found, args)
        return found

    @property
    def _who(self) -> str:
        return f"operation {self.operation}: kernel {self.shown}"

    def _check(self, found, args: tuple) -> None:
        if self._form is None:
            return
        form = self._form(*args)
        if not fits(found, form):
            raise KernelMismatch(f"{self._who} returned {described(found)}; expected {wanted(form)}")
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        for tensor in flat(found) if form is not None else ():
            if first is not None and tensor.device != first.device:
                raise KernelMismatch(f"{self._who} returned a tensor on {tensor.device}; expected {first.device}")
            strides = None if first is None else first.stride()  # the reference may write in place, or into its like
            if not tensor.is_contiguous() and tensor.stride() != strides and self.operation != "grouped_linear":
                raise KernelMismatch(
                    f"{self._who} returned {described(tensor)} with strides {list(tensor.stride())}; expected a "
                    "contiguous tensor: return it through .contiguous()"
                )

    def _fitted(self, most: int, required: int) -> int:
        """How many of the reference's arguments the kernel is given."""
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):  # compiled code may not say what it takes
            return most
        lonely = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        if lonely:
            raise KernelMismatch(
                f"{self._who} wants {', '.join(lonely)} by keyword; it is called with the reference's positional "
                "arguments alone"
            )
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return most
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        need = sum(p.default is p.empty for p in places)
        if len(places) < required or need > most:
            least = "" if required == most else f"{required} to "
            raise KernelMismatch(
                f"{self._who} takes {len(places) if len(places) < required else need} arguments; expected {least}{most}"
                f", in the order of the reference: see the docstring of dsv4.kernels.operations.{self.operation}"
            )
        return min(len(places), most)
