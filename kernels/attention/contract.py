"""Contracts of `sparse_attention` and `hca_attention`."""

from functools import partial

import torch

from dsv4.kernels.attention import exact
from dsv4.kernels.attention.drawn import (
    FAMILIES,
    FEW_BITS,
    last_of,
    lists,
    low,
    pool,
    queries_of,
    rows_of,
    unlisted,
    unseen,
)
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat
from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work, doubles


def sparse_cases(w, draw):
    """Plain and packed pools, both lists and the window alone, for a few queries of every family."""
    for form in (None, RowFormat.KV_FP8):
        for family in FAMILIES:
            yield _sparse_case(family, form, 8, w, draw)
    for N in (1, 3):
        yield _sparse_case("random", RowFormat.KV_FP8, N, w, draw)
    yield _sparse_case("pointed", None, 8, w, draw, entries=False)


def _sparse_case(family, form, N, w, draw, entries=True) -> Case:
    H, D, W, K, rope = w.num_attention_heads, w.head_dim, w.sliding_window, w.index_topk, w.qk_rope_head_dim
    scale, near_rows, far_rows = D**-0.5, 2 * W + 37, 3 * K + 29
    near, far = lists(family, near_rows, N, W, draw), lists(family, far_rows, N, K, draw)
    if family == "one row":
        (far if entries else near).masked_fill_((torch.arange(N) % 2 == 0).unsqueeze(1), -1)
        near.masked_fill_((torch.arange(N) % 2 == 1).unsqueeze(1), -1)
    window = pool(rows_of(family, near_rows, D, draw), form, rope, draw)
    kept = pool(rows_of(family, far_rows, D, draw), form, rope, draw)
    if (
        family == "below every mask"
    ):  # every row is the same unit vector but for noise, so that every logit is near −1.2e4
        far[far < 0], near[near < 0] = 1, 1
        far[:, -1], near[:, -1] = -1, -1
    parts = [exact._listed(window, near)] + ([exact._listed(kept, far)] if entries else [])
    q, sink = queries_of(family, last_of(*parts), W + K * entries, H, scale, draw)
    if family == "below every mask":
        q, window, kept = low(q, window, kept, form, rope, scale, draw)
    given = (kept, far) if entries else (None, None)
    unread = {"window": unlisted(window, near)} | ({"entries": unlisted(kept, far)} if entries else {})
    exempt = {"lower precision": FEW_BITS[family]} if form and family in FEW_BITS else {}
    label = ", ".join((f"{N} queries", "packed" if form else "plain", "" if entries else "window alone")).strip(", ")
    return Case(label, family, (q.to(draw.dtype), window, near, *given, sink, scale, False, 1), unread, exempt)


def sparse_inputs(w, draw, tokens, window, kept, each=0, prompt=False, ascending=True) -> tuple:
    """Full lists of one token of each of so many sequences, into `each` entries of its own, in ascending order as a
    selection has them or in any. prompt: of all tokens of one sequence. window, kept: formats of the pools, 'fp8' or
    plain; kept=None: the window alone."""
    H, D, W, K, rope = w.num_attention_heads, w.head_dim, w.sliding_window, w.index_topk, w.qk_rope_head_dim
    row, slots = (torch.arange(n, device=draw.device) for n in (tokens, W))
    near = row.unsqueeze(1) + slots + 1 if prompt else row.unsqueeze(1) * W + slots
    far, entries = None, None
    if kept:
        far = draw.chosen(each, tokens, K)
        far = (far.sort(-1).values if ascending else far) + (0 if prompt else each * row.unsqueeze(1))
        entries = draw.pool(POOLS.get(kept), each * (1 if prompt else tokens), D, rope)
    rows = draw.pool(POOLS.get(window), tokens + W if prompt else tokens * W, D, rope)
    sink = torch.linspace(-4, 4, H, device=draw.device)
    return draw.act(tokens, H, D), rows, near, entries, far, sink, D**-0.5, True, 1


