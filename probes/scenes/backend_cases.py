"""Inputs of what `backend_matrix` compares with the reference: operations and compositions that have no contract, and
attention that may terminate or reads strided rows, which is not in its contract."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dsv4.kernels.attention.contract import hca_cases
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.drawing import Draw
from dsv4.kernels.experts.drawn import FORMS, Stacks, matrices
from dsv4.kernels.fusions.compositions import IndexHeads, Kept, Latents, Windows
from dsv4.kernels.fusions.entries_contract import OVERLAP
from dsv4.kernels.grouped_attention import Termination
from dsv4.kernels.linear import drawn
from dsv4.kernels.staging import fetch, items_of, new_table, paired
from dsv4.kernels.widths import Widths
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig

TOKENS = (1, 2, 9)  # implementations choose their way by such counts
SLOTS = 384  # of a cache of a GQA model: three blocks of 128
BLOCK, STAGED = 16, 7  # tokens of a staged item, and slots beside the tail
PLAIN_AND_SIMULATED = ("", False, "sums"), ("simulated", True, "codes")


@dataclass(frozen=True)
class Case:
    """One call. written: arguments that it changes in place, which are its results too.

    rule: 'sums' of numbers that both sides have alike; 'bits': equal ones; 'codes': rounded to FP8 or FP4 at the end,
    so that a value beside a boundary moves by a whole step; 'of codes': sums of such.
    """

    label: str
    arguments: list
    written: tuple[int, ...] = ()
    rule: str = "sums"


def cases_beside(name: str, config: ModelConfig | GQAConfig, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Cases of the operation or composition called `name` for each of `TOKENS`; none if contracts have them all."""
    make = (OF_GQA if isinstance(config, GQAConfig) else OF_DEEPSEEK).get(name)
    for tokens in TOKENS if make else ():
        i = Inputs(config, tokens, dtype, seed)
        for how, arguments, *more in make(i):
            yield Case(", ".join(filter(None, (i.label, how))), arguments, *more)


