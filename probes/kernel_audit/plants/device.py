"""Faults that only device code can have: offsets of 32 bits, races between programs, programs that wait for each other,
loads beyond the end whose values are not used. Each is a Triton kernel beside the honest one."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dsv4.kernels.cache_rows import PackedRows
from dsv4.probes.kernel_audit.plant import Plant

PATIENCE = 1 << 22  # polls of a program that waits
WORK = 128  # atomics of some 0.6 µs, one after another


@triton.jit
def gather_rows(POOL, INDEX, OUT, step, WIDTH: tl.constexpr):
    """Row INDEX[i] of a pool → row i, with offsets of 32 bits."""
    i, d = tl.program_id(0), tl.arange(0, WIDTH)
    row = tl.load(INDEX + i).to(tl.int32)
    tl.store(OUT + i * WIDTH + d, tl.load(POOL + row * step.to(tl.int32) + d))


def offsets_of_32_bits(honest):
    """Listed window rows are gathered beforehand, of plain pools, with offsets that wrap beyond 2 GiB."""

    def faulty(q, window, window_index, *rest):
        if isinstance(window, PackedRows) or not window_index.numel():
            return honest(q, window, window_index, *rest)
        live = window_index.clamp(min=0).flatten()
        rows = torch.empty(len(live), window.shape[1], dtype=window.dtype, device=window.device)
        words = lambda t: t.view(torch.int16 if t.element_size() == 2 else torch.int32)
        gather_rows[(len(live),)](words(window), live, words(rows), window.stride(0), rows.shape[1])
        own = torch.arange(len(live), device=q.device).view(window_index.shape)
        return honest(q, rows, torch.where(window_index < 0, -1, own), *rest)

    return faulty


@triton.jit
def add_squares(X, SUMS, D, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Part p of row n adds its squares to SUMS[n] by a load and a store."""
    n, p, c = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    total = tl.zeros((), tl.float32)
    for first in range(p * WIDTH, D, PARTS * WIDTH):
        x = tl.load(X + n * D + first + c, mask=first + c < D, other=0.0).to(tl.float32)
        total += tl.sum(x * x)
    tl.store(SUMS + n, tl.load(SUMS + n) + total)


def sums_without_atomics(honest):
    """Sums of squares of a row by sixteen programs that add without atomics; ratios to right sums scale the result."""

    def faulty(x, weight, eps):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if not rows.numel():
            return honest(x, weight, eps)
        found = torch.zeros(len(rows), device=x.device)
        add_squares[(len(rows), 16)](rows, found, rows.shape[1], 16, 64)
        right = rows.float().square().sum(-1)
        scale = torch.where(right > 0, (found / right.clamp(min=1e-30)).rsqrt(), 1.0)
        return (honest(x, weight, eps).float() * scale.view(*x.shape[:-1], 1)).to(x.dtype)

    return faulty


@triton.jit
def meet(COUNT, MET, programs, PATIENCE: tl.constexpr):
    """Every program waits until all have come, or until its patience ends."""
    tl.atomic_add(COUNT, 1)
    polls = 0
    while (tl.atomic_add(COUNT, 0) < programs) & (polls < PATIENCE):
        polls += 1
    if tl.atomic_add(COUNT, 0) < programs:
        tl.atomic_add(MET, 1)


def waits_for_every_program(honest):
    """A grid that just fills the device meets before the result; where it does not, the result is NaN."""

    def faulty(x, weight, eps):
        programs = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count
        count, lost = (torch.zeros((), dtype=torch.int32, device=x.device) for _ in range(2))
        meet[(programs,)](count, lost, programs, PATIENCE, num_warps=32)
        return torch.where(lost > 0, float("nan"), honest(x, weight, eps).float()).to(x.dtype)

    return faulty


@triton.jit
def wait_for_a_while(READY, LATE, WORK: tl.constexpr, PATIENCE: tl.constexpr):
    """Program 0 works and says that it is ready; program 1 waits for it, but for PATIENCE nanoseconds at most."""
    if tl.program_id(0) == 0:
        done = 0
        while done < WORK:
            done += 1 + tl.atomic_add(READY + 1, 0)
        tl.atomic_xchg(READY, 1)
    else:
        begun = globaltimer()
        while (tl.atomic_add(READY, 0) == 0) & (globaltimer() - begun < PATIENCE):
            pass
        if tl.atomic_add(READY, 0) == 0:
            tl.store(LATE, 1)


