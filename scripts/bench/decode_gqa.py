"""Decode steps of a GQA model, dense and by a policy, in turns over one cache: what each must move, and how long it
takes."""

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
# dense over sparse, end to end at 1M, batch 1, on an H100 (28 query and 4 KV heads): the figure to beat
REFERENCE = 1.77


@dataclass
class Pair:
    """Points of one batch and context, the dense one first; all over the same keys and values."""

    points: list[Point]

    @property
    def ratio(self) -> float:
        """How many times faster than dense the policy's step is."""
        return self.points[0].step_ms / self.points[1].step_ms

    def line(self) -> str:
        return "\n".join([*(p.line() for p in self.points), f"    dense over sparse: {self.ratio:.2f}"])

    def document(self) -> dict:
        return {"points": [p.document() for p in self.points], "dense_over_sparse": self.ratio}


def step_bytes(model, batch: int, context: int) -> float:
    """Bytes that one step of `model.attention` reads at that context: all weights, of the embedding a row a token
    (unless it is the head too); keys and values of the tokens that are kept, and the summaries of all blocks where they
    are searched."""
    c, policy, size = model.config, model.attention.policy, model.numerics.cache.itemsize
    embedding = 0 if c.tie_word_embeddings else model.embed.weight.nbytes * (1 - batch / c.vocab_size)
    vectors = {"bound": 2, "mean": 1, None: 0}[policy.selector] * -(-context // policy.block)
    rows = sum(
        2 * layer.self_attn.path_at(context)["tokens"] + (0 if layer.self_attn.window else vectors)
        for layer in model.layers
    )
    return model.nbytes - embedding + batch * rows * c.num_key_value_heads * c.head_dim * size


def measure_pair(model, batch: int, context: int, machine: Machine, ways: Sequence, steps: int) -> Pair:
    """Fill a cache to below `context`, capture a step of each way, and time them in turns: the way's median over all
    its turns.

    A turn's first steps are not timed: they set the positions anew.
    """
    from dsv4.model.dummy import fill_cache
    from dsv4.runtime.graph import DecodeGraph

    gc.collect()
    torch.cuda.reset_peak_memory_stats()
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
            mine += _turn(model, cache, graph, each, seen)
            cache.rewind(WARM_UP + each)
    points = []
    for way, mine, seen, capture in zip(ways, times, found, seconds):
        model.attention = way
        moved = step_bytes(model, batch, context)
        points.append(
            Point(
                batch,
                context,
                len(model.layers),
                median(mine),
                sum(mine) / len(mine),
                (percentile(mine, 0.9) - percentile(mine, 0.1)) / median(mine),
                moved / machine.bandwidth * 1e3,
                round(moved),
                torch.cuda.max_memory_allocated(),
                cache.nbytes,
                capture,
                syncs=len(seen["syncs"]),
                compiles=len(seen["compiles"]),
                allocations=seen["allocations"],
                finite=seen["finite"],
                why="; ".join(sorted({*seen["syncs"], *seen["compiles"]}))[:500],
                attention=way.policy.name,
            )
        )
    return Pair(points)


def _turn(model, cache, graph, steps: int, seen: dict) -> list[float]:
    """ms of `steps` steps after a few that are not timed."""
    ids = torch.randint(0, model.config.vocab_size, (WARM_UP + steps, cache.batch, 1), device=model.device)
    for fed in ids[:WARM_UP]:
        graph.step(fed)
    torch.cuda.synchronize()
    marks, had = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], allocations()
    with Compiles() as compiled, counted_syncs() as syncs:
        marks[0].record()
        for fed, mark in zip(ids[WARM_UP:], marks[1:]):
            logits = graph.step(fed)
            mark.record()
    seen["allocations"] += allocations() - had
    seen["syncs"] += syncs
    seen["compiles"] += compiled.names
    torch.cuda.synchronize()
    seen["finite"] &= bool(logits.isfinite().all())
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def document(about: dict, setup: dict, machine: Machine, pairs: Sequence[Pair], failed: Sequence[str]) -> dict:
    return {
        "about": about,
        "machine": asdict(machine),
        "setup": setup,
        "pairs": [p.document() for p in pairs],
        "failed": list(failed),
        "reference": {"what": "dense over sparse, end to end at 1M, batch 1", "value": REFERENCE},
    }


def markdown(about: dict, setup: dict, machine: Machine, pairs: Sequence[Pair], failed: Sequence[str]) -> str:
    policy = setup["attention"]["policy"]
    kept = policy["kept_tokens"] or f"{policy['retention']:.0%} of the prompt, in"
    lines = [
        "# Decode steps of a GQA model, dense and sparse",
        "",
        f"{headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['geometry']} widths with random weights, {setup['layers']} layers and the head, numerics "
        f"{setup['numerics']}, backend {setup['backend']}; weights {setup['weight_bytes'] / 1e9:.1f} GB. Policy "
        f"{policy['name']}, {kept} tokens of each KV head. Steps of both ways in turns over one "
        f"cache, each one CUDA graph. Floor: the bytes that a step reads at {machine.bandwidth / 1e12:.2f} TB/s. "
        f"Reference: {REFERENCE}× end to end at 1M, batch 1.",
        "",
        "| batch | context | attention | ms a step | mean | floor | share | dense over it | compiles "
        "| syncs | allocations | cache GB |",
        "|---:|---:|---|" + "---:|" * 9,
    ]
    for pair in pairs:
        for i, p in enumerate(pair.points):
            lines.append(
                f"| {p.batch} | {context_name(p.context)} | {p.attention} | {p.step_ms:.3f} | {p.mean_ms:.3f} | "
                f"{p.floor_ms:.3f} | {p.floor_ms / p.step_ms:.0%} | {f'{pair.ratio:.2f}' if i else '–'} | "
                f"{p.compiles} | {p.syncs} | {p.allocations} | {p.cache_bytes / 1e9:.2f} |"
            )
    notes = [f"- {p.name}: {p.why}" for pair in pairs for p in pair.points if p.why] + [
        f"- failed: {line}" for line in failed
    ]
    return "\n".join([*lines, *([""] + notes if notes else [])]) + "\n"
