"""A whole prompt through `Model.append` in the model's own chunks: what it must move and multiply, and how long it
takes."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from scripts.bench.decode import Compiles, context_name, row_bytes
from scripts.bench.timing import Machine
from scripts.bench.waits import counted_syncs

NO_PRODUCT = ("scale", "tid2eid", "ape")  # parameters of two dims or more that nothing is multiplied with as a matrix
RUNS = 5  # timed, after a first one that compiles


@dataclass
class Prefill:
    """One prompt of `tokens` tokens, batch 1. ms: the fastest of the runs after the first; compiles, syncs: of all of
    those."""

    tokens: int
    layers: int
    chunk: int
    ms: float
    first_ms: float
    floor_ms: float
    peak_bytes: int
    compiles: int = 0
    syncs: int = 0
    finite: bool = True
    why: str = ""

    @property
    def name(self) -> str:
        return f"prefill of {context_name(self.tokens)}"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.ms * 1e3

    def line(self) -> str:
        return (
            f"{self.name}: {self.ms:.1f} ms, {self.tokens_per_second:.0f} tokens/s, {self.floor_ms / self.ms:.0%} of "
            f"the floor; {self.compiles} compiles, {self.syncs} syncs after the first run"
        )

    def document(self) -> dict:
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "layer_ms": self.ms / self.layers,
            "share_of_floor": self.floor_ms / self.ms,
        }


def causal(tokens: int, ratio: int, most: int | None = None) -> int:
    """Entries that the queries 0 … tokens − 1 see together, `most` of them each: query t sees ⌊(t + 1) / ratio⌋."""
    whole, rest = divmod(tokens, ratio)  # `whole` entries are complete at the end
    seen = ratio * whole * (whole - 1) // 2 + whole * (rest + 1)
    if most is None or whole <= most:
        return seen
    return causal(most * ratio + ratio - 1, ratio) + most * (tokens - most * ratio - ratio + 1)


def parts(model, cache, tokens: int, chunk: int) -> Iterator[tuple[str, float, float]]:
    """(what, bytes, FLOPs) of a prompt from an empty cache, in chunks, with logits of the last token: perf.md §2.

    Matrices are read once a chunk; of the experts those that its tokens reach on average. Streams pass each connection
    as one fused kernel would move them. Scores and attention read what a chunk sees once.
    """
    c, chunks = model.config, [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    k, E, width = c.num_experts_per_tok, c.n_routed_experts, model.numerics.activation.itemsize
    for i, (block, layer) in enumerate(zip(model.layers, cache.layers)):
        moved = flops = 0.0
        for name, p in block.named_parameters():
            numbers = p.numel() * (2 if p.dtype is torch.uint8 else 1) * (p.dim() > 1 and not name.endswith(NO_PRODUCT))
            if ".experts." in name:
                moved += sum(p.nbytes * (1 - (1 - k / E) ** n) for n in chunks)
                flops += 2 * numbers * k / E * tokens
            elif not name.startswith("hc_") and not name.endswith("tid2eid"):
                moved += p.nbytes * len(chunks)
                flops += 2 * numbers * tokens
        yield f"layer {i}, products", moved + 2 * tokens * c.hidden_size * width, flops
        n, d = c.hc_mult, c.hidden_size
        yield f"layer {i}, streams", 2 * tokens * (2 * n + 2) * d * width, 2 * 2 * tokens * (2 * n + n * n) * n * d
        yield from _attention(model, block, layer, i, tokens, chunks)
    head = model.head.weight
    yield "head", head.nbytes, 2 * head.numel()


def _attention(model, block, layer, i: int, tokens: int, chunks: list[int]) -> Iterator[tuple[str, float, float]]:
    c, H, D = model.config, model.config.num_attention_heads, model.config.head_dim
    window = causal(tokens, 1, c.sliding_window)
    moved, keys = 2 * tokens * H * D * model.numerics.activation.itemsize, window
    if block.spec.compresses:
        ratio = block.attn.ratio
        keys += causal(tokens, ratio, c.index_topk if block.spec.selects else None)
        ends = [sum(chunks[: j + 1]) for j in range(len(chunks))]
        moved += sum(end // ratio for end in ends) * row_bytes(layer.main.entries.flat)
    if block.spec.selects:
        scored = causal(tokens, ratio) if tokens // ratio > c.index_topk else 0
        read = sum(end // ratio for end in ends) * row_bytes(layer.index.entries.flat)
        queries = tokens * c.index_n_heads * c.index_head_dim * model.numerics.activation.itemsize
        yield f"layer {i}, scores", read + queries, 2 * c.index_n_heads * c.index_head_dim * scored
    yield f"layer {i}, attention", moved, 4 * H * D * keys


def floor(found, machine: Machine) -> float:
    """ms: each part takes its bytes or its products, whichever is longer."""
    return sum(max(moved / machine.bandwidth, flops / machine.matmul) for _, moved, flops in found) * 1e3


def measure_prefill(model, tokens: int, machine: Machine, chunk: int | None = None) -> Prefill:
    """Prompts of that length in chunks (None: of the model's own size), each from an empty cache, until the last
    token's logits are there.

    The host needs almost as long to launch a prompt's kernels as the device to run them. On a busy host a single run is
    up to a half too long, so the fastest of several counts.
    """
    torch.cuda.reset_peak_memory_stats()
    cache = model.new_cache(1, tokens)
    chunk = chunk or model.chunk_beside(cache)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
    times, compiles, waits = [], [], []
    for _ in range(1 + RUNS):
        cache.reset()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with Compiles() as compiled, counted_syncs() as syncs:
            logits = model.append(ids, cache, logits="last", chunk=chunk)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
        if len(times) > 1:
            compiles += compiled.names
            waits += syncs
    least = floor(parts(model, cache, tokens, chunk), machine)
    return Prefill(
        tokens,
        len(model.layers),
        chunk,
        min(times[1:]),
        times[0],
        least,
        torch.cuda.max_memory_allocated(),
        len(compiles),
        len(waits),
        bool(logits.isfinite().all()),
        "; ".join(sorted({*waits, *compiles}))[:500],
    )
