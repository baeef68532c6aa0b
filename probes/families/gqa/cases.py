"""Inputs of what `backend_matrix` compares with the reference on GQA models: operations that have no contract, and
attention that may terminate, which is not in its contract."""

from collections.abc import Callable

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.grouped_attention import Termination
from dsv4.kernels.staging import fetch, items_of, new_table, paired
from dsv4.probes.scenes.backend_cases import Inputs

SLOTS = 384  # of a cache of a GQA model: three blocks of 128
BLOCK, STAGED = 16, 7  # tokens of a staged item, and slots beside the tail


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


CASES: dict[str, Callable] = {
    "chunked_prefill": _chunked_prefill,
    "fetch": _fetch,
    "gather_attention": _gather_attention,
    "grouped_attention": _grouped_attention,
    "write_back": _write_back,
}
