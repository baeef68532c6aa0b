"""Faults that any operation can have, as wrappers of an honest kernel: of memory, state and calls."""

from collections.abc import Callable

import torch

from dsv4.kernels.contract import rebuilt, tensors
from dsv4.probes.kernel_audit.plant import Plant


def changed(change: Callable) -> Callable:
    """honest → the honest kernel on `change(*arguments)`, a tuple."""
    return lambda honest: lambda *arguments: honest(*change(*arguments))


def after(change: Callable) -> Callable:
    """honest → the honest kernel, its result through `change(result, *arguments)`."""
    return lambda honest: lambda *arguments: change(honest(*arguments), *arguments)


def replaced(number: int, change: Callable) -> Callable:
    """honest → the honest kernel with one argument through `change`."""
    return changed(lambda *a: (*a[:number], change(a[number]), *a[number + 1 :]))


def each(result, change: Callable[[torch.Tensor], torch.Tensor]):
    """The result, a tensor or a tuple, with `change` applied to every tensor."""
    return rebuilt(result, change)


def coarse(t: torch.Tensor) -> torch.Tensor:
    """Activations bf16 through E4M3, fp32 through bf16; other tensors as they are."""
    if t.dtype is torch.bfloat16:
        return t.clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype)
    return t.bfloat16().float() if t.dtype is torch.float32 else t


def _tail_unwritten(result, *arguments):
    def cut(t):
        out = torch.empty_like(t)
        out[:-1] = t[:-1]
        return out

    return each(result, cut)


def _kept_by_address(honest):
    kept = {}

    def faulty(*arguments):
        key = tuple(t.data_ptr() for a in arguments for t in tensors(a))
        if key not in kept:
            kept[key] = honest(*arguments)
        return each(kept[key], torch.clone)

    return faulty


def _idle_after_ten(honest):
    calls, last = [0], {}

    def faulty(*arguments):
        calls[0] += 1
        key = tuple(tuple(t.shape) for a in arguments for t in tensors(a))
        if calls[0] <= 10 or key not in last:
            last[key] = honest(*arguments)
        return each(last[key], torch.clone)

    return faulty


def _scratch(honest):
    """0 · the sum of what the call before returned is added: nothing, unless that was NaN or infinite."""
    left = [0.0]

    def faulty(*arguments):
        found = honest(*arguments)
        out = each(found, lambda t: t + 0 * left[0] if t.is_floating_point() else t)
        left[0] = sum(float(t.double().sum()) for t in tensors(found) if t.is_floating_point())
        return out

    return faulty


def _one_buffer(honest):
    """Every call returns the same memory, so that an earlier result changes."""
    kept = {}

    def one(place, t):
        key = (place, tuple(t.shape), t.dtype)
        return kept.setdefault(key, torch.empty_like(t)).copy_(t)

    def faulty(*arguments):
        found = honest(*arguments)
        return type(found)(map(one, range(len(found)), found)) if isinstance(found, tuple) else one(0, found)

    return faulty


def _by_neighbour(honest):
    """0 · the first row of the first tensor is added to every row: nothing, unless that row is NaN."""

    def faulty(*arguments):
        first = next(t for a in arguments for t in tensors(a))
        leak = 0 * first[:1].float().sum()
        return each(honest(*arguments), lambda t: t + leak.to(t.dtype) if t.is_floating_point() else t)

    return faulty


def _written_over(number: int):
    def make(honest):
        def faulty(*arguments):
            found = each(honest(*arguments), torch.clone)
            next(tensors(arguments[number])).mul_(2)
            return found

        return faulty

    return make


def _dense(number: int):
    """The elements of an argument are taken as they lie in memory, whatever its strides."""

    def flat(t):
        if t.is_contiguous():
            return t
        whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
        return whole[t.storage_offset() :][: t.numel()].view(t.shape) if len(whole) >= t.numel() else t

    return replaced(number, lambda a: rebuilt(a, flat))


