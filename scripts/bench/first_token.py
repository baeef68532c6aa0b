"""Time to the first token of a whole GQA model: prompts read densely at once, densely in chunks, and sparsely."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.sparse_prefill.reading import check_updates
from scripts.bench.decode import context_name
from scripts.bench.inputs import difference
from scripts.bench.rows_prefill_chunked import merge, with_lse
from scripts.bench.timing import device_kernels

PUBLISHED = tuple(Chunking(1024, 256, 256, score, heads) for score in ("fused", "memory") for heads in ("kv", "query"))
TUNED = Chunking(512, 64, 192), Chunking(1024, 128, 384), Chunking(2048, 256, 768)  # those of docs/sparse.md
PIECES = 512, 1024, 2048, 4096
# relative Frobenius error of the last logits of two dense readings: in bf16 each layer rounds otherwise, a few % in all
TOLERANCE = 0.1
LONG_MS = 4000  # a reading that takes longer is timed once


@dataclass(frozen=True)
class Way:
    """How a prompt is read. cut: sparsely. piece: tokens of a row in one step, None: all of them. peer: dense attention
    by the fastest library kernel, instead of the model's own."""

    cut: Chunking | None = None
    piece: int | None = None
    peer: bool = False

    @property
    def name(self) -> str:
        at_once = "at once" if self.piece is None else f"in pieces of {context_name(self.piece)}"
        if self.cut is None:
            return f"dense{', SDPA' * self.peer}, {at_once}"
        c = self.cut
        rule = f", {c.score}, {c.heads}"
        return f"sparse {c.chunk}: {c.local} + {c.heavy}{rule}, {at_once}"

    def fits(self, tokens: int) -> bool:
        """Whether it is another way than reading all of them densely at once."""
        return (self.piece is None or self.piece < tokens) and (self.cut is None or self.cut.chunk < tokens)

    def document(self) -> dict:
        return {"way": self.name, "piece": self.piece, "peer": self.peer} | {
            "cut": None if self.cut is None else asdict(self.cut)
        }


def ways(cuts: tuple[Chunking, ...], pieces: tuple[int, ...]) -> list[Way]:
    """What is timed, the most wanted first: a run that ends early has these."""
    first = [Way(peer=True), Way(), *(Way(cut) for cut in cuts)]
    return first + [Way(piece=n, peer=peer) for n in pieces for peer in (True, False)] + [Way(cuts[0], 2048)]


@dataclass
class Row:
    """One way, batch and length. ms: the median of `runs` runs after a first one that may compile; of the first itself
    if it is long and the way ran before. predicted: by `first_token_counts.predicted`, written before anything was
    measured. difference: of the last logits from those of the first dense way (between sparse and dense no error). why:
    what went wrong, or why it was not measured."""

    way: Way
    tokens: int
    batch: int
    predicted: float
    ms: float | None = None
    least: float | None = None
    most: float | None = None
    runs: int = 0
    first_ms: float | None = None
    peak_bytes: int | None = None
    difference: float | None = None
    why: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        return None if not self.ms else self.batch * self.tokens / self.ms * 1e3

    @property
    def red(self) -> bool:
        """Whether it broke what it must hold whatever its speed."""
        return bool(self.why) and not self.why.startswith("not begun")

    def document(self) -> dict:
        found = asdict(self) | {"tokens_per_second": self.tokens_per_second}
        return {**self.way.document(), **{key: value for key, value in found.items() if key != "way"}}

    def line(self) -> str:
        at = f"{self.batch} × {context_name(self.tokens)}, {self.way.name}"
        return f"{at}: {self.why}" if self.ms is None else f"{at}: {self.ms:.1f} ms (predicted {self.predicted:.1f})"


class Sdpa:
    """The operations of a model, of which dense attention to prompts is torch's: cuDNN on a GPU. at: tokens that rows
    hold before the step; all rows hold as many."""

    def __init__(self, op):
        self.op, self.at = op, 0

    def __getattr__(self, name: str):
        return getattr(self.op, name)

    def grouped_attention(self, q, keys, values, start, window, scale, *rule):
        """As `dsv4.kernels.grouped_attention`, q [B, T, H, D], of prompts without a window."""
        if rule or window is not None:
            return self.op.grouped_attention(q, keys, values, start, window, scale, *rule)
        mine, a, b = q.transpose(1, 2), self.at, self.at + q.shape[1]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION] if q.is_cuda else [SDPBackend.MATH]):
            if not a:
                out = F.scaled_dot_product_attention(
                    mine, keys[:, :, :b], values[:, :, :b], is_causal=True, scale=scale, enable_gqa=True
                )
            elif q.is_cuda:
                own = with_lse(mine, keys[:, :, a:b], values[:, :, a:b], True, scale)
                out = merge(own, with_lse(mine, keys[:, :, :a], values[:, :, :a], False, scale))
            else:
                seen = torch.ones(b - a, b, dtype=torch.bool).tril(a)
                out = F.scaled_dot_product_attention(
                    mine, keys[:, :, :b], values[:, :, :b], seen, scale=scale, enable_gqa=True
                )
        return out.transpose(1, 2).contiguous()  # copies nothing where the kernel keeps the layout of q


