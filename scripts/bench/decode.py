"""One decode step of a whole model: what it must move, and how long it takes as one CUDA graph."""

import gc
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import median

import torch

from dsv4.kernels.cache_rows import PackedRows
from dsv4.model.cut_values import finite
from scripts.bench.timing import Machine, device_kernels, percentile
from scripts.bench.waits import counted_syncs

STEPS, WARM_UP = 48, 8
TOP = 24  # kernels that the table of times shows


def context_name(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens % (1 << 20) == 0 else f"{tokens >> 10}K" if tokens % 1024 == 0 else str(tokens)


@dataclass
class Point:
    """One batch and context. Times in ms; syncs, compiles and allocations were counted over the timed steps."""

    batch: int
    context: int
    layers: int
    step_ms: float
    mean_ms: float
    spread: float
    floor_ms: float
    bytes: int
    peak_bytes: int
    cache_bytes: int
    capture_seconds: float
    kernels: int | None = None
    syncs: int = 0
    compiles: int = 0
    allocations: int = 0
    finite: bool = True
    by_kernel: list = field(default_factory=list)  # (name, count, µs that they add), the slowest first
    why: str = ""
    attention: str = ""  # of a GQA model
    policy: dict | None = None  # of a GQA model; None: dense
    parts: dict = field(default_factory=dict)  # part of `bytes` → bytes by formula
    wall_seconds: float = 0.0  # of its measurement, all turns and the capture in it

    @property
    def way(self) -> str:
        """The attention, with its budget in blocks."""
        if self.policy is None:
            return self.attention
        kept = self.policy["sink"] + self.policy["local"] + self.policy["topk"]
        return f"{self.attention}, {kept} blocks"

    @property
    def name(self) -> str:
        return f"batch {self.batch} at {context_name(self.context)}" + (f", {self.way}" if self.way else "")

    @property
    def layer_ms(self) -> float:
        return self.step_ms / self.layers

    @property
    def kernels_per_layer(self) -> float | None:
        return None if self.kernels is None else self.kernels / self.layers

    def line(self) -> str:
        return (
            f"{self.name}: {self.step_ms:.3f} ms, {self.floor_ms / self.step_ms:.0%} of the floor; after warm-up "
            f"{self.compiles} compiles, {self.syncs} syncs, {self.allocations} allocations"
        )

    def document(self) -> dict:
        return asdict(self) | {
            "layer_ms": self.layer_ms,
            "kernels_per_layer": self.kernels_per_layer,
            "share_of_floor": self.floor_ms / self.step_ms,
        }


def row_bytes(rows) -> int:
    """Bytes of one row of a cache, as stored."""
    return rows.layout.row if isinstance(rows, PackedRows) else rows.shape[-1] * rows.element_size()


def weight_bytes(model, batch: int) -> float:
    """Bytes of weights that one step reads: all, but of the routed experts those that `batch` tokens reach on average,
    and of tables indexed by a token a row each."""
    E, k = model.config.n_routed_experts, model.config.num_experts_per_tok
    reached = E * (1 - (1 - k / E) ** batch)
    total = 0.0
    for name, p in model.named_parameters():
        if ".ffn.experts." in name:
            total += p.nbytes * reached / E
        elif name == "embed.weight" or name.endswith("tid2eid"):
            total += batch * p.nbytes / p.shape[0]
        else:
            total += p.nbytes
    return total


def cache_bytes(model, cache, batch: int, context: int) -> float:
    """Bytes of the caches that one step reads at that context: the window, the selected or all entries, every index
    key."""
    total = 0.0
    for layer in cache.layers:
        total += batch * min(context, model.config.sliding_window) * row_bytes(layer.window.flat)
        if layer.main is None:
            continue
        ratio = layer.main.entries.ratio
        entries = context // ratio
        if layer.index is not None:
            total += batch * entries * row_bytes(layer.index.entries.flat)
            entries = min(entries, model.config.index_topk)
        total += batch * entries * row_bytes(layer.main.entries.flat)
    return total


class Compiles:
    """Counts what Triton compiles while it is entered."""

    def __enter__(self):
        from triton import knobs

        self.knobs, self.before, self.names = knobs, knobs.runtime.jit_post_compile_hook, []
        knobs.runtime.jit_post_compile_hook = self._seen
        return self

    def _seen(self, *args, **kwargs):
        self.names.append(kwargs.get("repr", "?"))
        return self.before(*args, **kwargs) if self.before else None

    def __exit__(self, *failure):
        self.knobs.runtime.jit_post_compile_hook = self.before


def allocations() -> int:
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def measure_point(model, batch: int, context: int, machine: Machine, steps: int = STEPS, chosen: bool = False) -> Point:
    """Fill a cache to just below `context`, capture a step, and time the last `steps` steps up to it; with the choice
    of the greedy token if `chosen`. Several ranks keep their own logits.

    Every step has new random tokens, as text has: with one token again and again the same experts come back, whose
    pages the device's address translation then still holds, and a step is faster than any real one.
    """
    from dsv4.model.dummy import fill_cache
    from dsv4.runtime.graph import DecodeGraph

    torch.cuda.reset_peak_memory_stats()
    cache = model.new_cache(batch, context)
    fill_cache(cache, context - steps - WARM_UP - 4)
    begun = time.perf_counter()
    graph = DecodeGraph(model, cache, whole=False)
    ids = torch.randint(0, model.config.vocab_size, (WARM_UP + steps, batch, 1), device=model.device)
    for fed in ids[:WARM_UP]:
        logits = graph.step(fed)
        if chosen:
            logits.argmax(-1)
    torch.cuda.synchronize()
    capture_seconds = time.perf_counter() - begun
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    had = allocations()
    with Compiles() as compiled, counted_syncs() as syncs:
        marks[0].record()
        for fed, mark in zip(ids[WARM_UP:], marks[1:]):
            logits = graph.step(fed)
            if chosen:
                logits.argmax(-1)
            mark.record()
    had = allocations() - had
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
    parts = {"weights": weight_bytes(model, batch), "caches": cache_bytes(model, cache, batch, context)}
    moved = sum(parts.values())
    spread = (percentile(times, 0.9) - percentile(times, 0.1)) / median(times)
    return Point(
        batch,
        context,
        len(model.layers),
        median(times),
        sum(times) / steps,
        spread,
        moved / machine.bandwidth * 1e3,
        round(moved),
        torch.cuda.max_memory_allocated(),
        cache.nbytes,
        capture_seconds,
        syncs=len(syncs),
        compiles=len(compiled.names),
        allocations=had,
        finite=bool(finite(logits).all()),
        why="; ".join(sorted({*syncs, *compiled.names}))[:500],
        parts={name: round(nbytes) for name, nbytes in parts.items()},
        wall_seconds=time.perf_counter() - begun,
    )


def profile_point(model, point: Point) -> None:
    """Add the kernels of one step: how many, and their times by name. After all timing: the profiler may slow it."""
    add_profile(point, step_kernels(model, point.batch, point.context))


def step_kernels(model, batch: int, context: int) -> list[tuple[str, float, float]]:
    """`device_kernels` of one step."""
    from dsv4.model.dummy import fill_cache
    from dsv4.runtime.graph import DecodeGraph

    cache = model.new_cache(batch, context)
    fill_cache(cache, context - 8)
    graph = DecodeGraph(model, cache, whole=False)
    fed = iter(torch.randint(0, model.config.vocab_size, (4, batch, 1), device=model.device))
    graph.step(next(fed))

    def replay():
        graph.ids.copy_(next(fed))
        graph.graph.replay()

    return device_kernels(replay)


def add_profile(point: Point, kernels: list[tuple[str, float, float]]) -> None:
    """Count a step's kernels, and sum by name what they add to its time."""
    point.kernels = len(kernels)
    count, time_us = Counter(), Counter()
    for name, _, us in kernels:
        short = re.sub(r"^void |<.*|\(.*", "", name)[:80]
        count[short] += 1
        time_us[short] += us
    point.by_kernel = [(name, count[name], us) for name, us in time_us.most_common(TOP)]


def transformers_config(layers: int, experts: int):
    """DeepSeek-V4-Flash widths: a window layer, then CSA and HCA in turn."""
    from transformers import DeepseekV4Config

    ratios = [0] + [4 if i % 2 == 0 else 128 for i in range(layers - 1)]
    return DeepseekV4Config(
        num_hidden_layers=layers,
        compress_ratios=ratios,
        num_hash_layers=1,
        n_routed_experts=experts,
        num_nextn_predict_layers=0,
    )


@torch.inference_mode()
def transformers_eager(
    layers: int, experts: int, context: int, steps: int = 8, device: str = "cuda", config=None, prefill: int = 0
) -> dict:
    """Median ms of a decode step of transformers' model in bf16 after `context` tokens, prefilled in pieces; and ms of
    a prompt of `prefill` tokens, if any."""
    import transformers
    from transformers import DeepseekV4ForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = DeepseekV4ForCausalLM(config or transformers_config(layers, experts)).eval()
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():  # some are made without values
        parameter.normal_(0, 0.02)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.random_(0, model.config.n_routed_experts)
    ids = torch.randint(0, model.config.vocab_size, (1, context + steps), device=device)
    past, times = None, []
    append = lambda ids: model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values
    for start in range(0, context, 2048):
        past = append(ids[:, start : min(start + 2048, context)])
    for t in range(context, context + steps):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        past = append(ids[:, t : t + 1])
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    step, past = median(times[2:]), None
    found = {
        "version": transformers.__version__,
        "layers": layers,
        "experts": experts,
        "context": context,
        "step_ms": step,
        "layer_ms": step / layers,
    }
    return found | ({"prefill": prefill, "prefill_ms": transformers_prefill(model, prefill)} if prefill else {})


@torch.inference_mode()
def transformers_prefill(model, tokens: int, chunk: int = 2048) -> float:
    """ms of a prompt through transformers' model in pieces, the second of two."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    cuda, times = model.device.type == "cuda", []
    for _ in range(2):
        past = None
        gc.collect()
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for start in range(0, tokens, chunk):
            past = model(
                ids[:, start : start + chunk], past_key_values=past, use_cache=True, logits_to_keep=1
            ).past_key_values
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return times[1]
