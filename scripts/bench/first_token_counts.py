"""What reading a prompt must compute, and how much faster sparse prefill can be by counting.

Nothing here is measured. Rates are those that an H100 was measured at: of matrix products and copies by
`scripts/bench/timing.py`, of attention in `audits/kernels/gqa/h100/bench_kernels_gqa_h100.md`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.gqa.config import GQAConfig
from scripts.bench.rows_prefill_chunked import kept_pairs

GOAL = 1.5  # times as fast as the fastest dense, at 4K tokens
DATASHEET = 989.4e12  # FLOP/s of bf16 products that no H100 exceeds
LONGEST = 1 << 24  # tokens up to which `least_tokens` searches


@dataclass(frozen=True)
class Rates:
    """matmul: FLOP/s of bf16 products; bandwidth: B/s of reads; dependent: seconds of each kernel of a graph that waits
    for the one before. dense: FLOP/s of the fastest dense causal attention by length, on its pairs; ours: of this
    project's dense attention; sparse: of its sparse prefill by chunk, on the pairs that it keeps."""

    matmul: float = 771e12
    bandwidth: float = 3.0e12
    dependent: float = 1.3e-6
    dense: tuple[tuple[int, float], ...] = ((4096, 535e12), (16384, 658e12), (65536, 635e12), (131072, 571e12))
    ours: float = 276e12
    sparse: tuple[tuple[int, float], ...] = ((512, 120e12), (1024, 160e12), (2048, 170e12), (4096, 200e12))

    def document(self) -> dict:
        return asdict(self)


H100 = Rates()


def nearest(known: Sequence[tuple[int, float]], size: int) -> float:
    """The value of the size that is nearest on a logarithmic scale."""
    return min(known, key=lambda one: abs(log(one[0] / size)))[1]


def causal_pairs(tokens: int) -> int:
    """Pairs of a query and a key at or before it."""
    return tokens * (tokens + 1) // 2


def own_pairs(tokens: int, cut: Chunking) -> int:
    """Pairs within the chunks: what is kept without a memory."""
    whole, rest = divmod(tokens, cut.chunk)
    return whole * causal_pairs(cut.chunk) + causal_pairs(rest)


@dataclass(frozen=True)
class Widths:
    """Of a GQA model: what one token costs. head: numbers of a head."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @classmethod
    def of(cls, c: GQAConfig) -> "Widths":
        return cls(
            c.num_hidden_layers,
            c.hidden_size,
            c.intermediate_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.vocab_size,
        )

    @property
    def matrix(self) -> int:
        """Numbers of one layer's matrices: q, k, v, o, gate, up, down."""
        return self.hidden * ((2 * self.heads + 2 * self.kv_heads) * self.head + 3 * self.intermediate)

    def linear_flops(self, tokens: int) -> int:
        """Products of all layers, and of the head for the last token alone."""
        return 2 * (self.layers * self.matrix * tokens + self.vocab * self.hidden)

    def attention_flops(self, pairs: int) -> int:
        """q·k and p·v of all layers."""
        return 4 * self.layers * self.heads * self.head * pairs

    def attention_bytes(self, tokens: int) -> int:
        """Queries, keys, values and outputs of all layers in bf16, each moved once."""
        return 2 * self.layers * tokens * 2 * (self.heads + self.kv_heads) * self.head

    def stream_bytes(self, tokens: int) -> int:
        """What passes between kernels outside attention, bf16: two norms (read, write), two residual sums (two reads, a
        write), rotation of q and k, gate · up (two reads, a write)."""
        numbers = 10 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head + 3 * self.intermediate
        return 2 * self.layers * tokens * numbers

    def weight_bytes(self) -> int:
        """Matrices of all layers in bf16."""
        return 2 * self.layers * self.matrix


