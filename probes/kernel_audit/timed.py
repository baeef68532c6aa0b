"""Timing beside the kernels: pairs of graph replays on the same inputs, in turn, in one process.

What replays write is looked at: results are filled with NaN before a tenth of them and compared afterwards.
"""

import random
from dataclasses import dataclass
from statistics import median

import torch

from dsv4.kernels.contract import tensors
from dsv4.kernels.contracts import contract_of
from dsv4.probes.kernel_audit.harness import placed, raw, taken
from dsv4.probes.kernel_audit.subject import SubjectSpec, resolve
from dsv4.timing import Clock, capture, count_kernels

SETS = 3  # copies of the inputs at other addresses


@dataclass
class Replays:
    """One kernel on one case: its graphs, the results that they write, and what the first of them were."""

    graphs: list
    results: list
    first: list
    nodes: int | None
    eager: float


def prepared(spec: SubjectSpec, arguments: tuple):
    """(run, finish): a kernel's call on placed arguments, apart from what is done once a step."""
    function = resolve(spec)
    if hasattr(function, "prepare"):
        return function.prepare(*arguments)
    count = taken(function, contract_of(spec.operation), False)
    return lambda: function(*arguments[:count]), lambda result: result


def captured(spec: SubjectSpec, arguments: tuple, sets: int) -> Replays:
    """Graphs of a kernel on `sets` copies of the arguments."""
    graphs, results, first, seconds = [], [], None, 0.0
    for _ in range(sets):
        mine = placed(arguments, spec.device)
        run, finish = prepared(spec, mine)
        held: list = []

        def call(run=run, held=held):
            held[:] = list(tensors(run()))
            return held

        graph = capture(call)
        graph.replay()
        torch.cuda.synchronize()
        graphs.append(graph)
        results.append(held)
        if first is None:
            first = [t.clone() for t in held]
    return Replays(graphs, results, first, count_kernels(graphs[0]), seconds)


def answers(harness, specs: list[SubjectSpec], arguments: tuple) -> list:
    """Results of each kernel in the contract's form, or the text of what it raised."""
    found = []
    for spec in specs:
        try:
            run, finish = prepared(spec, placed(arguments, spec.device))
            found.append(raw(list(tensors(finish(run())))))
        except Exception as error:
            found.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    return found


def race(harness, specs: list[SubjectSpec], arguments: tuple, replays: int) -> dict:
    """Cold and hot µs of each kernel, replay by replay, in random order; nodes; replays whose results were not those of
    the first; an empty graph's time."""
    clock, order = Clock(), random.Random(0)
    size = sum(t.numel() * t.element_size() for t in tensors(arguments))
    sets = SETS if size < 128 << 20 else 1
    works = [captured(spec, arguments, sets) for spec in specs]
    cold, hot, wrong = [[] for _ in specs], [[] for _ in specs], [0] * len(specs)
    for i in range(replays):
        for k in order.sample(range(len(specs)), len(specs)):
            work, which = works[k], i % sets
            looked = order.random() < 0.1 or i == 0
            if looked:
                _spoil(work.results[which])
            cold[k].append(clock.once(work.graphs[which].replay, cold=True))
            if looked and not _same(work.results[which], work.first):
                wrong[k] += 1
    for k in range(len(specs)):
        clock.once(works[k].graphs[0].replay, cold=False)
        hot[k] = [clock.once(works[k].graphs[0].replay, cold=False) for _ in range(replays)]
    return {"cold": cold, "hot": hot, "wrong": wrong, "nodes": [w.nodes for w in works], "empty": _empty(clock)}


def _spoil(results: list) -> None:
    for t in results:
        t.fill_(float("nan")) if t.is_floating_point() else t.fill_(-7)


def _same(found: list, wanted: list) -> bool:
    """Equal as far as atomics allow: indices in any order, floats within a thousandth."""
    for a, b in zip(found, wanted):
        if not a.is_floating_point():
            if not torch.equal(a.sort(-1).values, b.sort(-1).values):
                return False
        elif not torch.allclose(
            a.float(),
            b.float(),
            rtol=1e-3,
            atol=1e-3 * b.float().nan_to_num(0, 0, 0).abs().max().item(),
            equal_nan=True,
        ):
            return False
    return True


def _empty(clock: Clock) -> float:
    """µs of a graph of one fill of four bytes."""
    t = torch.zeros(1, device="cuda")
    graph = capture(lambda: t.zero_())
    return median(clock.once(graph.replay, cold=False) for _ in range(20))


def limits(harness) -> dict:
    """What this device does: bytes a second of a read of 2 GiB, operations a second of a bf16 product, and its
    clocks."""
    clock = Clock()
    data = torch.ones(1 << 29, device="cuda")
    sink = torch.empty((), device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    reads = capture(lambda: torch.sum(data, dim=0, out=sink))
    products = capture(lambda: a @ a)
    read = min(clock.once(reads.replay, cold=False) for _ in range(5))
    product = min(clock.once(products.replay, cold=False) for _ in range(5))
    found = {"bytes_per_s": 4 * data.numel() / read * 1e6, "flops_per_s": 2 * 8192**3 / product * 1e6}
    try:
        found["sm_clock_mhz"] = torch.cuda.clock_rate()
    except Exception:  # without NVML's Python binding clocks are not known, which the report says
        found["sm_clock_mhz"] = None
    return found
