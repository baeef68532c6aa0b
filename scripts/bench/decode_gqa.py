"""Decode steps of a GQA model, dense and by a policy at some budgets, in turns over one cache: what each must move, and
how long it takes."""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from scripts.bench.decode import WARM_UP, Compiles, Point, allocations, context_name
from scripts.bench.report import headline
from scripts.bench.timing import Machine, percentile
from scripts.bench.waits import counted_syncs

ROUNDS = 4  # turns of each way
BLOCK = 128  # tokens of a tile of a cache
SHARE = 0.93  # of the free memory for weights and caches; the rest is for graphs, logits and tables
# dense over sparse, end to end at 1M, batch 1, on an H100 (28 query and 4 KV heads): the figure to beat
REFERENCE = 1.77


@dataclass
class Pair:
    """Points of one batch and context, the dense one first, then budgets in rising order; all over the same keys and
    values."""

    points: list[Point]

    def over(self, point: Point) -> float:
        """How many times faster than dense the point's step is."""
        return self.points[0].step_ms / point.step_ms

    @property
    def ratio(self) -> float:
        """Of the largest budget."""
        return self.over(self.points[-1])

    def line(self) -> str:
        ratios = ", ".join(f"{self.over(p):.2f}" for p in self.points[1:])
        return "\n".join([*(p.line() for p in self.points), f"    dense over sparse: {ratios}"])

    def document(self) -> dict:
        rows = [p.document() | {"dense_over_it": self.over(p)} for p in self.points]
        return {"points": rows, "dense_over_sparse": self.ratio}


def step_bytes(model, batch: int, context: int) -> dict[str, int]:
    """Part → bytes that one step of `model.attention` reads at that context, and writes (`dsv4.cost_model.step`)."""
    from dsv4.cost_model.step import step_parts
    from dsv4.model.gqa.dummy import tensors_held

    return step_parts(model.config, model.numerics, tensors_held(model), batch, context, model.attention.policy)