@dataclass(frozen=True)
class Bound:
    """Of one prompt, batch 1. Times in ms.

    linear: products outside attention at the rate of `matmul`. dense: attention of all layers at the rate of the
    fastest dense kernel. least: sparse attention, kept pairs at the rate of `matmul`, or the bytes if they take longer,
    and a launch for each chunk, since a chunk's memory depends on the attention of the chunk before. alike: that with
    the dense kernel's rate instead.
    alone_*: dense / that. whole: the whole model with `least`. free: the whole model with attention that takes no time.
    datasheet: `free` with products at the rate that no H100 exceeds. needed: FLOP/s on kept pairs with which attention
    alone reaches GOAL; None where the launches alone take too long.
    """

    tokens: int
    chunk: int
    local: int
    heavy: int
    causal: int
    kept: int
    launches: int
    linear: float
    dense: float
    least: float
    alike: float
    alone_least: float
    alone_alike: float
    whole: float
    free: float
    datasheet: float
    needed: float | None

    @property
    def verdict(self) -> str:
        """Whether counting leaves the goal open: of the whole model, and of attention alone."""
        whole = "cannot be reached" if self.datasheet < GOAL else "is not ruled out"
        alone = "cannot be reached" if self.alone_least < GOAL else "is not ruled out"
        return f"{GOAL}× of a whole model {whole}, of attention alone {alone}"

    def document(self) -> dict:
        return asdict(self) | {
            "goal": GOAL,
            "whole_can_reach_goal": self.datasheet >= GOAL,
            "alone_can_reach_goal": self.alone_least >= GOAL,
        }


def bound(widths: Widths, tokens: int, cut: Chunking, rates: Rates = H100) -> Bound:
    """The most that sparse prefill with this cut can gain over the fastest dense one, whoever writes the kernels.

    It counts in favour of sparse prefill: the sums over the columns that choose the memory, the choice itself and
    gathering are taken to cost nothing, and everything outside attention runs at the rate of a large square product.
    """
    kept, launches = kept_pairs(tokens, cut), cut.chunks(tokens)
    flops, waits = widths.attention_flops(kept), widths.layers * launches * rates.dependent
    moved = widths.attention_bytes(tokens) / rates.bandwidth
    linear = widths.linear_flops(tokens) / rates.matmul
    dense = widths.attention_flops(causal_pairs(tokens)) / nearest(rates.dense, tokens)
    least = max(flops / rates.matmul, moved) + waits
    alike = max(flops / nearest(rates.dense, tokens), moved) + waits
    fastest = widths.linear_flops(tokens) / DATASHEET
    left = dense / GOAL - waits
    return Bound(
        tokens,
        cut.chunk,
        cut.local,
        cut.heavy,
        causal_pairs(tokens),
        kept,
        launches,
        linear * 1e3,
        dense * 1e3,
        least * 1e3,
        alike * 1e3,
        dense / least,
        dense / alike,
        (linear + dense) / (linear + least),
        (linear + dense) / linear,
        (fastest + dense) / fastest,
        flops / left if left > moved else None,
    )


def least_tokens(widths: Widths, rates: Rates = H100) -> int:
    """The shortest prompt at which a whole model whose attention takes no time is GOAL times as fast, at the rates of
    `matmul` and of the fastest dense attention at any length (a slower dense one would make it shorter)."""
    slowest = min(rate for _, rate in rates.dense)

    def gain(tokens: int) -> float:
        dense = widths.attention_flops(causal_pairs(tokens)) / slowest
        return 1 + dense / (widths.linear_flops(tokens) / rates.matmul)

    low, high = 1, LONGEST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) >= GOAL else (middle + 1, high)
    return low


def predicted(
    widths: Widths,
    tokens: int,
    batch: int,
    cut: Chunking | None = None,
    piece: int | None = None,
    peer: bool = False,
    rates: Rates = H100,
) -> float:
    """ms to the first token, by the formula that reports print beside what was measured.

    Products at `matmul`, or the weights once a piece if that takes longer; what passes between kernels at `bandwidth`;
    attention at the rate of its kind (`Rates`). piece: tokens of a row in one step, None: the whole prompt.
    """
    pieces = -(-tokens // piece) if piece else 1
    products = max(batch * widths.linear_flops(tokens) / rates.matmul, pieces * widths.weight_bytes() / rates.bandwidth)
    streams = batch * widths.stream_bytes(tokens) / rates.bandwidth
    if cut is None:
        rate = nearest(rates.dense, tokens) if peer else rates.ours
        attention = widths.attention_flops(causal_pairs(tokens)) / rate
    else:
        attention = widths.attention_flops(kept_pairs(tokens, cut)) / nearest(rates.sparse, cut.chunk)
    return (products + streams + batch * attention) * 1e3
