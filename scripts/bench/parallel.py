"""What several ranks take: exchanges alone, decode steps, rounds of drafts and prompts. All ranks run the same; each
returned row is what this rank measured."""

import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch

from dsv4.errors import CapacityError
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.hyper_connections.triton import mhc_post_pre_norm
from dsv4.model.cut_values import finite
from dsv4.model.ranks import Ranks, in_order
from dsv4.runtime.capture import capturing
from dsv4.speculation import Static, on_device
from scripts.bench import decode
from scripts.bench.speculation_gpu import again, traced
from scripts.bench.speculation_traces import recorded
from scripts.bench.timing import Machine, device_kernels

CALLS, RUNS = 86, 20  # exchanges of a graph, as many as a token of Flash needs; graphs that are timed
SUMS = ((1, 4096), (4, 4096), (8, 4096), (32, 4096), (64, 4096), (1, 7168), (512, 4096), (2048, 4096))
EXCHANGES = "_exchange", "_statistics_few"  # kernels that wait for other ranks
TOKENS_MERGED, WIDTH, STREAMS, EACH = (1, 4, 8), 4096, 4, 6  # a boundary between sublayers: tokens, and Flash's sizes
DRAFTED, TOKENS = (1, 2, 3), 256  # drafts a round; tokens that a row writes


def exchanges(ranks: Ranks, said: Callable[[str], None]) -> Iterator[dict]:
    """Sums of fp32 parts to bf16, in graphs of CALLS, checked against the sum of gathered parts; NCCL's all-reduce of
    bf16 beside them."""
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    g = torch.Generator(device).manual_seed(ranks.rank)
    for shape in SUMS:
        x = torch.randn(*shape, device=device, generator=g)
        found = ranks.sum(x, torch.bfloat16)
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        dist.all_gather(parts, x)
        right = torch.equal(found, in_order(parts, torch.bfloat16))
        other = x.bfloat16()
        row = {
            "kind": "exchange",
            "ranks": ranks.size,
            "shape": list(shape),
            "bits": right,
            "ours_us": _graphed(lambda: ranks.sum(x, torch.bfloat16)),
            "nccl_us": _graphed(lambda: dist.all_reduce(other)),
        }
        said(f"sum of {shape}: {row['ours_us']:.2f} µs, NCCL {row['nccl_us']:.2f} µs; bits {right}")
        yield row


def boundaries(ranks: Ranks, said: Callable[[str], None]) -> Iterator[dict]:
    """What follows a sublayer, merging included, in graphs of CALLS: with the sum over ranks taken by the first mHC
    kernel, and by itself, after experts' rows were combined."""
    few = ranks.group and ranks.group.few
    if not few:
        return
    device, d, n = torch.device("cuda", torch.cuda.current_device()), WIDTH, STREAMS
    g = torch.Generator(device).manual_seed(ranks.rank)
    draw = lambda *shape: torch.randn(*shape, device=device, generator=g)
    for N in TOKENS_MERGED:
        indices = torch.arange(N * EACH, device=device).view(N, EACH)
        experts = ExpertRows(draw(N * EACH, d).bfloat16(), indices, draw(N, d))
        weights = draw(2 * n + n * n, n * d), draw(3), draw(2 * n + n * n), 20, 1e-6, 1e-6, draw(d).bfloat16(), 1e-6
        rest = draw(N, n, d).bfloat16(), draw(N, n), draw(N, n, n), *weights
        for after, part in (("attention", draw(N, d)), ("experts", experts)):

            def alone(part=part, rest=rest):
                own = part if isinstance(part, torch.Tensor) else part.combine(torch.float32)
                return mhc_post_pre_norm(ranks.sum(own, torch.bfloat16), *rest)

            def deferred(part=part, rest=rest):
                return mhc_post_pre_norm(ranks.deferred(part, torch.bfloat16), *rest)

            row = {
                "kind": "boundary",
                "ranks": ranks.size,
                "after": after,
                "tokens": N,
                "bits": all(map(torch.equal, deferred(), alone())),
                "deferred_us": _graphed(deferred),
                "alone_us": _graphed(alone),
            }
            said(f"after {after}, {N} tokens: {row['deferred_us']:.2f} µs, sum by itself {row['alone_us']:.2f} µs")
            yield row


