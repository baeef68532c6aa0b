"""Times of CUDA-graph replays, with a cold and with a warm L2 cache, and what the machine itself can do.

One replay lies between two events. A kernel that only sleeps runs before, so that the host has queued the replay when the
first event is reached: no launch latency is in the figure. What is in it is the cost of an empty replay (`Machine.empty_us`),
which is quoted beside the figures and never subtracted.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch
import triton
import triton.language as tl

FLUSH_BYTES = 128 << 20     # read before each cold replay: over twice the L2 of an H100
WARM_UP = 3                 # eager runs before a capture: kernels compile, libraries choose their algorithms
SLEEP_CYCLES = 300_000      # about 0.15 ms: longer than queueing a flush and a replay takes
LONG_US = 20_000.0          # runs longer than this are replayed only a few times


@dataclass(frozen=True)
class Timing:
    """Medians of replays in µs; `spread` = (90th − 10th percentile) / median of the cold ones."""

    cold_us: float
    hot_us: float
    spread: float
    replays: int
    kernels: int | None = None


@dataclass(frozen=True)
class Machine:
    """Measured at the start of a run. bandwidth: B/s at which 1 GiB is read, or copied if that is faster; copy: B/s that a
    copy of 1 GiB reads and writes; matmul: bf16 FLOP/s of an 8192-cubed product; empty_us: a replay of one empty kernel
    between two events; dependent_us: each further kernel that waits for the one before."""

    device: str
    bandwidth: float
    matmul: float
    empty_us: float
    dependent_us: float
    copy: float = 0.0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(cold: Sequence[float], hot: Sequence[float], kernels: int | None = None) -> Timing:
    middle = median(cold)
    return Timing(middle, median(hot), (percentile(cold, 0.9) - percentile(cold, 0.1)) / middle, len(cold), kernels)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of one run, after `WARM_UP` eager ones on a side stream. What run returns stays alive with the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
    with torch.cuda.graph(graph):
        graph.kept = run()
    graph.instantiate()
    return graph


def count_kernels(graph: torch.cuda.CUDAGraph) -> int | None:
    """Kernels, copies and fills of a captured graph; None where the runtime library cannot be asked."""
    try:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libcudart" in line)
        runtime, handle, count = ctypes.CDLL(path), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
        if runtime.cudaGraphGetNodes(handle, None, ctypes.byref(count)):
            return None
        nodes, kind, found = (ctypes.c_void_p * count.value)(), ctypes.c_int(), 0
        if runtime.cudaGraphGetNodes(handle, nodes, ctypes.byref(count)):
            return None
        for node in nodes:
            runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
            found += kind.value in (0, 1, 2)  # cudaGraphNodeTypeKernel, Memcpy, Memset
        return found
    except (AttributeError, OSError, RuntimeError, StopIteration):
        return None


class Clock:
    """Times graphs on the current device. Holds the buffer whose reading empties L2."""

    def __init__(self):
        self.flushed = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.sink = torch.empty((), device="cuda")
        self.flush()
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Fill L2 with other lines. They are read, not written, so that no write-back falls into the timed replay."""
        torch.sum(self.flushed, dim=0, out=self.sink)

    def once(self, replay: Callable[[], object], cold: bool) -> float:
        """µs of one replay on the device."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        if cold:
            self.flush()
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def graphs(self, graphs: Sequence[torch.cuda.CUDAGraph], replays: int, kernels: int | None = None) -> Timing:
        """Time graphs of the same work on different inputs: cold over all of them in turn, hot on the first."""
        for graph in graphs:  # the first replay of each also uploads it
            graph.replay()
        first = self.once(graphs[0].replay, cold=True)
        if first > LONG_US:
            replays = max(3, min(replays, int(replays * LONG_US / first)))
        cold = [self.once(graphs[i % len(graphs)].replay, cold=True) for i in range(replays)]
        self.once(graphs[0].replay, cold=False)
        hot = [self.once(graphs[0].replay, cold=False) for _ in range(replays)]
        return summary(cold, hot, kernels)

    def in_turns(self, *parties: Sequence[torch.cuda.CUDAGraph], replays: int) -> list[Timing]:
        """As `graphs` of several parties, one replay of each after the other, so that what changes on the machine falls on all."""
        for graph in (graph for graphs in parties for graph in graphs):
            graph.replay()
        longest = max(self.once(graphs[0].replay, cold=True) for graphs in parties)
        if longest > LONG_US:
            replays = max(3, min(replays, int(replays * LONG_US / longest)))
        cold, hot = ([[] for _ in parties] for _ in range(2))
        for i in range(replays):
            for times, graphs in zip(cold, parties):
                times.append(self.once(graphs[i % len(graphs)].replay, cold=True))
        for i in range(replays):
            for times, graphs in zip(hot, parties):
                self.once(graphs[0].replay, cold=False)  # the other party's keys leave L2
                times.append(self.once(graphs[0].replay, cold=False))
        return [summary(*times, count_kernels(graphs[0])) for times, graphs in zip(zip(cold, hot), parties)]

    def captured(self, runs: Sequence[Callable[[], object]]) -> list[torch.cuda.CUDAGraph]:
        return [capture(run) for run in runs]

    def runs(self, runs: Sequence[Callable[[], object]], replays: int = 30) -> Timing:
        """Capture and time runs of the same work on different inputs. Counts the kernels of one run."""
        graphs = [capture(run) for run in runs]
        return self.graphs(graphs, replays, count_kernels(graphs[0]))


def device_kernels(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """(name, µs from its start to its end, µs that it adds) of what one call of run puts on the device, in order, copies and fills
    as well. Kernels may start before others end, and wait for them: what one adds runs from the last end of those before it to its
    own. The profiler may slow what is timed after it in the same process."""
    from torch.profiler import ProfilerActivity, profile
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return what_each_adds([(e.name, e.time_range.start, e.time_range.end) for e in events])


def what_each_adds(spans: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """(name, its length, by how much it moves the latest end) of spans (name, start, end), in the order of their starts."""
    spans = sorted(spans, key=lambda span: span[1])
    ends = accumulate((end for *_, end in spans), max, initial=spans[0][1] if spans else 0.0)
    return [(name, end - start, max(0.0, end - before)) for (name, start, end), before in zip(spans, ends)]


@triton.jit
def _read(source, sink, N: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Read N int32; program p the p-th part of every stride. Written only if the sum is one number, so as not to be dropped."""
    total = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for at in tl.range(0, N, PART, num_stages=1, loop_unroll_factor=4):
        total ^= tl.load(source + at + first)
    found = tl.sum(total)
    if found == 0x5EED5EED:
        tl.store(sink, found)