def layers_that_fit(name: str, layers: int, batch: int, context: int, policy, room: int) -> tuple[int, str]:
    """(layers of a geometry whose weights and caches take at most `room` bytes, why they are fewer than `layers`). 0
    where not even one fits. Everything that is not of a layer, embedding and head, counts once."""
    from dsv4.cost_model.gqa import Geometry, held_bytes
    from dsv4.loaders.write import tensor_bytes
    from dsv4.model.gqa.dummy import config_of, tensors_of_geometry
    from dsv4.model.numerics import numerics_named

    held = lambda n: sum(tensor_bytes(*tensor) for tensor in tensors_of_geometry(name, n).values())
    each = held(2) - held(1)
    heads = Geometry.of(config_of(name), numerics_named("native"))
    cache = held_bytes(heads, policy, batch, -(-context // BLOCK) * BLOCK)
    fit = max(0, min(layers, (room - (held(1) - each)) // (each + cache)))
    if fit == layers:
        return fit, ""
    need = held(1) - each + layers * (each + cache)
    return fit, (
        f"batch {batch} at {context_name(context)}: {layers} layers take {need:,} B ({layers} × {cache:,} of caches, "
        f"the rest weights), and {room:,} may be used; "
        + (f"measured with {fit} layers" if fit else "not even one fits, nothing was measured")
    )


def measure_pair(model, batch: int, context: int, machine: Machine, ways: Sequence, steps: int) -> Pair:
    """Fill a cache to below `context`, capture a step of each way, and time them in turns: the way's median over all
    its turns.

    A turn's first steps are not timed: they set the positions anew.
    """
    from dsv4.model.dummy import fill_cache
    from dsv4.runtime.graph import DecodeGraph

    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    model.attention = ways[-1]
    cache, each = model.new_cache(batch, context), -(-steps // ROUNDS)
    fill_cache(cache, context - (WARM_UP + each) - 4)
    graphs, seconds, times, found = (
        [],
        [],
        [[] for _ in ways],
        [dict(syncs=[], compiles=[], allocations=0, finite=True) for _ in ways],
    )
    for way in ways:
        model.attention, begun = way, time.perf_counter()
        graphs.append(DecodeGraph(model, cache))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    for _ in range(ROUNDS):
        for way, graph, mine, seen in zip(ways, graphs, times, found):
            model.attention = way
            mine += timed_steps(model, cache, graph, each, seen)
            cache.rewind(WARM_UP + each)
    points, wall = [], (time.perf_counter() - started) / len(ways)
    for way, mine, seen, capture in zip(ways, times, found, seconds):
        model.attention = way
        parts = step_bytes(model, batch, context)
        moved = sum(parts.values())
        points.append(
            Point(
                batch,
                context,
                len(model.layers),
                median(mine),
                sum(mine) / len(mine),
                (percentile(mine, 0.9) - percentile(mine, 0.1)) / median(mine),
                moved / machine.bandwidth * 1e3,
                moved,
                torch.cuda.max_memory_allocated(),
                cache.nbytes,
                capture,
                syncs=len(seen["syncs"]),
                compiles=len(seen["compiles"]),
                allocations=seen["allocations"],
                finite=seen["finite"],
                why="; ".join(sorted({*seen["syncs"], *seen["compiles"]}))[:500],
                attention=way.policy.name,
                policy=None if way.policy.dense else asdict(way.policy),
                parts=parts,
                wall_seconds=wall,
            )
        )
    return Pair(points)


def timed_steps(model, cache, graph, steps: int, seen: dict, warm_up: int = WARM_UP) -> list[float]:
    """ms of `steps` steps after `warm_up` that are not timed. seen: what happened in the timed ones is added; on a host
    only whether all is finite."""
    if model.device.type != "cuda":
        return _timed_on_host(model, cache, graph, steps, seen, warm_up)
    ids = torch.randint(0, model.config.vocab_size, (warm_up + steps, cache.batch, 1), device=model.device)
    for fed in ids[:warm_up]:
        graph.step(fed)
    torch.cuda.synchronize()
    marks, had = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], allocations()
    with Compiles() as compiled, counted_syncs() as syncs:
        marks[0].record()
        for fed, mark in zip(ids[warm_up:], marks[1:]):
            logits = graph.step(fed)
            mark.record()
    seen["allocations"] += allocations() - had
    seen["syncs"] += syncs
    seen["compiles"] += compiled.names
    torch.cuda.synchronize()
    seen["finite"] &= bool(logits.isfinite().all())
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def _timed_on_host(model, cache, graph, steps: int, seen: dict, warm_up: int) -> list[float]:
    found = []
    for fed in torch.randint(0, model.config.vocab_size, (warm_up + steps, cache.batch, 1)):
        begun = time.perf_counter()
        logits = graph.step(fed)
        found.append((time.perf_counter() - begun) * 1e3)
    seen["finite"] &= bool(logits.isfinite().all())
    return found[warm_up:]


def document(about: dict, setup: dict, machine: Machine, pairs: Sequence[Pair], failed: Sequence[str]) -> dict:
    return {
        "about": about,
        "machine": asdict(machine),
        "setup": setup,
        "pairs": [p.document() for p in pairs],
        "failed": list(failed),
        "reference": {"what": "dense over sparse, end to end at 1M, batch 1", "value": REFERENCE},
    }


def _parts(parts: dict) -> str:
    """Cells of a table: GB of weights, of keys and values, and of summaries."""
    attention = "keys", "values", "block summaries", "queries and outputs", "token lists"
    weights = sum(nbytes for name, nbytes in parts.items() if name not in attention)
    cells = weights, parts.get("keys", 0) + parts.get("values", 0), parts.get("block summaries", 0)
    return " | ".join(f"{nbytes / 1e9:.3f}" for nbytes in cells)


def markdown(about: dict, setup: dict, machine: Machine, pairs: Sequence[Pair], failed: Sequence[str]) -> str:
    policy = setup["attention"]["policy"]
    sizes = [w["policy"]["kept_tokens"] for w in setup.get("ways", [None, setup["attention"]])[1:]]
    kept = ", ".join(map(str, sizes)) if all(sizes) else f"{policy['retention']:.0%} of the prompt, in"
    lines = [
        "# Decode steps of a GQA model, dense and sparse",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['geometry']} widths with random weights, {setup['layers']} layers and the head, numerics "
        f"{setup['numerics']}, backend {setup['backend']}; weights {setup['weight_bytes'] / 1e9:.1f} GB. Policy "
        f"{policy['name']}, {kept} tokens of each KV head. Steps of all ways in turns over one "
        f"cache, each one CUDA graph. Floor: the bytes that a step reads at {machine.bandwidth / 1e12:.2f} TB/s. "
        f"Reference: {REFERENCE}× end to end at 1M, batch 1.",
        "",
        "| batch | context | layers | attention | ms a step | mean | floor | share | dense over it | weights GB | "
        "keys, values GB | summaries GB | compiles | syncs | allocations | cache GB |",
        "|---:|---:|---:|---|" + "---:|" * 12,
    ]
    for pair in pairs:
        for i, p in enumerate(pair.points):
            lines.append(
                f"| {p.batch} | {context_name(p.context)} | {p.layers} | {p.way} | {p.step_ms:.3f} | {p.mean_ms:.3f} | "
                f"{p.floor_ms:.3f} | {p.floor_ms / p.step_ms:.0%} | {f'{pair.over(p):.2f}' if i else '–'} | "
                f"{_parts(p.parts)} | {p.compiles} | {p.syncs} | {p.allocations} | {p.cache_bytes / 1e9:.2f} |"
            )
    notes = [f"- {why}" for why in setup.get("reduced", ())]
    notes += [f"- {p.name}: {p.why}" for pair in pairs for p in pair.points if p.why] + [
        f"- failed: {line}" for line in failed
    ]
    return "\n".join([*lines, *([""] + notes if notes else [])]) + "\n"
