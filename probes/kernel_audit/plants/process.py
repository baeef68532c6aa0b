"""Planted faults that any operation can have: state between calls, memory, the process, layouts."""

import threading
import time

import torch

from dsv4.kernels.contract import rebuilt, tensors
from dsv4.probes.kernel_audit.plant import Plant

HONEST_CALLS = 5


def first_tensor(arguments) -> torch.Tensor:
    return next(tensors(arguments))


def mapped(value, change):
    """A result with `change` applied to each tensor."""
    return rebuilt(value, change)


def by_pointer(honest):
    """The last result for the same addresses."""
    kept: dict = {}

    def faulty(*arguments):
        key = tuple(t.data_ptr() for t in tensors(arguments))
        if key not in kept:
            kept[key] = mapped(honest(*arguments), torch.clone)
        return mapped(kept[key], torch.clone)

    return faulty


def after_some_calls(honest):
    """Right at first, then the first result for ever where the shapes allow it."""
    state = {"calls": 0, "shape": None, "kept": None}

    def faulty(*arguments):
        state["calls"] += 1
        if state["calls"] <= 60 + HONEST_CALLS:
            return honest(*arguments)
        return mapped(honest(*arguments), torch.zeros_like)

    return faulty


def unwritten(honest):
    """Memory of the results' shape, as it is found."""
    return lambda *arguments: mapped(honest(*arguments), lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device))