def read_bandwidth(clock: Clock, source: torch.Tensor) -> float:
    """B/s at which an int32 tensor is read, by the fastest of a few shapes."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    sink, best = torch.zeros(1, dtype=torch.int32, device="cuda"), 0.0
    for each, warps in ((4, 4), (8, 4), (4, 8), (16, 2)):
        block = 4 * 32 * warps
        part = 1 << (each * programs * block).bit_length() - 1
        run = lambda: _read[(part // block,)](source, sink, source.numel(), part, block, num_warps=warps)
        best = max(best, source.nbytes / (clock.graphs([capture(run)], 10).hot_us * 1e-6))
    return best


def measure_machine(clock: Clock) -> Machine:
    """What reads, copies, products and launches cost here."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / (clock.graphs([capture(lambda: target.copy_(source))], 10).hot_us * 1e-6)
    read = read_bandwidth(clock, source.zero_().view(torch.int32))
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = clock.graphs([capture(lambda: torch.mm(a, b))], 10)
    del a, b
    one = torch.zeros(1, device="cuda")
    chained = 20

    def chain():
        for _ in range(1 + chained):
            one.add_(1)

    empty = clock.graphs([capture(lambda: one.add_(1))], 30)
    longer = clock.graphs([capture(chain)], 30)
    torch.cuda.empty_cache()
    return Machine(torch.cuda.get_device_name(), max(read, copy), 2 * 8192 ** 3 / (product.hot_us * 1e-6), empty.hot_us,
                   (longer.hot_us - empty.hot_us) / chained, copy)
