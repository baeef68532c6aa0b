"""What the machine itself can do, and what a run puts on the device; times are those of `dsv4.runtime.timing`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from dsv4.runtime.timing import FLUSH_BYTES, Clock, Timing, capture, percentile, summary

__all__ = [
    "FLUSH_BYTES",
    "Clock",
    "Machine",
    "Timing",
    "capture",
    "device_kernels",
    "measure_machine",
    "percentile",
    "read_times",
    "summary",
    "what_each_adds",
]


@dataclass(frozen=True)
class Machine:
    """Measured at the start of a run. bandwidth: B/s at which 1 GiB is read, or copied if that is faster; copy: B/s
    that a copy of 1 GiB reads and writes; matmul: bf16 FLOP/s of an 8192-cubed product; empty_us: a replay of one empty
    kernel between two events; dependent_us: each further kernel that waits for the one before."""

    device: str
    bandwidth: float
    matmul: float
    empty_us: float
    dependent_us: float
    copy: float = 0.0


def device_kernels(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """(name, µs from its start to its end, µs that it adds) of what one call of run puts on the device, in order,
    copies and fills as well. Kernels may start before others end, and wait for them: what one adds runs from the last
    end of those before it to its own. The profiler may slow what is timed after it in the same process."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return what_each_adds([(e.name, e.time_range.start, e.time_range.end) for e in events])


def what_each_adds(spans: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """(name, its length, by how much it moves the latest end) of spans (name, start, end), in the order of their
    starts."""
    spans = sorted(spans, key=lambda span: span[1])
    ends = accumulate((end for *_, end in spans), max, initial=spans[0][1] if spans else 0.0)
    return [(name, end - start, max(0.0, end - before)) for (name, start, end), before in zip(spans, ends)]


@triton.jit
def _read(source, sink, N: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Read N int32; program p the p-th part of every stride. Written only if the sum is one number, so as not to be
    dropped."""
    total = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for at in tl.range(0, N, PART, num_stages=1, loop_unroll_factor=4):
        total ^= tl.load(source + at + first)
    found = tl.sum(total)
    if found == 0x5EED5EED:
        tl.store(sink, found)


def read_times(clock: Clock, source: torch.Tensor) -> Timing:
    """How long reading an int32 tensor of 2^n numbers takes: of a few shapes the fastest, cold and hot."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    sink, found = torch.zeros(1, dtype=torch.int32, device="cuda"), []
    for each, warps in ((4, 4), (8, 4), (4, 8), (16, 2)):
        block = 4 * 32 * warps
        part = min(source.numel(), 1 << (each * programs * block).bit_length() - 1)
        run = lambda: _read[(part // block,)](source, sink, source.numel(), part, block, num_warps=warps)
        found.append(clock.graphs([capture(run)], 10))
    cold, hot = (min(getattr(one, name) for one in found) for name in ("cold_us", "hot_us"))
    return Timing(cold, hot, max(one.spread for one in found), 10)


def measure_machine(clock: Clock) -> Machine:
    """What reads, copies, products and launches cost here."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / (clock.graphs([capture(lambda: target.copy_(source))], 10).hot_us * 1e-6)
    read = source.nbytes / (read_times(clock, source.zero_().view(torch.int32)).hot_us * 1e-6)
    source = target = None  # memory of the device
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = clock.graphs([capture(lambda: torch.mm(a, b))], 10)
    a = b = None
    one = torch.zeros(1, device="cuda")
    chained = 20

    def chain():
        for _ in range(1 + chained):
            one.add_(1)

    empty = clock.graphs([capture(lambda: one.add_(1))], 30)
    longer = clock.graphs([capture(chain)], 30)
    torch.cuda.empty_cache()
    return Machine(
        torch.cuda.get_device_name(),
        max(read, copy),
        2 * 8192**3 / (product.hot_us * 1e-6),
        empty.hot_us,
        (longer.hot_us - empty.hot_us) / chained,
        copy,
    )
