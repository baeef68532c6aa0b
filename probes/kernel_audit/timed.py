"""Timing beside the kernels: pairs of graph replays on the same inputs, in turn, in one process.

Results are filled with NaN before a tenth of the replays and compared afterwards. Those of the first replay go back to
the parent, which knows what is right, and so do some of those that differ from them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from dsv4.kernels.contract import ordered, tensors
from dsv4.kernels.contracts import contract_of
from dsv4.probes.kernel_audit.harness import apart, placed, plain, raw, results_of, same_bits, taken
from dsv4.probes.kernel_audit.subject import SubjectSpec, resolve
from dsv4.runtime.timing import Clock, capture, count_kernels

SETS = 3  # copies of the inputs at other addresses
KEPT = 3  # results of a kernel that differ from the first and are judged


@dataclass
class Captured:
    """The graph of a kernel on one copy of a case's arguments. source: the case's own arguments; returned: what the
    captured call returned, which replays write."""

    spec: SubjectSpec
    source: tuple
    arguments: tuple
    graph: object
    returned: object
    finish: Callable

    def spoil(self) -> None:
        """Fill the results with NaN or -7. Arguments that a call may overwrite are as they were in the case."""
        for t in tensors(self.returned):
            t.fill_(float("nan")) if t.is_floating_point() else t.fill_(-7)
        contract = contract_of(self.spec.operation)
        for i, (mine, own) in enumerate(zip(self.arguments, self.source)):
            if i in contract.written or contract.arguments[i].scratch:
                for t, before in zip(tensors(mine), tensors(own), strict=True):
                    t.copy_(before)

    def results(self) -> list:
        """What the last replay wrote, in the contract's form."""
        return results(self.spec, self.finish(self.returned), self.arguments)


@dataclass
class Replays:
    """One kernel on one case: its graphs, the first results, and what became of them in the replays that were looked
    at. kept: (distance, results in host memory) of those that differ, the farthest first."""

    sets: list[Captured]
    first: list
    nodes: int | None
    looked: int = 0
    unlike: int = 0
    kept: list[tuple[float, list]] = field(default_factory=list)

    def look(self, which: int) -> None:
        """Compare what a replay of a set wrote with the first results, bit by bit; indices may come in any order."""
        found = self.sets[which].results()
        rules = [o.rule for o in contract_of(self.sets[which].spec.operation).outputs]
        pair = ordered(found, rules), ordered(self.first, rules)
        self.looked += 1
        if all(a is b if a is None or b is None else same_bits(a, b) for a, b in zip(*pair)):
            return
        self.unlike += 1
        far = max(0.0 if a is None or b is None else apart(a, b).item() for a, b in zip(*pair))
        if len(self.kept) < KEPT or far > self.kept[-1][0]:
            self.kept = sorted([*self.kept, (far, raw(found))], key=lambda k: -k[0])[:KEPT]

    def judged(self) -> list[list]:
        """Results that must be right, in host memory: the first and those that were kept."""
        return [raw(self.first), *(found for _, found in self.kept)]


def prepared(spec: SubjectSpec, arguments: tuple):
    """(run, finish): a kernel's call on placed arguments, apart from what is done once a step."""
    function = resolve(spec)
    if hasattr(function, "prepare"):
        return function.prepare(*arguments)
    count = taken(function, contract_of(spec.operation), False)
    return lambda: function(*arguments[:count]), lambda result: result


def results(spec: SubjectSpec, returned, arguments: tuple) -> list:
    """The results of a call in the order of the contract's outputs, those too that were written in place."""
    return plain(returned) if spec.without_state else results_of(contract_of(spec.operation), returned, arguments)


def captured(spec: SubjectSpec, arguments: tuple, sets: int) -> Replays:
    """Graphs of a kernel on `sets` copies of the arguments."""
    made = []
    for _ in range(sets):
        mine = placed(arguments, spec.device)
        run, finish = prepared(spec, mine)
        returned: list = []

        def call(run=run, returned=returned):
            returned[:] = [run()]
            return returned

        graph = capture(call)
        made.append(Captured(spec, arguments, mine, graph, returned[0], finish))
        made[-1].spoil()
        graph.replay()
        torch.cuda.synchronize()
    first = [None if t is None else t.clone() for t in made[0].results()]
    return Replays(made, first, count_kernels(made[0].graph))


def answers(harness, specs: list[SubjectSpec], arguments: tuple) -> list:
    """Results of each kernel in the contract's form, or the text of what it raised."""
    found = []
    for spec in specs:
        try:
            mine = placed(arguments, spec.device)
            run, finish = prepared(spec, mine)
            found.append(raw(results(spec, finish(run()), mine)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    return found


def race(harness, specs: list[SubjectSpec], arguments: tuple, replays: int) -> dict:
    """Cold and hot µs of each kernel, replay by replay, in random order; nodes; how many replays were looked at, how
    many of them wrote other bits than the first, and results to be judged; an empty graph's time."""
    clock, order = Clock(), random.Random(0)
    size = sum(t.numel() * t.element_size() for t in tensors(arguments))
    sets = SETS if size < 128 << 20 else 1
    works = [captured(spec, arguments, sets) for spec in specs]
    cold, hot = [[] for _ in specs], []
    for i in range(replays):
        for k in order.sample(range(len(specs)), len(specs)):
            work, which = works[k], i % sets
            looked = order.random() < 0.1 or i == 0
            if looked:
                work.sets[which].spoil()
            cold[k].append(clock.once(work.sets[which].graph.replay, cold=True))
            if looked:
                work.look(which)
    for work in works:
        replay = work.sets[0].graph.replay
        clock.once(replay, cold=False)
        hot.append([clock.once(replay, cold=False) for _ in range(replays)])
    told = {name: [getattr(w, name) for w in works] for name in ("nodes", "looked", "unlike")}
    return {"cold": cold, "hot": hot, **told, "judged": [w.judged() for w in works], "empty": _empty(clock)}


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