@contextmanager
def reading(model, way: Way) -> Iterator[Sdpa | None]:
    """While entered the model reads prompts that way."""
    before, peer = model.attention, None
    try:
        model.attention = replace(before, prefill=way.cut)
        if way.peer:
            peer = Sdpa(model.layers[0].self_attn.op)
            for layer in model.layers:
                layer.self_attn.op = peer
        yield peer
    finally:
        for layer in model.layers if peer else ():
            layer.self_attn.op = peer.op
        model.attention = before


def read(model, cache, ids: torch.Tensor, way: Way, peer: Sdpa | None) -> torch.Tensor:
    """Last logits [B, vocab] of prompts ids int64 [B, T] in an empty cache."""
    T, cut = ids.shape[1], way.cut
    whole = T if cut is None else cut.chunks(T) * cut.chunk
    piece = whole if way.piece is None else way.piece if cut is None else -(-way.piece // cut.chunk) * cut.chunk
    for at in range(0, T, piece):
        if peer is not None:
            peer.at = at
        last = at + piece >= T
        found = model.append(
            ids[:, at : at + piece], cache, logits="last" if last else "none", chunk=piece, prompt=True
        )
    return found[:, 0]


def check(cache, way: Way, batch: int, tokens: int) -> None:
    """Raises WrongCount unless each memory was chosen as often as chunks ended."""
    if way.cut is not None:
        for i, layer in enumerate(cache.layers):
            if layer.last_memory is not None:
                check_updates(i, layer.last_memory.updates, [tokens] * batch, way.cut, tokens)


def runs_of(ms: float, most: int) -> int:
    """How often a reading that takes so long is timed."""
    return most if ms < 700 else min(most, 3) if ms < LONG_MS else 1


@dataclass
class Bench:
    """Times ways of one model. deadline: seconds of `clock` after which nothing is begun. dense: the last logits of the
    first dense way, by (batch, tokens)."""

    model: object
    most_runs: int = 5
    deadline: float = float("inf")
    clock: Callable[[], float] = time.monotonic
    dense: dict = field(default_factory=dict)
    warm: set = field(default_factory=set)  # names of ways that ran: their kernels are compiled

    def measure(self, row: Row) -> None:
        """Fill in `row`. What fails is said in it, so that the next can follow."""
        if self.clock() > self.deadline:
            row.why = "not begun: the time was up"
            return
        try:
            self._measure(row)
        except Exception as failure:  # a way that does not fit or run is a line of the table
            row.ms, row.why = None, f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _measure(self, row: Row) -> None:
        model, way, (B, T) = self.model, row.way, (row.batch, row.tokens)
        on_gpu = model.device.type == "cuda"
        make = torch.Generator().manual_seed(T)
        ids = torch.randint(0, model.config.vocab_size, (B, T), generator=make).to(model.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with reading(model, way) as peer:
            cache, times, logits = model.new_cache(B, T, 0), [], None
            while not self._enough(times, way):
                cache.reset()
                wait(on_gpu)
                begun = time.perf_counter()
                logits = read(model, cache, ids, way, peer)
                logits.argmax(-1).tolist()  # the first token is on the host
                times.append((time.perf_counter() - begun) * 1e3)
            check(cache, way, B, T)
        kept = times[1:] or times
        self.warm.add(way.name)
        row.first_ms, row.ms, row.least, row.most, row.runs = times[0], median(kept), min(kept), max(kept), len(kept)
        row.peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
        self._compare(row, logits)

    def _enough(self, times: list[float], way: Way) -> bool:
        """Whether no further run is needed after those of `times`: the first may compile, unless it is a long one of a
        way that ran before."""
        if len(times) < 2:
            return bool(times) and way.name in self.warm and times[0] > LONG_MS
        return self.clock() > self.deadline or len(times) > runs_of(times[-1], self.most_runs)

    def _compare(self, row: Row, logits: torch.Tensor) -> None:
        if not logits.isfinite().all():
            row.why = "logits are not finite"
            return
        if row.way.cut is None:
            self.dense.setdefault((row.batch, row.tokens), logits.float().cpu())
        exact = self.dense.get((row.batch, row.tokens))
        row.difference = None if exact is None else difference(logits.float().cpu(), exact)
        if row.way.cut is None and not row.difference <= TOLERANCE:
            row.why = f"last logits differ from those of the first dense way by {row.difference:.1e}"

    def profile(self, way: Way, tokens: int) -> dict:
        """Kernels of one reading, batch 1, on a GPU: name → launches and µs that they add, most first."""
        ids = torch.randint(0, self.model.config.vocab_size, (1, tokens), device=self.model.device)
        with reading(self.model, way) as peer:
            cache = self.model.new_cache(1, tokens, 0)

            def run():
                cache.reset()
                read(self.model, cache, ids, way, peer)

            found: dict[str, list] = {}
            for name, _, adds in device_kernels(run):
                one = found.setdefault(name[:80], [0, 0.0])
                one[0], one[1] = one[0] + 1, one[1] + adds
        ordered = sorted(found.items(), key=lambda item: -item[1][1])
        return {
            "way": way.name,
            "tokens": tokens,
            "us": sum(us for _, us in found.values()),
            "kernels": [{"name": name, "launches": n, "us": us} for name, (n, us) in ordered],
        }


def wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