class Inputs(Draw):
    """Random inputs for N tokens of a model; activations in `dtype`."""

    def __init__(self, config: ModelConfig | GQAConfig, N: int, dtype: torch.dtype, seed: int):
        super().__init__(seed + N, dtype)
        self.config, self.N = config, N
        self.label = f"{N} tokens" + ("" if dtype is torch.float32 else f", {str(dtype).removeprefix('torch.')}")

    def turns(self) -> torch.Tensor:
        """Rotations complex64 [N, d/2] of the rotated dims."""
        return self.angles(self.config.qk_rope_head_dim // 2, self.N)


# ---- DeepSeek-V4 ---------------------------------------------------------------------------


def _attention_inputs(i: Inputs):
    """Rows of one token each, at the end of a window of either ratio: layers with an indexer, with long windows, and
    without."""
    c, found = i.config, []
    kinds = {"csa": (4, (c.head_dim, c.index_head_dim)), "hca": (128, (c.head_dim,)), "window": (4, ())}
    for kind, (ratio, widths) in kinds.items():
        for how, s, rule in PLAIN_AND_SIMULATED:
            windows = tuple(_windows(i, ratio, D, ("key" if j else "kv") if s else None) for j, D in enumerate(widths))
            latents = Latents(
                i.act(i.N, c.head_dim), i.act(c.head_dim), s, i.act(i.N + 9, c.head_dim), torch.arange(i.N).flip(0)
            )
            asked = IndexHeads(i.act(i.N, c.index_n_heads, c.index_head_dim), i.act(i.N, c.index_n_heads), 0.1, s)
            q = i.act(i.N, c.num_attention_heads, c.head_dim)
            found.append(
                (
                    ", ".join(filter(None, (kind, how))),
                    [i.N, q, i.turns(), c.rms_norm_eps, latents, asked if kind == "csa" else None, windows],
                    (),
                    rule,
                )
            )
    return found


def _windows(i: Inputs, ratio: int, D: int, simulate: str | None) -> Windows:
    """One whole window a row, of the ring's own rows and of the row that is stored; the first row's begins at position
    0."""
    overlap = OVERLAP[ratio]
    S, R, w = overlap * ratio, overlap * ratio + 5, overlap * D
    rows = torch.stack([R * b + torch.randperm(R, generator=i.g)[:S] for b in range(i.N)])
    rows[0, : S - ratio] = -1
    return Windows(
        i.rand(i.N, 2 * w),
        i.rand(ratio, w),
        torch.full((i.N,), ratio - 1),
        i.rand(i.N * R, 2 * w),
        rows[:, -1].clone(),
        rows,
        torch.ones(i.N, dtype=torch.bool),
        overlap,
        i.act(D),
        i.turns(),
        simulate,
        i.act(3 * i.N, D),
        torch.arange(i.N) * 3 + 1,
    )


def _hca_attention(i: Inputs):
    """Entries in rows of longer buffers, as caches have them: the contract's own are contiguous. Once, since it has
    numbers of tokens of its own."""
    if i.N != TOKENS[0]:
        return []
    q, window, near, entries, *rest = next(iter(hca_cases(Widths.of(i.config), i))).arguments
    held = i.act(entries.shape[0], 2 * entries.shape[1], entries.shape[2])
    held[:, : entries.shape[1]] = entries
    return [("rows of longer buffers", [q, window, near, held[:, : entries.shape[1]], *rest])]


def _place(i: Inputs):
    """Steps of one and of five tokens, from rows at any position."""
    c = i.config
    f = tuple(10000.0 ** -i.rand(c.qk_rope_head_dim // 2).abs() for _ in range(2))
    kept = (Kept(4, 2, 8 + 128, (300, 320)), Kept(128, 1, 128 + 128, (9,)))
    return [
        (f"{T} a row", [i.below(1000, i.N), T, f, (c.sliding_window, c.sliding_window + 128), kept]) for T in (1, 5)
    ]


def _embed_streams(i: Inputs):
    c = i.config
    return [("", [i.below(c.vocab_size, i.N), i.act(c.vocab_size, c.hidden_size), c.hc_mult, i.dtype])]


def _chosen_rows(i: Inputs):
    """Several rows of a batch; a third of the entries is absent."""
    k = i.config.index_topk
    return [("", [(i.below(3 * k, i.N + 1, 2, k) - k).clamp(min=-1), 3 * k])]


def _moe(i: Inputs):
    """Experts in every format that the columns allow; the shared one is in FP8 where they are narrower."""
    w = Widths.of(i.config)
    d, I, stacks = w.hidden_size, w.moe_intermediate_size, Stacks(w, i)
    indices, routing = i.choose(stacks.E, i.N, w.num_experts_per_tok), i.uniform(0, 1, i.N, w.num_experts_per_tok)
    for form in drawn.allowed(FORMS, w, d, I):
        wide = "dense" if form == "dense" else "fp8"
        shared = tuple(drawn.weight(wide, m, i) for m in matrices("random", I, d, i))
        for s in (False,) if form == "dense" else (False, True):  # dense ones meet activations as they are
            arguments = [i.act(i.N, d), indices, routing, *stacks(form, "random", False), shared, w.swiglu_limit, s, s]
            yield (f"{form}, simulated", arguments, (), "of codes") if s else (form, arguments)


# ---- GQA models ----------------------------------------------------------------------------


def rows(i: Inputs, B: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """keys, values [B, KV, SLOTS, D] of rows that hold something everywhere."""
    shape = (B, i.config.num_key_value_heads, SLOTS, i.config.head_dim)
    return i.act(*shape), i.act(*shape)


def queries(i: Inputs, B: int = 2) -> torch.Tensor:
    return i.act(B, i.N, i.config.num_attention_heads, i.config.head_dim)


def starts(i: Inputs) -> torch.Tensor:
    """Of two rows: one at the beginning of its text, one within the last block."""
    return torch.tensor([0, SLOTS - i.N - 3])


def never() -> Termination:
    """Stops nowhere: where it stops is a comparison of sums beside a limit, which rounding decides."""
    return Termination(tau=0.0, phi=0.0, tile=64, splits=1)


def _grouped_attention(i: Inputs):
    """Stopping nowhere, with the number of tiles read."""
    return [("terminating", [queries(i), *rows(i), starts(i), None, i.config.head_dim**-0.5, never()])]


def _gather_attention(i: Inputs):
    """Some of the blocks in any order, some absent, stopping nowhere."""
    c, (keys, values), n = i.config, rows(i), 5
    shape = (2, i.N, c.num_key_value_heads)
    blocks = torch.rand(*shape, SLOTS // BLOCK, generator=i.g).argsort(-1)[..., :n].int()
    blocks[..., -1] = -1
    blocks[0, :, :, 0] = 0  # of the row that has just begun
    blocks[0, :, :, 1:] = -1
    shared = blocks.contiguous(), starts(i), None, c.head_dim**-0.5, BLOCK
    return [("terminating", [queries(i), keys, values, *shared, never()])]


def _chunked_prefill(i: Inputs):
    """Three chunks, the last not whole, of two rows of their own lengths, one of which ends before; for heads that the
    kernels take."""
    c, cut = i.config, Chunking(32, 8, 8)
    T = 64 + i.N
    (keys, values), lengths = rows(i), torch.tensor([T, 40])
    q = i.act(2, T, c.num_attention_heads, c.head_dim)
    if c.head_dim & (c.head_dim - 1):
        return []
    return [("", [q, keys, values, 0, lengths, cut, c.head_dim**-0.5])]


def staging(i: Inputs):
    """Keys and values in host memory, the same staged, and a table that one fetch has filled: rows that begin, and end
    in a block."""
    KV = i.config.num_key_value_heads
    host = rows(i)
    staged = [i.act(2, KV, (STAGED + 1) * BLOCK, i.config.head_dim) for _ in host]
    pools = tuple(paired(items_of(far, BLOCK), items_of(near, BLOCK)) for far, near in zip(host, staged))
    table = new_table(2 * KV, SLOTS // BLOCK, STAGED, "cpu")
    fetch(table, pools, lists(i, 2 * KV), torch.full((2,), SLOTS), BLOCK, True, backend="reference")
    # which only kernels keep
    table.where.scatter_(1, table.held.long(), torch.arange(STAGED, dtype=torch.int32).expand_as(table.held))
    return host, staged, pools, table


def lists(i: Inputs, G: int, n: int = STAGED) -> torch.Tensor:
    """int32 [G, n]: blocks of SLOTS tokens in any order, each once."""
    return torch.rand(G, SLOTS // BLOCK, generator=i.g).argsort(-1)[:, :n].int()


def _fetch(i: Inputs):
    """As many items as slots, some that are there, some stale, the one being written; fewer, and absent ones; one pool
    of all groups."""
    _, _, pools, table = staging(i)
    G, last = table.held.shape[0], SLOTS // BLOCK - 1
    full, few = lists(i, G), lists(i, G, 4)
    full[:, 2] = last
    full[:, 3:] = torch.where(full[:, 3:] == last, -1, full[:, 3:])
    few[:, 1] = -1
    begun = torch.tensor([SLOTS // 2 + i.N, SLOTS - 1])  # the first row was taken back to its half
    full[: G // 2] = torch.where(full[: G // 2] > SLOTS // 2 // BLOCK, -1, full[: G // 2])
    whole = torch.full((2,), SLOTS)
    return [
        ("blocks and the tail", [table, pools, full, begun, BLOCK, True], (0, 1), "bits"),
        ("fewer, of one pool", [table, pools[:1], few.long(), whole, BLOCK, False, STAGED + 1], (0, 1), "bits"),
    ]


def _write_back(i: Inputs):
    """Tokens within blocks: in the tail's, in another (a rewind), and with no summaries."""
    host, staged, _, table = staging(i)
    KV, D = i.config.num_key_value_heads, i.config.head_dim
    summaries = [i.act(2, KV, SLOTS // BLOCK, D) for _ in range(3)]
    start = torch.tensor([BLOCK + i.N, SLOTS - i.N])
    table.current.copy_((start // BLOCK).repeat_interleave(KV))
    found = [
        (how, [*staged, *host, at, table, *kept, BLOCK], (0, 1, 2, 3, 5, 6, 7, 8))
        for how, at, kept in (
            ("the tail's block", start, summaries),
            ("another block", start - BLOCK, summaries),
            ("no summaries", start, [None] * 3),
        )
    ]
    return found


OF_DEEPSEEK: dict[str, Callable] = {
    "attention_inputs": _attention_inputs,
    "chosen_rows": _chosen_rows,
    "embed_streams": _embed_streams,
    "hca_attention": _hca_attention,
    "moe": _moe,
    "place": _place,
}
OF_GQA: dict[str, Callable] = {
    "chunked_prefill": _chunked_prefill,
    "fetch": _fetch,
    "gather_attention": _gather_attention,
    "grouped_attention": _grouped_attention,
    "write_back": _write_back,
}
