"""Time of a token of a GQA model against batch: every policy at each retention, with and without stopping early.

Rows are predicted first, by their bytes. Then one model is loaded, and one cache a batch and context serves all ways.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from dsv4.errors import CapacityError
from dsv4.model.gqa.choice import NAMES, Attention, attention_named
from scripts.bench.decode import context_name
from scripts.bench.decode_gqa import step_bytes, timed_steps
from scripts.bench.timing import percentile

BETA = 3.0e12  # B/s by which rows are predicted
RULE = "tau=1e-5,phi=1e-3,patience=5"  # the published one
ATTENTIONS = ("dense", "sink-window", "snapkv", "pyramidkv", "page-bound", "block-bound")
ROUNDS, WARM_UP = 2, 3  # turns of each way, steps of a turn that are not timed
PENDING, MEASURED, NO_ROOM, NO_TIME, FAILED = "not yet measured", "measured", "no room", "no time left", "failed"


@dataclass(frozen=True)
class Row:
    """retention: share of the context that is kept, None: all; tokens: that a layer reads, mean. rule: of stopping
    early, None: read to the end. bytes: of a step, if nothing stops; predicted_ms: bytes / BETA. step_ms: median;
    spread: of the 10th to the 90th percentile by the median. tiles_read: share of the tiles, mean over layers, of the
    last step. syncs, compiles, allocations: in the timed steps."""

    batch: int
    context: int
    attention: str
    retention: float | None
    rule: str | None
    tokens: float
    bytes: int
    predicted_ms: float
    step_ms: float | None = None
    mean_ms: float | None = None
    spread: float | None = None
    tiles_read: float | None = None
    capture_seconds: float | None = None
    syncs: int = 0
    compiles: int = 0
    allocations: int = 0
    finite: bool = True
    status: str = PENDING
    why: str = ""

    @property
    def name(self) -> str:
        kept = "" if self.retention is None else f" {self.retention:g}"
        return (
            f"batch {self.batch} at {context_name(self.context)}, {self.attention}{kept}, {self.rule or 'to the end'}"
        )

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_ms is None else self.batch / self.step_ms * 1e3

    @property
    def clean(self) -> bool:
        return self.finite and not (self.syncs or self.compiles or self.allocations)

    def document(self) -> dict:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second, "clean": self.clean}

    def reading(self) -> Attention:
        """What `model.attention` is in this row; whole blocks of policies that keep blocks."""
        tokens = None if self.retention is None else kept_tokens(self.attention, self.retention, self.context)
        return attention_named(self.attention, tokens, self.rule is not None, rule=self.rule)


def kept_tokens(name: str, retention: float, context: int) -> int | float:
    """What a policy is asked to keep: a share if it takes one, else the nearest whole blocks, its least at least."""
    policy = NAMES[name]()
    if policy.once:
        return retention
    least = policy.sink + (policy.local + 1 if policy.topk else 1)
    return max(least, round(retention * context / policy.block)) * policy.block


def planned(
    model,
    attentions: Sequence[str],
    retentions: Sequence[float],
    rules: Sequence[str],
    cells: Sequence[tuple[int, int]],
    beta: float = BETA,
) -> list[Row]:
    """All rows with their predictions, in the order in which they are measured: by (batch, context) of `cells`, and
    ways whose cache holds the same beside each other."""
    found, before = [], model.attention
    for batch, context in cells:
        for name in attentions:
            for retention in [None] if name == "dense" else retentions:
                for rule in (None, *rules):
                    row = Row(batch, context, name, retention, rule, 0, 0, 0)
                    model.attention = row.reading()
                    policy, size = model.attention.policy, sum(step_bytes(model, batch, context).values())
                    layers = len(model.layers)
                    tokens = sum(policy.budget(i, layers, context) for i in range(layers)) / layers
                    found.append(replace(row, tokens=tokens, bytes=size, predicted_ms=size / beta * 1e3))
    model.attention = before
    return found


def measure_cell(model, rows: Sequence[Row], steps: int, done: Callable[[Row], None], until: float = float("inf")):
    """Measure the rows of one batch and context, and give each to `done`. until: of time.monotonic; rows that would
    begin later are given unmeasured. A row that fails is given with its error, and the next is tried."""
    batch, context = rows[0].batch, rows[0].context
    each, cache = -(-steps // ROUNDS), None
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.attention, row.retention), []).append(row)
    for group in groups.values():
        if time.monotonic() > until:
            for row in group:
                done(replace(row, status=NO_TIME))
            continue
        try:
            model.attention = group[0].reading()
            if cache is None:
                cache = model.new_cache(batch, context)
            measured = _turns(model, cache, group, each)
        except (CapacityError, torch.OutOfMemoryError) as failure:
            measured = [replace(row, status=NO_ROOM, why=said(failure)) for row in group]
        except Exception as failure:  # a kernel that does not compile costs its own rows alone
            why = f"{type(failure).__name__}: {said(failure)}"
            measured = [replace(row, status=FAILED, why=why) for row in group]
        for row in measured:
            done(row)
        release(model)


def said(failure: Exception) -> str:
    return " ".join(str(failure).split())[:300]


def _turns(model, cache, group: Sequence[Row], each: int) -> list[Row]:
    """Rows of one policy, whose cache holds the same: a captured step of each, timed in turns."""
    from dsv4.model.dummy import fill_cache
    from dsv4.runtime.graph import DecodeGraph

    cache.reset()
    cache.adopt(model.attention.policy)
    fill_cache(cache, cache.max_context - WARM_UP - each)
    ways, graphs, seconds = [row.reading() for row in group], [], []
    times: list[list[float]] = [[] for _ in group]
    seen = [dict(syncs=[], compiles=[], allocations=0, finite=True) for _ in group]
    tiles: list[float | None] = [None] * len(group)
    for way in ways:
        model.attention, begun = way, time.perf_counter()
        graphs.append(DecodeGraph(model, cache))
        seconds.append(time.perf_counter() - begun)
    for _ in range(ROUNDS):
        for i, (way, graph) in enumerate(zip(ways, graphs)):
            model.attention = way
            times[i] += timed_steps(model, cache, graph, each, seen[i], WARM_UP)
            tiles[i] = _tiles_read(model)
            cache.rewind(WARM_UP + each)
    return [
        replace(
            row,
            step_ms=median(mine),
            mean_ms=sum(mine) / len(mine),
            spread=(percentile(mine, 0.9) - percentile(mine, 0.1)) / median(mine),
            tiles_read=read,
            capture_seconds=took,
            syncs=len(had["syncs"]),
            compiles=len(had["compiles"]),
            allocations=had["allocations"],
            finite=had["finite"],
            status=MEASURED,
            why="; ".join(sorted({*had["syncs"], *had["compiles"]}))[:300],
        )
        for row, mine, read, took, had in zip(group, times, tiles, seconds, seen, strict=True)
    ]


def _tiles_read(model) -> float | None:
    """Share of the tiles that the last step read, mean over layers; None without a rule."""
    if model.attention.termination is None:
        return None
    paths = [path for path in model.layer_paths() if "tiles_read" in path]
    return sum(path["tiles_read"] / path["of_tiles"] for path in paths) / len(paths) if paths else None


def release(model) -> None:
    model.tiles = None
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
