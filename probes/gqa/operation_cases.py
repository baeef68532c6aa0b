"""Inputs of every operation of GQA models, and of their one composition, at a model's own widths, for
`backend_matrix`."""

import torch

from dsv4.kernels.block_choice import Policy
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.grouped_attention import Termination
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.staging import fetch, items_of, new_table, paired
from dsv4.probes.case_inputs import Case, Inputs, cases_of

SLOTS = 384  # of a cache: three blocks of 128


def gqa_cases(name: str, i: Inputs) -> list[Case]:
    """Cases of the operation or composition called `name`; none if it is unknown here."""
    return cases_of(globals().get(f"_{name}"), i)


def rows(i: Inputs, B: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """keys, values [B, KV, SLOTS, D] of rows that hold something everywhere."""
    shape = (B, i.config.num_key_value_heads, SLOTS, i.config.head_dim)
    return i.act(*shape), i.act(*shape)


def queries(i: Inputs, B: int = 2) -> torch.Tensor:
    return i.act(B, i.N, i.config.num_attention_heads, i.config.head_dim)


def starts(i: Inputs) -> torch.Tensor:
    """Of two rows: one at the beginning of its text, one within the last block."""
    return torch.tensor([0, SLOTS - i.N - 3])


def dense(i: Inputs, O: int, K: int) -> PackedWeight:
    return PackedWeight(WeightFormat.DENSE, i.matrix(O, K).to(i.dtype))


def _rms_norm(i: Inputs):
    c = i.config
    return [("", [i.act(i.N, c.hidden_size), i.act(c.hidden_size), c.rms_norm_eps])]


def _linear(i: Inputs):
    c, width = i.config, i.config.num_attention_heads * i.config.head_dim
    return [
        ("attention output", [i.act(i.N, width), dense(i, c.hidden_size, width), False]),
        ("MLP output", [i.act(i.N, c.intermediate_size), dense(i, c.hidden_size, c.intermediate_size), False]),
    ]


def _linears(i: Inputs):
    """Queries, keys and values of one norm; the gate and its twin; the head, in fp32."""
    c, d = i.config, i.config.hidden_size
    qkv = tuple(
        dense(i, heads * c.head_dim, d)
        for heads in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
    )
    pair = tuple(dense(i, c.intermediate_size, d) for _ in range(2))
    normed = lambda weights, out: [
        i.act(i.N, d),
        i.act(d),
        c.rms_norm_eps,
        weights,
        (False,) * len(weights),
        (out,) * len(weights),
    ]
    return [
        ("queries, keys, values", normed(qkv, None)),
        ("gate and up", normed(pair, None)),
        ("head", normed((dense(i, c.vocab_size, d),), torch.float32)),
    ]


def _silu_mul(i: Inputs):
    I = i.config.intermediate_size
    gate = 6 * i.act(i.N, I)  # to both tails
    return [("", [gate, i.act(i.N, I), None]), ("biases", [gate, i.act(i.N, I), (i.act(I), i.act(I))])]


def _rotary_rows(i: Inputs):
    """Two rows at positions of their own, with biases and without; everything in the cache is a result."""
    c, (keys, values) = i.config, rows(i)
    N, H, KV, D = 2 * i.N, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    angle = 6.3 * i.rand(N, D // 2)
    cis = torch.polar(torch.ones_like(angle), angle)
    q, k, v = i.act(N, H * D), i.act(N, KV * D), i.act(N, KV * D)
    biases = i.act(H * D), i.act(KV * D), i.act(KV * D)
    return [(how, [q, k, v, b, cis, keys, values, starts(i)], (5, 6)) for how, b in (("", None), ("biases", biases))]


def _grouped_attention(i: Inputs):
    """All tokens before, a window, and stopping early: the last with the number of tiles read."""
    q, (keys, values), scale = queries(i), rows(i), i.config.head_dim**-0.5
    found = [
        (how, [q, keys, values, starts(i), window, scale])
        for how, window in (("", None), ("window", 40), ("window of 1", 1))
    ]
    beyond = [t.masked_fill(torch.arange(SLOTS).view(-1, 1) >= SLOTS - 3, float("nan")) for t in (keys, values)]
    return [
        *found,
        ("slots that nobody wrote", [q, *beyond, starts(i), None, scale]),
        ("terminating", [q, keys, values, starts(i), None, scale, never()]),
    ]


def never() -> Termination:
    """Stops nowhere: where it stops is a comparison of sums beside a limit, which rounding decides."""
    return Termination(tau=0.0, phi=0.0, tile=64, splits=1)


def _summarise_blocks(i: Inputs):
    """Blocks of both sizes that policies have, over summaries that are not empty."""
    c, (keys, _), found = i.config, rows(i), []
    for block in (16, 128):
        low, high, mean = (i.act(2, c.num_key_value_heads, SLOTS // block, c.head_dim) for _ in range(3))
        found.append((f"blocks of {block}", [keys, starts(i), i.N, low, high, mean, block], (3, 4, 5)))
    return found


def policies() -> dict[str, Policy]:
    """One of each kind, that leaves blocks out of SLOTS."""
    return {
        "sink and window": Policy("sink+window", None, 16, 1, 3),
        "bounds": Policy("bounds", "bound", 16, 1, 2, 5),
        "means": Policy("means", "mean", 16, 1, 2, 5),
    }


def _choose_blocks(i: Inputs):
    c, (keys, _), found = i.config, rows(i), []
    blocks = keys.unflatten(2, (-1, 16))
    low, high, mean = blocks.amin(3).contiguous(), blocks.amax(3).contiguous(), blocks.float().mean(3).to(i.dtype)
    for how, policy in policies().items():
        held = {"bound": (low, high, None), "mean": (None, None, mean), None: (None, None, None)}[policy.selector]
        found += [
            (
                f"{how}{', by importance' if by else ''}",
                [queries(i), c.num_key_value_heads, *held, starts(i), policy, by],
            )
            for by in (False, True)
        ]
    return found


def _gather_attention(i: Inputs):
    """Some of the blocks in any order, some absent; and stopping nowhere."""
    c, (keys, values), n = i.config, rows(i), 5
    shape = (2, i.N, c.num_key_value_heads)
    blocks = torch.rand(*shape, SLOTS // 16, generator=i.g).argsort(-1)[..., :n].int()
    blocks[..., -1] = -1
    blocks[0, :, :, 0] = 0  # of the row that has just begun
    blocks[0, :, :, 1:] = -1
    args = [queries(i), keys, values, blocks.contiguous(), starts(i), None, c.head_dim**-0.5, 16]
    return [("", args), ("terminating", [*args, never()])]


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


BLOCK, STAGED = 16, 7  # tokens of a staged item, and slots beside the tail


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
