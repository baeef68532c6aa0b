"""Times of CUDA-graph replays, with a cold and with a warm L2 cache.

One replay lies between two events. A kernel that only sleeps runs before, so that the host has queued the replay when
the first event is reached: no launch latency is in the figure. The figure includes the cost of an empty replay, which
reports give beside the figures and never subtract.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from dsv4.runtime.capture import capturing

FLUSH_BYTES = 128 << 20  # read before each cold replay: over twice the L2 of an H100
WARM_UP = 3  # eager runs before a capture: kernels compile, libraries choose their algorithms
SLEEP_CYCLES = 300_000  # about 0.15 ms: longer than queueing a flush and a replay takes
LONG_US = 20_000.0  # runs longer than this are replayed only a few times


@dataclass(frozen=True)
class Timing:
    """Medians of replays in µs; `spread` = (90th − 10th percentile) / median of the cold ones."""

    cold_us: float
    hot_us: float
    spread: float
    replays: int
    kernels: int | None = None


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(cold: Sequence[float], hot: Sequence[float], kernels: int | None = None) -> Timing:
    middle = median(cold)
    return Timing(middle, median(hot), (percentile(cold, 0.9) - percentile(cold, 0.1)) / middle, len(cold), kernels)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of one run, after `WARM_UP` eager ones on a side stream. The inputs and results of run stay alive with
    the graph, because replays use their memory even if the caller has dropped them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
    with capturing(graph):
        graph.kept = run, run()
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
        """Fill L2 with other lines. They are read, not written, so no write-back falls into the timed replay."""
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

    def in_turn(self, sets: Sequence[Sequence[torch.cuda.CUDAGraph]], replays: int) -> list[Timing]:
        """Time several works against each other, cold: one replay of each, in turn, so that clocks and heat are the
        same for all.

        sets: graphs of each work on different inputs. `hot_us` is NaN, because nothing stays hot between other works.
        """
        for graph in (g for graphs in sets for g in graphs):
            graph.replay()
        longest = max(self.once(graphs[0].replay, cold=True) for graphs in sets)
        if longest > LONG_US:
            replays = max(3, min(replays, int(replays * LONG_US / longest)))
        cold = [[self.once(graphs[i % len(graphs)].replay, cold=True) for graphs in sets] for i in range(replays)]
        return [summary(times, [float("nan")], count_kernels(graphs[0])) for times, graphs in zip(zip(*cold), sets)]

    def runs(self, runs: Sequence[Callable[[], object]], replays: int = 30) -> Timing:
        """Capture and time runs of the same work on different inputs. Counts the kernels of one run."""
        graphs = [capture(run) for run in runs]
        return self.graphs(graphs, replays, count_kernels(graphs[0]))