def sparse_sizes(w) -> dict:
    """Decode steps of CSA layers, whose lists are as long as they can be, and prompts."""
    K, both = w.index_topk, lambda form: dict(window=form, kept=form)
    timed = [dict(tokens=N, **both("fp8"), each=2 * K, ascending=False) for N in (1, 8, 32, 128)]
    timed += [dict(tokens=N, **both("bf16"), each=2 * K, ascending=False) for N in (1, 32)]
    bench = [dict(tokens=B, **both(form), each=8192) for form in ("bf16", "fp8") for B in (1, 8, 64)]
    bench += [dict(tokens=T, **both("bf16"), each=max(K, T // 4), prompt=True) for T in (1024, 4096)]
    compiled = [pair | dict(tokens=N, each=max(K, 65536 // N)) for pair in PAIRS for N in (1, 8, 64, 4096)]
    return {"timed": timed, "bench": bench, "compiled": compiled}


POOLS = {"fp8": RowFormat.KV_FP8}
PAIRS = [
    dict(window=window, kept=kept, dtype=torch.float32 if window == "fp32" else torch.bfloat16)
    for window, kept in (
        *(("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"), ("fp8", "bf16")),
        *(("fp32", "fp32"), ("fp32", "fp8")),
    )
]


def sparse_work(q, window, window_index, entries, entry_index, *rest) -> Work:
    """Every listed row once a query, queries, results and lists; 4·H·D operations a listed row."""
    N, H, D = q.shape
    live = int((window_index >= 0).sum()) + (0 if entry_index is None else int((entry_index >= 0).sum()))
    row = window.layout.row if isinstance(window, PackedRows) else D * window.element_size()
    lists = window_index.numel() + (0 if entry_index is None else entry_index.numel())
    moved = live * row + 2 * q.numel() * q.element_size() + 4 * lists
    return Work(moved, 4 * live * H * D, f"rows·{row} + 2·N·H·D·{q.element_size()} + 4·indices; 4·rows·H·D")


QUERY = (
    Argument("q", ("num_tokens", "num_heads", "head_dim"), "activation", "queries, rotated"),
    Argument("window", ("window_slots", "head_dim"), "rows", "pool of window rows, keys and values at once"),
    Argument("window_index", ("num_tokens", "window_rows"), "int64", "rows of window, −1 anywhere is skipped"),
)
TAIL = (
    Argument("sink", ("num_heads",), "float32", "a logit a head in natural units, not scaled, without a value"),
    Argument("scale", None, "float32", "of q · row"),
    Argument("complete", None, "bool", "no index is −1 and every entry is seen", hint=True),
)
EDGES = (
    "a query whose lists are all −1 gives zeros",
    "−1 may stand anywhere, also before live rows",
    "a row that is listed twice counts twice",
    "sink = −inf means that there is none",
)
SPARSE = Contract(
    "sparse_attention",
    "One softmax over window rows, selected entries and a sink logit without a value.",
    (
        *QUERY,
        Argument("entries", ("entry_slots", "head_dim"), "rows", "pool of compressed entries", optional=True),
        Argument("entry_index", ("num_tokens", "topk"), "int64", "rows of entries, −1 is skipped", optional=True),
        *TAIL,
        Argument("together", None, "int64", "queries of each batch row", hint=True),
    ),
    (Output("out", ("num_tokens", "num_heads", "head_dim"), "activation", "softmax and sums in fp32, one rounding"),),
    partial(exact.sparse, exact.attend),
    {name: partial(exact.sparse, compute) for name, compute in exact.CLASSES.items()},
    sparse_cases,
    sparse_work,
    EDGES,
    {"q": 0, "window_index": 0, "entry_index": 0},
    {"window": "window_index", "entries": "entry_index"},
    production=Production(
        sparse_inputs,
        sparse_sizes,
        lambda tokens, window, **_: f"{tokens} sequences{', plain rows' * (window not in POOLS)}",
    ),
)


def hca_cases(w, draw):
    """One and two rows of a batch, one and three tokens a row, plain and packed entries."""
    for form in (None, RowFormat.KV_FP8):
        for family in FAMILIES[:5]:
            yield _hca_case(family, form, 2, 3, w, draw)
    yield _hca_case("random", RowFormat.KV_FP8, 3, 1, w, draw)


def _hca_case(family, form, B, T, w, draw) -> Case:
    """Each query sees another number of entries: none, one, a page and one more, all."""
    H, D, W, rope = w.num_attention_heads, w.head_dim, w.sliding_window, w.qk_rope_head_dim
    n, scale, near_rows = 2 * PAGE + 5, D**-0.5, 2 * W + 37
    visible = torch.tensor([n, 0, PAGE + 1, PAGE, 1, n - 1]).roll(draw.seed)[: B * T].view(B, T)
    if family == "cancellation":
        visible = visible.clamp(min=PAGE)
    near = lists(family, near_rows, B * T, W, draw)
    window = pool(rows_of(family, near_rows, D, draw), form, rope, draw)
    values = torch.stack([rows_of(family, n, D, draw) for _ in range(B)])
    if family == "cancellation":
        values = values.gather(1, (torch.arange(n) % 2).argsort(stable=True).view(1, n, 1).expand(B, n, D))
    if family == "below every mask":
        values = 1 + 0.02 * torch.randn(values.shape, generator=draw.g)
    kept = pool(values, form, rope, draw)
    plain = doubles(kept).unsqueeze(1).expand(-1, T, -1, -1).flatten(0, 1)
    seen = torch.arange(n) < visible.view(-1, 1)
    q, sink = queries_of(family, last_of(exact._listed(window, near), (plain, seen)), W + n, H, scale, draw)
    if family == "below every mask":
        q, window, _ = low(q, window, window, form, rope, scale, draw)
    unread = {"window": unlisted(window, near), "entries": unseen(kept, visible.amax(1))}
    label = f"{B} rows of {T} tokens, {'packed' if form else 'plain'}"
    exempt = {"lower precision": FEW_BITS[family]} if form and family in FEW_BITS else {}
    arguments = q.to(draw.dtype).view(B, T, H, D), window, near, kept, visible, sink, scale, False
    return Case(label, family, arguments, unread, exempt)


def hca_inputs(w, draw, batch, entries, window, kept, tokens=1) -> tuple:
    """Full windows and as many entries as there are, of every token. window, kept: formats of the pools."""
    H, D, W, rope, N = w.num_attention_heads, w.head_dim, w.sliding_window, w.qk_rope_head_dim, batch * tokens
    near = torch.arange(N * W, device=draw.device).view(N, W)
    rows = draw.pool(POOLS.get(window), N * W, D, rope)
    runs = draw.pool(POOLS.get(kept), entries, D, rope, batch)
    visible = torch.full((batch, tokens), entries, device=draw.device)
    sink = torch.linspace(-4, 4, H, device=draw.device)
    return draw.act(batch, tokens, H, D), rows, near, runs, visible, sink, D**-0.5, True


def hca_sizes(w) -> dict:
    """Decode steps of HCA layers at contexts of 8K to 1M tokens (one entry for 128), and a prompt."""
    both = lambda form: dict(window=form, kept=form)
    timed = [dict(batch=B, entries=n, **both("fp8")) for B, n in ((1, 128), (1, 1024), (32, 128), (32, 1024))]
    bench = [dict(batch=B, entries=n, **both(form)) for form in ("bf16", "fp8") for n in (1024, 8192) for B in (1, 8)]
    shapes = ((1, 1, 64), (1, 1, 8192), (8, 1, 8192), (1, 4096, 1024))
    compiled = [pair | dict(batch=B, tokens=T, entries=n) for pair in PAIRS for B, T, n in shapes]
    return {"timed": timed, "bench": bench, "compiled": compiled}


def hca_work(q, window, window_index, entries, visible, *rest) -> Work:
    """Listed window rows once a query, entries that any query of a row sees once a row."""
    B, T, H, D = q.shape
    row = window.layout.row if isinstance(window, PackedRows) else D * window.element_size()
    near, far = int((window_index >= 0).sum()), int(visible.amax(1).sum()) if visible.numel() else 0
    moved = (near + far) * row + 2 * q.numel() * q.element_size() + 4 * window_index.numel()
    flops = 4 * (near + int(visible.sum())) * H * D
    return Work(moved, flops, f"rows·{row} + 2·B·T·H·D·{q.element_size()} + 4·indices; 4·rows·H·D")


HCA = Contract(
    "hca_attention",
    "One softmax over window rows, every visible entry of the batch row and a sink logit without a value.",
    (
        Argument("q", ("batch", "tokens", "num_heads", "head_dim"), "activation", "queries, rotated"),
        QUERY[1],
        Argument("window_index", ("num_tokens", "window_rows"), "int64", "rows of window, −1 anywhere is skipped"),
        Argument("entries", ("batch", "num_entries", "head_dim"), "rows", "entries of each batch row"),
        Argument("visible", ("batch", "tokens"), "int64", "a query sees entries e < visible; 0 is allowed"),
        *TAIL,
    ),
    (
        Output(
            "out", ("batch", "tokens", "num_heads", "head_dim"), "activation", "softmax and sums in fp32, one rounding"
        ),
    ),
    partial(exact.whole, exact.attend),
    {name: partial(exact.whole, compute) for name, compute in exact.CLASSES.items()},
    hca_cases,
    hca_work,
    EDGES,
    pools={"window": "window_index", "entries": None},
    production=Production(hca_inputs, hca_sizes, lambda batch, entries, **_: f"{batch} sequences, {entries} entries"),
)
CONTRACTS = (SPARSE, HCA)
