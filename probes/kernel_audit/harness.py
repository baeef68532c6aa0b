"""What runs beside a kernel in its own process: places arguments, calls it, hands back plain copies of what it
returned.

The subject can reach everything here; references, tolerances and seeds are in the parent.
"""

import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dsv4.kernels.contract import Contract, ordered, outcome, rebuilt, tensors
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.errors import BackendUnavailable, UnsupportedInput
from dsv4.probes.kernel_audit.errors import SubjectFailed
from dsv4.probes.kernel_audit.subject import SubjectSpec, resolve

REFUSALS = (NotImplementedError, UnsupportedInput, BackendUnavailable)
GUARD, MARK = 512, 0x5A  # bytes before and after a buffer, and their value
Templates = list[tuple[tuple[int, ...], torch.dtype]]
_empty, _empty_like, _new_empty, _strided = torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided


@dataclass
class Harness:
    """One kernel on one device."""

    spec: SubjectSpec

    def __post_init__(self):
        self.honest_clocks = clocks()
        self.threads = threading.active_count()
        self.contract = contract_of(self.spec.operation)
        self.function = resolve(self.spec)
        self.device = torch.device(self.spec.device)
        self.count = taken(self.function, self.contract, self.spec.out_arguments)

    def place(self, arguments: tuple) -> tuple:
        """Copies of the arguments on the device, each tensor in memory of its own and with its strides."""
        return placed(arguments, self.device)

    def call(self, arguments: tuple, templates: Templates | tuple = (), fill: int = 0xFF) -> list[torch.Tensor]:
        """Results in the order of the contract, on the device. Raises SubjectFailed."""
        arguments = arguments[: self.count]
        try:
            if self.spec.out_arguments:
                returned = [_filled(shape, dtype, self.device, fill) for shape, dtype in templates]
                self.function(*arguments, *returned)
            else:
                returned = self.function(*arguments)
        except REFUSALS as error:
            raise SubjectFailed(f"{type(error).__name__}: {_line(error)}", refused=True) from error
        return self.results(returned, arguments)

    def fresh(self, arguments: tuple) -> Callable[[], tuple]:
        """Placed arguments for each of several calls: the same memory every time, unless a call may write in it. They
        are copied from the device then, so that the host does not wait for it between calls."""
        placed = self.place(arguments)
        if self.contract.written or any(a.scratch for a in self.contract.arguments):
            return lambda: self.place(placed)
        return lambda: placed

    def prepared(self, arguments: tuple, templates: Templates | tuple = ()) -> Callable[[], list[torch.Tensor]]:
        """A call of these arguments. Where an adapter prepares some of them once, as a server does at a load or a
        step, that is done here and not by the call."""
        if not getattr(self.function, "prepared", ()):
            return lambda: self.call(arguments, templates)
        run, finish = self.function.prepare(*arguments[: self.count])
        return lambda: self.results(finish(run()), arguments)

    def ordered(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Results of which sets of indices are in ascending order, and what belongs to the indices with them."""
        return ordered(results, (o.rule for o in self.contract.outputs))

    def bits(self, arguments: tuple, templates: Templates | tuple = (), fill: int = 0xFF) -> list[bytes]:
        """Bytes of the ordered results of a call, to be compared."""
        return bits(self.ordered(self.call(arguments, templates, fill)))

    def steady(self, fresh: Callable[[], tuple], templates: Templates | tuple = ()) -> list[bytes] | None:
        """Bytes of the ordered results; None where a second call right behind the first gives others, which is what
        the clause of repeats is for."""
        first = self.bits(fresh(), templates)
        return first if self.bits(fresh(), templates) == first else None

    def results(self, returned, arguments: tuple) -> list[torch.Tensor]:
        """Returned tensors and those that were written in place, in the order of the contract's outputs: see
        `results_of`."""
        given = plain(returned)
        if self.spec.without_state:
            return given
        return results_of(self.contract, returned, arguments)


def results_of(contract: Contract, returned, arguments: tuple) -> list[torch.Tensor | None]:
    """The results of one call in the order of the contract's outputs. Raises SubjectFailed where an argument that is
    overwritten and returned is returned as another tensor: callers may take either."""
    given, found = plain(returned), outcome(contract, returned, arguments)
    for output, t in zip(contract.outputs, given if len(given) == len(found) else ()):
        place = output.argument
        if place is not None and next(tensors(arguments[place])).data_ptr() != t.data_ptr():
            name = contract.arguments[place].name
            raise SubjectFailed(f"{name} is returned as another tensor; expected the argument, overwritten")
    return found


def plain(returned) -> list[torch.Tensor]:
    """Every tensor of what a call returned. Raises SubjectFailed for one of another class."""
    found = list(tensors(returned))
    for t in found:
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            raise SubjectFailed(f"a result is a {type(t).__name__}, expected a plain torch.Tensor")
    return found


def taken(function: Callable, contract: Contract, out_arguments: bool) -> int:
    """How many of the contract's arguments a function takes: hints and optional ones at the end may be left out. Raises
    SubjectFailed where it takes fewer than it must."""
    count = len(contract.arguments)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin says nothing of its parameters
        return count
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return count
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    places -= len(contract.outputs) if out_arguments else 0
    needed = max((i + 1 for i, a in enumerate(contract.arguments) if not (a.hint or a.optional)), default=0)
    if places < needed:
        names = ", ".join(a.name for a in contract.arguments)
        raise SubjectFailed(f"it takes {places} positional arguments, expected those of the contract: {names}")
    return min(places, count)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _filled(shape, dtype: torch.dtype, device, fill: int) -> torch.Tensor:
    """Memory for a result, every byte of it `fill`: NaN for 255."""
    size = math.prod(shape) * dtype.itemsize
    return torch.full((size,), fill, dtype=torch.uint8, device=device).view(dtype).view(shape)


def placed(arguments: Iterable, device) -> tuple:
    """Copies of the arguments on `device`, each tensor in memory of its own and with its strides."""
    return tuple(rebuilt(a, lambda t: own(t, device)) for a in arguments)


def own(a: torch.Tensor, device) -> torch.Tensor:
    """A copy with the strides of `a` in memory of its own."""
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(a.shape, a.stride())) if a.numel() else 0
    return torch.zeros(size, dtype=a.dtype, device=device).as_strided(a.shape, a.stride()).copy_(a)


def raw(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies in host memory; waits for the device."""
    return [None if t is None else t.detach().cpu().contiguous().clone() for t in results]


def bits(results: list[torch.Tensor]) -> list[bytes]:
    """Bytes of results, to be compared."""
    return [
        b"" if t is None else t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        for t in raw(results)
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two tensors hold the same bits: bool [] on their device."""
    return (integers(a) == integers(b)).all()


def integers(t: torch.Tensor) -> torch.Tensor:
    """The bits of each number as an integer."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far results lie apart, [] on their device: the largest difference over the largest number, infinite where one
    alone is NaN; of whole numbers the share that differs."""
    if not a.numel():
        return torch.zeros((), device=a.device)
    if not a.is_floating_point():
        return (a != b).float().mean()
    a, b = a.float(), b.float()
    same = (a == b) | a.isnan() & b.isnan()
    far = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf"), float("inf")).amax()
    return far / b.nan_to_num(0, 0, 0).abs().amax().clamp(min=1e-30)


def clocks() -> dict:
    """What measures time and decides what a tensor is; the audit sees that a subject left it alone."""
    found = {"time.perf_counter": time.perf_counter, "time.time": time.time, "torch.allclose": torch.allclose}
    for name in ("synchronize", "Event", "current_stream", "Stream"):
        found[f"torch.cuda.{name}"] = getattr(torch.cuda, name, None)
    found["torch.cuda.Event.elapsed_time"] = torch.cuda.Event.elapsed_time
    found["torch.cuda.Event.record"] = torch.cuda.Event.record
    found["torch.equal"], found["torch.Tensor.cpu"], found["torch.Tensor.copy_"] = (
        torch.equal,
        torch.Tensor.cpu,
        torch.Tensor.copy_,
    )
    return found


@contextmanager
def allocations(fill: int, guard: bool = False) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Memory that torch.empty and its like hand out is filled with the byte `fill`; with `guard` it lies inside a
    longer buffer, and the list holds (buffer, view) of each."""
    handed: list = []

    def filled(t: torch.Tensor) -> torch.Tensor:
        if not guard or t.layout is not torch.strided or not t.numel() or not t.is_contiguous():
            if t.numel() and t.ndim and t.is_contiguous():
                t.view(-1).view(torch.uint8).fill_(fill)
            return t
        size = t.numel() * t.element_size()
        buffer = _empty(size + 2 * GUARD, dtype=torch.uint8, device=t.device).fill_(MARK)
        inner = buffer[GUARD : GUARD + size].fill_(fill)
        view = inner.view(t.dtype).view(t.shape)
        handed.append((buffer, view))
        return view

    torch.empty = lambda *a, **k: filled(_empty(*a, **k))
    torch.empty_like = lambda *a, **k: filled(_empty_like(*a, **k))
    torch.Tensor.new_empty = lambda *a, **k: filled(_new_empty(*a, **k))
    torch.empty_strided = lambda *a, **k: filled(_strided(*a, **k))
    try:
        yield handed
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = _empty, _empty_like, _new_empty
        torch.empty_strided = _strided


def touched(handed: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Guard bytes that are not what they were."""
    return sum(int((b[:GUARD] != MARK).sum() + (b[-GUARD:] != MARK).sum()) for b, _ in handed)