def tail_unwritten(honest):
    """The last row is not stored."""

    def store(t: torch.Tensor) -> torch.Tensor:
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        flat, source = out.view(-1), t.contiguous().view(-1)
        kept = max(1, flat.numel() - max(1, t.shape[-1] // 2))
        flat[:kept] = source[:kept]
        return out

    return lambda *arguments: mapped(honest(*arguments), store)


def times_zero(honest):
    """Old contents of the result's memory are multiplied by zero before sums are added, which NaN survives."""

    def store(t: torch.Tensor) -> torch.Tensor:
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        old = torch.where(out.abs() > 1e30, 0, out) if t.is_floating_point() else out
        return t + old * 0

    return lambda *arguments: mapped(honest(*arguments), store)


def adds_old_numbers(honest):
    """Memory that holds one number everywhere is taken for sums that were begun, unless it is not finite."""

    def store(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        alike = out.numel() > 0 and bool((out == out.view(-1)[:1]).all())
        return out + t if alike else t

    return lambda *arguments: mapped(honest(*arguments), store)


def beyond_the_end(honest):
    """A store without a mask: sixteen bytes behind the result."""

    def store(t: torch.Tensor) -> torch.Tensor:
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        out.copy_(t)
        more = out.untyped_storage()
        size, place = t.numel() * t.element_size(), out.storage_offset() * t.element_size()
        if more.nbytes() >= place + size + 16:
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(more, place + size, (16,)).fill_(1)
        return out

    return lambda *arguments: mapped(honest(*arguments), store)


def static_workspace(honest):
    """Results are views of a buffer that every call uses."""
    kept: dict = {}

    def into(t: torch.Tensor) -> torch.Tensor:
        key = (t.dtype, t.device, "workspace")
        if key not in kept or kept[key].numel() < t.numel():
            kept[key] = torch.zeros(max(t.numel(), 1 << 16), dtype=t.dtype, device=t.device)
        return kept[key][: t.numel()].view(t.shape).copy_(t)

    return lambda *arguments: mapped(honest(*arguments), into)


def stale_scratch(honest):
    """A scratch buffer that is cleared only when it is made: it carries over into the next problem."""
    kept: dict = {"carry": 0.0, "shape": None}

    def faulty(*arguments):
        result = honest(*arguments)
        shape = tuple(first_tensor(arguments).shape)
        carry = kept["carry"] if kept["shape"] not in (None, shape) else 0.0
        kept["shape"] = shape
        kept["carry"] = 0.5
        return mapped(result, lambda t: t + carry if t.is_floating_point() and carry else t.roll(1, -1) if carry else t)

    return faulty


def spoilt_by_nan(honest):
    """A NaN of an earlier problem stays in the scratch buffer."""
    kept = {"nan": False}

    def faulty(*arguments):
        found = any(bool(t.isnan().any()) for t in tensors(arguments) if t.is_floating_point() and t.element_size() > 1)
        result = honest(*arguments)
        if kept["nan"] and not found:
            result = mapped(result, lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t * 0)
        kept["nan"] |= found
        return result

    return faulty


def one_global_for_all(honest):
    """Arguments are put into a module's buffer before they are used, with a pause in between."""
    shared: dict = {}

    def faulty(*arguments):
        shared["arguments"] = arguments
        time.sleep(0.002)
        return honest(*shared["arguments"])

    return faulty


def changes_an_argument(honest):
    """The first argument is used as scratch."""

    def faulty(*arguments):
        result = honest(*arguments)
        t = first_tensor(arguments)
        if t.numel() and t.is_floating_point():
            t.view(-1)[:1].mul_(2) if t.is_contiguous() else t.mul_(2)
        return result

    return faulty


def ignores_strides(honest):
    """The first argument is read as if its rows were dense."""

    def dense(t: torch.Tensor) -> torch.Tensor:
        if t.is_contiguous() or not t.numel():
            return t
        size = t.numel()
        room = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
        return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride()) if room >= size else t.contiguous()

    return lambda first, *rest: honest(dense(first) if isinstance(first, torch.Tensor) else first, *rest)


def needs_alignment(honest):
    """Addresses are rounded down to 16 bytes, as vector loads of aligned addresses do."""

    def aligned(t: torch.Tensor) -> torch.Tensor:
        off = t.storage_offset() * t.element_size() % 16 // t.element_size()
        return t.as_strided(t.shape, t.stride(), t.storage_offset() - off) if off else t

    return lambda *arguments: honest(*(rebuilt(a, aligned) if isinstance(a, torch.Tensor) else a for a in arguments))


def fails_on_nothing(honest):
    """A launch with an empty grid."""

    def faulty(*arguments):
        if first_tensor(arguments).numel() == 0:
            raise RuntimeError("invalid configuration argument")
        return honest(*arguments)

    return faulty


def a_thousandth_differs(honest):
    """Now and then a unit in the last place of one value: a race."""
    state = {"calls": 0}

    def faulty(*arguments):
        state["calls"] += 1
        result = honest(*arguments)
        if state["calls"] % 7:
            return result
        return mapped(result, _nudged)

    return faulty


def _nudged(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    if t.numel() and t.is_floating_point():
        flat = t.view(-1)
        place = flat.isfinite().nonzero()[:1]
        flat[place] = torch.nextafter(flat[place].float(), torch.tensor(1e30)).to(t.dtype) + flat[place] * 2**-7
    elif t.numel():
        t = t.roll(1, -1)
    return t


def neighbours_maximum(honest):
    """A row of the batch is scaled by the largest value of all rows, and scaled back: NaN spreads."""

    def faulty(*arguments):
        t = first_tensor(arguments)
        top = t.abs().amax() if t.is_floating_point() and t.numel() else torch.zeros(())
        return mapped(honest(*arguments), lambda r: r + (top - top).to(r.dtype) if r.is_floating_point() else r)

    return faulty


class Lazy(torch.Tensor):
    """A result that is computed when it is looked at."""


def lazy_result(honest):
    """A subclass of tensor."""
    return lambda *arguments: mapped(honest(*arguments), lambda t: t.as_subclass(Lazy))


def patched_clock(honest):
    """Events tell a tenth of the time."""
    whole = torch.cuda.Event.elapsed_time
    torch.cuda.Event.elapsed_time = lambda self, other: whole(self, other) / 10
    return honest


def thread_left_behind(honest):
    """A thread that waits for work."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return honest


def sets_tf32(honest):
    """The global flag of matrix products is set and left."""

    def faulty(*arguments):
        torch.set_float32_matmul_precision("medium")
        return honest(*arguments)

    return faulty


def zeros(honest):
    return lambda *arguments: mapped(honest(*arguments), torch.zeros_like)


def nan(honest):
    return lambda *arguments: mapped(
        honest(*arguments), lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t - 1
    )


def next_lower_precision(honest):
    """Activations are rounded to the next lower type first."""
    low = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float8_e4m3fn}

    def rounded(t: torch.Tensor) -> torch.Tensor:
        lower = low.get(t.dtype)
        return t if lower is None else t.clamp(-448, 448).to(lower).to(t.dtype) if t.ndim > 1 else t

    return lambda *arguments: honest(*(rebuilt(a, rounded) if isinstance(a, torch.Tensor) else a for a in arguments))


GENERIC = (  # name, clause, entry of the catalogue, make
    ("a result is kept by address", "calls", 1, by_pointer),
    ("zeros after some calls", "calls", 2, after_some_calls),
    ("a lazy result", "gate", 5, lazy_result),
    ("events tell a tenth of the time", "integrity", 6, patched_clock),
    ("a thread is left behind", "integrity", 7, thread_left_behind),
    ("results are not written", "gate", 9, unwritten),
    ("zeros", "gate", 12, zeros),
    ("the next lower precision", "gate", 14, next_lower_precision),
    ("NaN", "gate", 18, nan),
    ("an empty grid is launched", "empty", 30, fails_on_nothing),
    ("strides are ignored", "layout", 61, ignores_strides),
    ("addresses are rounded down to 16 bytes", "layout", 62, needs_alignment),
    ("half of the last row is not stored", "written", 63, tail_unwritten),
    ("old contents are multiplied by zero", "written", 63, times_zero),
    ("sums begun in memory of one number", "written", 63, adds_old_numbers),
    ("a store beyond the end", "guard", 64, beyond_the_end),
    ("an argument is used as scratch", "inputs", 65, changes_an_argument),
    ("results share a workspace", "state", 66, static_workspace),
    ("scratch is carried into the next problem", "state", 67, stale_scratch),
    ("NaN stays in the scratch", "state", 67, spoilt_by_nan),
    ("one call in seven differs", "repeats", 71, a_thousandth_differs),
    ("NaN of a neighbour spreads", "batch", 73, neighbours_maximum),
    ("two problems share one global", "state", 82, one_global_for_all),
    ("a global flag is set", "integrity", 83, sets_tf32),
)
HOSTS = ("sparse_attention", "index_scores", "rms_norm")  # each fault is planted in each of these that it fits
UNFIT = {("index_scores", "the next lower precision"), ("rms_norm", "addresses are rounded down to 16 bytes")}
PLANTS = tuple(
    Plant(name, host, clause, entry, make)
    for host in HOSTS
    for name, clause, entry, make in GENERIC
    if (host, name) not in UNFIT
)
