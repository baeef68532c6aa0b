"""What an operation promises, as data: arguments, outputs, cases, accuracy classes, bytes and arithmetic.

Each folder of `kernels/` has a `contract.py` with one `Contract` an operation; `kernels.contracts` lists them. The
definitions that are exported, the audit of anybody's kernel, the tests and the floors are made from it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.kernels.cache_rows import PackedRows, decode_rows
from dsv4.kernels.drawing import Draw
from dsv4.kernels.quantize import PackedWeight
from dsv4.kernels.quantize.exact import values

SUMS, BITS, CODES, SET = "sums", "bits", "codes", "set"


@dataclass(frozen=True)
class Argument:
    """One positional argument.

    shape: axis names or numbers; None for a Python number. dtype: a torch name, or 'activation' (bf16 or fp32),
    'rows' (a pool of rows in the activations' dtype, or `PackedRows`), 'weight' (`PackedWeight`). optional: None is
    allowed. hint: a promise of the caller that a kernel may ignore, so that an adapter may leave it out.
    scratch: a kernel may leave anything in it, so that only the result counts.
    """

    name: str
    shape: tuple[str | int, ...] | None
    dtype: str
    about: str
    optional: bool = False
    hint: bool = False
    scratch: bool = False


@dataclass(frozen=True)
class Output:
    """One result, or one argument that is written in place (`argument` is its number).

    rule: 'sums': relative L2 of each row against fp64; 'bits': equal bits; 'codes': values rounded to FP8 or FP4 at
    the end, of which one beside a boundary may move by a code; 'set': indices of each row in any order. row: number of
    trailing axes that make one row; liberty: what a kernel may do otherwise, in words.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str
    about: str
    rule: str = SUMS
    row: int = 1
    argument: int | None = None
    liberty: str = ""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an operation.

    family: what its inputs make visible. unread: argument name → bool mask over its tensor (over `data` of
    `PackedRows`) of what may not be read: its content is finite and ordinary here, and the poison clause makes it NaN.
    exempt: canaries that cannot fail here, with the reason. rules: output name → the rule of this case,
    where it is not the output\'s own: the same results are codes if a case simulates a cache, and sums if not.
    kept: columns at the end of each row of codes that are not coded.
    """

    label: str
    family: str
    arguments: tuple
    unread: Mapping[str, torch.Tensor] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    kept: int = 0


@dataclass(frozen=True)
class Work:
    """Bytes that a right kernel must move and operations (a multiply and an add are two) that it must do, each with
    its formula in the widths' names."""

    bytes: int
    flops: int
    formula: str


@dataclass(frozen=True)
class Production:
    """Calls at the sizes of a model, stated once for who times kernels and who compiles them.

    inputs(widths, draw, **sizes): the arguments of one call on the draw's device, which may be `meta`. sizes(widths):
    consumer → the calls that it makes, as keywords of `inputs`: 'timed' of `dsv4 kernel bench`, 'bench' of the rows of
    `scripts/bench`, 'compiled' of `scripts/aot` where it is not what the others call. label(**sizes): the name of a
    timed case.
    """

    inputs: Callable[..., tuple]
    sizes: Callable[[Any], Mapping[str, Sequence[Mapping[str, Any]]]] = lambda widths: {}
    label: Callable[..., str] = lambda **sizes: ", ".join(f"{name} {value}" for name, value in sizes.items())

    def timed(self, widths, draw: Draw) -> Iterator[Case]:
        """Cases of the sizes that are timed."""
        for each in self.sizes(widths).get("timed", ()):
            yield Case(self.label(**each), "timed", self.inputs(widths, draw, **each))

    def compiled(self, widths) -> Sequence[Mapping[str, Any]]:
        """The calls whose kernels are compiled ahead of time."""
        sizes = self.sizes(widths)
        return sizes["compiled"] if "compiled" in sizes else [*sizes.get("bench", ()), *sizes.get("timed", ())]

    def drawn(self, widths, seed: int, device: str, dtype: torch.dtype = torch.bfloat16, **sizes) -> tuple:
        """The arguments of one call. dtype: of activations, which sizes may name too."""
        return self.inputs(widths, Draw(seed, dtype, device), **sizes)


def of_tokens(*counts: int) -> Callable[[Any], dict]:
    """Sizes of benchmarked calls that differ in their tokens alone."""
    return lambda widths: {"bench": [dict(tokens=N) for N in counts]}


@dataclass(frozen=True)
class Contract:
    """One operation.

    operation: its name in `kernels.operations` or in `kernels.fusions`. exact(*arguments): the results in fp64 of the
    quantised inputs, in another way than the reference. classes: accuracy class → an honest kernel of that class
    (products of the inputs as they are, fp32 sums, one rounding at the end), whose own distance from `exact` is the
    measure of others; the first is the default. cases(widths, draw): inputs. batch: argument name → axis of the
    queries, empty if a query cannot stand alone; an argument that is not named is shared. pools: argument that is a
    pool of rows → the argument that lists rows of it, None where it is one run a batch row. empty: zero queries are
    allowed. production: calls at the sizes of a model. edges: what happens there, in words, for the report.
    """

    operation: str
    about: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    exact: Callable[..., Any]
    classes: Mapping[str, Callable[..., Any]]
    cases: Callable[[Any, Draw], Iterable[Case]]
    work: Callable[..., Work]
    edges: tuple[str, ...] = ()
    batch: Mapping[str, int] = field(default_factory=dict)
    pools: Mapping[str, str | None] = field(default_factory=dict)
    empty: bool = True
    production: Production | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

    def default(self, dtype: torch.dtype) -> str:
        """The accuracy class of activations in `dtype` where none is asked for: 'fp32' of fp32 ones, else the first."""
        return "fp32" if dtype is torch.float32 and "fp32" in self.classes else next(iter(self.classes))

    def timed(self, widths, draw: Draw) -> list[Case]:
        """The cases of `dsv4 kernel bench`: those of production, where it has any, else random ones."""
        made = self.production.timed(widths, draw) if self.production else ()
        return [*made] or [case for case in self.cases(widths, draw) if case.family == "random"]

    def number(self, name: str) -> int:
        """Position of the argument called `name`."""
        return next(i for i, a in enumerate(self.arguments) if a.name == name)

    @property
    def written(self) -> tuple[int, ...]:
        """Numbers of arguments that are results too."""
        return tuple(o.argument for o in self.outputs if o.argument is not None)


def tensors(value) -> Iterator[torch.Tensor]:
    """Every tensor of an argument or a result: itself, of packed rows and weights, of tuples and lists; None has
    none."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedRows):
        yield value.data
    elif isinstance(value, PackedWeight | tuple | list):
        for part in value:
            yield from tensors(part)


def outcome(contract: Contract, returned, arguments) -> list[torch.Tensor | None]:
    """The results of one call in the order of the contract's outputs; None for one that is missing.

    What is written in place is read where it was written, whether it is returned too or not."""
    given: list[torch.Tensor | None] = [*tensors(returned)]
    places = [o.argument for o in contract.outputs]
    if all(place is None for place in places):
        return given
    if len(given) != len(places):
        rest = iter(given)
        given = [next(rest, None) if place is None else None for place in places]
    return [t if place is None else next(tensors(arguments[place])) for t, place in zip(given, places)]


def ordered(results: Sequence, rules: Iterable[str]) -> list:
    """Results of which sets of indices are in ascending order, and what belongs to the indices with them."""
    sets = [r for r, rule in zip(results, rules) if rule == SET and r is not None]
    if not sets:
        return list(results)
    order = sets[0].sort(dim=-1, stable=True).indices
    return [r.gather(-1, order) if r is not None and r.shape == order.shape else r for r in results]


def rebuilt(value, change: Callable[[torch.Tensor], torch.Tensor], left: type | tuple = ()):
    """A structure with `change` applied to each of its tensors; parts of a type of `left` stay as they are."""
    if isinstance(value, left):
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(v, change, left) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(rebuilt(v, change, left) for v in value)
    return value


def copied(arguments: tuple) -> tuple:
    """Arguments for a call that may write in them. Weights, which no operation writes, are not copied, so that what is
    computed from them may be kept."""
    return rebuilt(arguments, torch.clone, PackedWeight)


def doubles(value) -> torch.Tensor | None:
    """Values as fp64: packed rows and weights by their codes and scales, exactly."""
    if isinstance(value, PackedRows):
        return decode_rows(value).double()
    if isinstance(value, PackedWeight):
        return values(value)
    return None if value is None else value.double()