def _graphed(run: Callable[[], object]) -> float:
    """µs a call."""
    import torch.distributed as dist

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        with capturing(graph, stream=stream):
            for _ in range(CALLS):
                run()
    times = []
    for _ in range(RUNS):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def step(model, batch: int, context: int, machine: Machine) -> dict:
    """A decode step and the choice of the greedy token. Its floor: the bytes that this rank reads over bandwidth."""
    torch.manual_seed(0)  # every rank feeds the same tokens
    begun = {"kind": "step", "ranks": model.ranks.size, "weight_bytes": model.nbytes - model.embed.host_bytes}
    try:
        point = decode.measure_point(model, batch, context, machine, chosen=True)
    except (CapacityError, torch.OutOfMemoryError) as failure:
        return begun | {"batch": batch, "context": context, "layers": len(model.layers), "why": f"no room: {failure}"}
    return begun | {"outside_bytes": outside()} | point.document()


def outside() -> int:
    """Bytes of this device that are in use and not torch's: context, kernels, captured graphs, exchange buffers."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def kernels(model, batch: int, context: int) -> dict:
    """The kernels of a decode step. The profiler takes memory of the device and may slow what comes after it. Ranks
    are profiled one after the other, so the first exchange waits: each counts as the median, or the fastest of few."""
    torch.manual_seed(1)
    point = SimpleNamespace(batch=batch, context=context)
    return profiled(model, point, decode.step_kernels(model, batch, context))


def chunk_kernels(model, tokens: int, context: int) -> dict:
    """The kernels of a chunk of a prompt that follows `context` tokens. Between them the device waits for the host:
    `span_ms` is all of it."""
    from dsv4.model.dummy import fill_cache

    torch.manual_seed(1)
    cache = model.new_cache(1, context + 2 * tokens)
    fill_cache(cache, context)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    spans = device_kernels(lambda: model.append(ids, cache, logits="last", chunk=tokens, whole=False))
    point = SimpleNamespace(batch=1, context=context, chunk=tokens, span_ms=sum(us for *_, us in spans) / 1e3)
    return profiled(model, point, spans)


def profiled(model, point: SimpleNamespace, spans: list[tuple[str, float, float]]) -> dict:
    """A row of kernels, added up by name."""
    for kernel in EXCHANGES if model.ranks.size > 1 else ():
        each = [us for name, _, us in spans if kernel in name] or [0.0]
        usual = statistics.median_low(each)
        spans = [(name, span, usual if kernel in name else us) for name, span, us in spans]
    decode.add_profile(point, spans)
    return {"kind": "kernels", "ranks": model.ranks.size, "layers": len(model.layers)} | vars(point)


def drafts(model, context: int, said: Callable[[str], None]) -> Iterator[dict]:
    """Tokens/s of a row that writes TOKENS tokens in rounds of so many MTP drafts, accepted as was recorded."""
    for D in DRAFTED:
        rounds = traced(model, 1, context, TOKENS, on_device(Static(D), 1, model.device), [D])
        rounds.prepare()
        for _, trace in recorded()[:2]:
            seconds = []
            for run in range(3):
                accepted = trace.requests[run % len(trace.requests)].accepted[:TOKENS]
                accepted = np.resize(accepted, TOKENS)[None]
                again(rounds, context, accepted)
                torch.cuda.synchronize()
                begun = time.perf_counter()
                rounds.run(lambda row, tokens: None)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
            row = {
                "kind": "drafts",
                "ranks": model.ranks.size,
                "layers": len(model.layers),
                "context": context,
                "drafts": D,
                "trace": trace.name,
                "tokens_per_second": TOKENS / statistics.median(seconds),
                "rounds": len(rounds.counts.rounds),
            }
            said(f"{D} drafts, {trace.name}: {row['tokens_per_second']:.0f} tokens/s")
            yield row
        del rounds


def prompt(model, tokens: int, chunk: int, runs: int = 2) -> dict:
    """A prompt from an empty cache to its greedy next token; the first run compiles and is left out if there are
    more."""
    torch.manual_seed(2)
    torch.cuda.reset_peak_memory_stats()
    cache = model.new_cache(1, tokens)
    ids, times = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device), []
    for _ in range(runs):
        cache.reset()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        logits = model.append(ids, cache, logits="last", chunk=chunk, whole=False)
        logits.argmax(-1).tolist()
        times.append(time.perf_counter() - begun)
    return {
        "kind": "prompt",
        "ranks": model.ranks.size,
        "layers": len(model.layers),
        "tokens": tokens,
        "chunk": chunk,
        "seconds": min(times[1:] or times),
        "first_seconds": times[0],
        "tokens_per_second": tokens / min(times[1:] or times),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "cache_bytes": cache.nbytes,
        "finite": bool(finite(logits).all()),
    }