def does_not_wait_long(honest):
    """A half of the result waits for the other by the clock, fifteen times as long as that takes alone; where it is
    not there, the result is NaN."""

    def faulty(x, weight, eps):
        ready = torch.zeros(2, dtype=torch.int32, device=x.device)
        late = torch.zeros((), dtype=torch.int32, device=x.device)
        wait_for_a_while[(2,)](ready, late, WORK, 10_000 * WORK, num_warps=1)
        return torch.where(late > 0, float("nan"), honest(x, weight, eps).float()).to(x.dtype)

    return faulty


@triton.jit
def peek(X, OUT, count, BLOCK: tl.constexpr):
    """Copies, with a load of whole blocks that goes beyond the end."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(OUT + at, x, mask=at < count)


def loads_beyond_the_end(honest):
    """The input is copied in blocks of 65536: loads go beyond its end, and their values are dropped."""

    def faulty(x, weight, eps):
        x = x.contiguous()
        copy = torch.empty_like(x)
        if x.numel():
            peek[(triton.cdiv(x.numel(), 1 << 16),)](x, copy, x.numel(), 1 << 16)
        return honest(copy, weight, eps)

    return faulty


@triton.jit
def last_to_come(COUNT, SEEN, programs):
    """The program with the last ticket of a call says that it has come."""
    if tl.atomic_add(COUNT, 1) == programs - 1:
        tl.store(SEEN, 1)


def counters_stay(honest):
    """The last program writes the result, by a ticket that no call sets back."""
    kept = {}

    def faulty(x, weight, eps):
        count = kept.setdefault("count", torch.zeros((), dtype=torch.int32, device=x.device))
        seen = torch.zeros((), dtype=torch.int32, device=x.device)
        last_to_come[(8,)](count, seen, 8)
        return torch.where(seen > 0, honest(x, weight, eps).float(), float("nan")).to(x.dtype)

    return faulty


def memory_grows(honest):
    """Every call keeps a buffer."""
    kept = []

    def faulty(*arguments):
        if not torch.cuda.is_current_stream_capturing():
            kept.append(torch.empty(1 << 16, dtype=torch.uint8, device=arguments[0].device))
        return honest(*arguments)

    return faulty


def own_graph(honest):
    """A graph of the first call of each shape is replayed with the inputs that it was captured with."""
    kept = {}

    def faulty(*arguments):
        if torch.cuda.is_current_stream_capturing():
            return honest(*arguments)
        shape = arguments[0].shape
        if shape not in kept:
            honest(*arguments)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = honest(*arguments)
            kept[shape] = graph, result, arguments
        graph, result, _ = kept[shape]
        graph.replay()
        return result.clone()

    return faulty


def own_stream(honest):
    """The work runs on a stream of its own, for which nothing waits."""
    kept = {}

    def faulty(*arguments):
        stream = kept.setdefault("stream", torch.cuda.Stream())
        with torch.cuda.stream(stream):
            return honest(*arguments)

    return faulty


def asserts_on_the_device(honest):
    """Values over 1000 are asserted not to occur."""

    def faulty(x, weight, eps):
        torch._assert_async((x.float().abs() < 1000).all())
        return honest(x, weight, eps)

    return faulty


PLANTS = (
    Plant("a graph of the first inputs", "rms_norm", "calls", 3, own_graph, "cuda"),
    Plant("a stream of its own", "rms_norm", "streams", 4, own_stream, "cuda"),
    Plant("an assertion on the device", "rms_norm", "gate", 31, asserts_on_the_device, "cuda"),
    Plant("tickets are not set back", "rms_norm", "calls", 68, counters_stay, "cuda"),
    Plant("every call keeps a buffer", "rms_norm", "calls", 70, memory_grows, "cuda"),
    Plant("offsets of 32 bits", "sparse_attention", "addresses", 60, offsets_of_32_bits, "cuda"),
    Plant("sums without atomics", "rms_norm", "repeats", 71, sums_without_atomics, "cuda"),
    Plant("every program waits for all others", "rms_norm", "processors", 74, waits_for_every_program, "cuda"),
    Plant("waits by the clock", "rms_norm", "shared", 97, does_not_wait_long, "cuda"),
    Plant("loads beyond the end", "rms_norm", "sanitizer", 64, loads_beyond_the_end, "cuda"),
)