def _captured_once(honest):
    """While a graph is captured, the contents of the last call of the shape are taken for those of this one."""
    kept = {}

    def faulty(*arguments):
        key = tuple(tuple(t.shape) for a in arguments for t in tensors(a))
        if torch.cuda.is_current_stream_capturing() and key in kept:
            return honest(*kept[key])
        kept[key] = [rebuilt(a, torch.clone) for a in arguments]
        return honest(*arguments)

    return faulty


def common(
    operation: str, first: int = 0, lower: tuple[int, ...] = (0,), rows: bool = True, kept: int | None = None
) -> tuple[Plant, ...]:
    """The faults of any operation that returns its results. first: an argument with strides; lower: arguments whose
    precision matters; rows: queries do not depend on each other; kept: an argument that may not be written, `first` by
    default."""
    plants = [
        ("zeros", "gate", 12, after(lambda result, *a: each(result, torch.zeros_like))),
        (
            "inputs in a lower precision",
            "gate",
            14,
            changed(lambda *a: tuple(rebuilt(v, coarse) if i in lower else v for i, v in enumerate(a))),
        ),
        ("memory that nobody wrote", "written", 9, after(lambda result, *a: each(result, torch.empty_like))),
        ("the last row is not stored", "written", 63, after(_tail_unwritten)),
        ("an argument is overwritten", "inputs", 65, _written_over(first if kept is None else kept)),
        ("strides are ignored", "layout", 61, _dense(first)),
        ("results by the addresses of arguments", "calls", 1, _kept_by_address),
        ("idle after ten calls", "calls", 2, _idle_after_ten),
        ("a later call writes into an earlier result", "state", 66, _one_buffer),
        ("scratch keeps what the call before left", "state", 67, _scratch),
        ("values of the call before are built into a graph", "capture", 78, _captured_once),
    ]
    if rows:
        plants.append(("a neighbour's row is read", "batch", 73, _by_neighbour))
    return tuple(
        Plant(name, operation, clause, entry, make, "cuda" if clause == "capture" else "any")
        for name, clause, entry, make in plants
    )


def gates(operation: str, faults: dict[str, tuple[int, Callable]]) -> tuple[Plant, ...]:
    """Plants that the gate must find: name → (entry of the catalogue, make)."""
    return tuple(Plant(name, operation, "gate", entry, make) for name, (entry, make) in faults.items())


def _then(change: Callable[[torch.Tensor, torch.Tensor], None], written: tuple[int, ...]):
    """honest → the honest kernel, then change(argument, copy of what it held before) of each argument that it
    writes."""

    def make(honest):
        def faulty(*arguments):
            before = [rebuilt(arguments[i], torch.clone) for i in written]
            found = honest(*arguments)
            for i, old in zip(written, before, strict=True):
                for t, was in zip(tensors(arguments[i]), tensors(old), strict=True):
                    change(t, was)
            return found

        return faulty

    return make


def _beyond(t: torch.Tensor, was: torch.Tensor) -> None:
    """The element behind the last one becomes 0, where memory goes on there."""
    whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    end = t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    whole[end : end + 1].zero_()


def _coarsely(number: int):
    def make(honest):
        def faulty(*arguments):
            for t in tensors(arguments[number]):
                t.copy_(coarse(t))
            return honest(*arguments)

        return faulty

    return make


def _idle(written: tuple[int, ...]):
    """From the eleventh call on arguments are not written."""

    def make(honest):
        calls = [0]

        def faulty(*arguments):
            calls[0] += 1
            return honest(*arguments) if calls[0] <= 10 else arguments[written[0]]

        return faulty

    return make


def in_place(operation: str, written: tuple[int, ...], lower: int = 0) -> tuple[Plant, ...]:
    """The faults of any operation that writes its arguments. lower: the argument whose precision matters."""
    plants = (
        ("zeros", "gate", 12, _then(lambda t, was: t.zero_(), written)),
        ("inputs in a lower precision", "gate", 14, _coarsely(lower)),
        ("the last row is not stored", "gate", 63, _then(lambda t, was: t[-1:].copy_(was[-1:]), written)),
        ("a store behind the end", "guard", 64, _then(_beyond, written)),
        ("idle after ten calls", "calls", 2, _idle(written)),
    )
    return tuple(Plant(name, operation, clause, entry, make) for name, clause, entry, make in plants)
