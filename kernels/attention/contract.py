"""Contracts of `sparse_attention` and `hca_attention`."""

import math
from functools import partial

import torch

from dsv4.kernels.attention import exact
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat
from dsv4.kernels.contract import Argument, Case, Contract, Output, Work, doubles

FAMILIES = ("random", "small rows", "pointed", "cancellation", "below every mask", "one row", "rotated part")


FEW_BITS = {  # families whose packed rows, in FP8 already, leave a rounded query nothing to show in
    "one row": "the result is one row",
    "small rows": "logits are near zero whatever the query",
    "cancellation": "q is zero",
    "below every mask": "q is one number, and all logits move alike",
}


def rows_of(family: str, n: int, D: int, draw) -> torch.Tensor:
    """fp32 [n, D]: what the pools of a family hold."""
    rows = draw.rand(n, D)
    if family == "small rows":
        return 0.1 * rows
    if family == "cancellation":  # +a and −a in the two halves of every list, see `lists`
        return rows + torch.where(torch.arange(n) % 2 == 0, 16.0, -16.0).unsqueeze(1)
    return rows


def queries_of(family: str, last: torch.Tensor, K: int, H: int, scale: float, draw) -> tuple:
    """(q fp32 [N, H, D], sink fp32 [H]) for queries whose last live row is `last` [N, D] of K.

    pointed: the last live row and the sink weigh as much as all other rows together. cancellation: q = 0, so that all
    rows weigh the same. below every mask: all logits near −1.2e4, where a mask of −1e4 would win. rotated part: the
    last dims alone decide."""
    N, D = last.shape
    sink = draw.shuffled(torch.linspace(-4, 4, H))
    noise = draw.rand(N, H, D)
    unit = last / last.square().sum(-1, keepdim=True).clamp(min=1e-6)
    aim = lambda logit: (unit * (logit / scale)).unsqueeze(1)
    if family == "pointed":
        want = torch.full((H,), math.log(max(K, 2)))
        return aim(math.log(max(K, 2))) + 0.05 * noise, want
    if family == "cancellation":
        return torch.zeros(N, H, D), sink
    if family == "below every mask":
        return noise, torch.full((H,), -1.2e4)
    if family == "one row":
        return noise, torch.full((H,), float("-inf"))
    if family == "rotated part":
        return torch.cat((0.01 * noise[..., : D // 2], 3 * noise[..., D // 2 :]), -1), sink
    return noise, sink


def lists(family: str, n: int, N: int, K: int, draw) -> torch.Tensor:
    """int64 [N, K]: rows below n, each list with its own holes.

    Row 0 of the pool is never listed, so that a −1 that is gathered as row 0 brings in something. Query 0 has no hole,
    the next ones have −1 at the end, at the start, in the middle, everywhere, everywhere but at the last place, and one
    row twice."""
    index = 1 + draw.choose(n - 1, N, K) if n > K else 1 + draw.below(n - 1, N, K)
    if family == "cancellation":  # even rows first, so that sums grow before they cancel
        index = index.gather(1, (index % 2).argsort(dim=1, stable=True))
    holes = (
        lambda row: row,
        lambda row: torch.cat((row[: K // 2 + 1], torch.full((K - K // 2 - 1,), -1))),
        lambda row: torch.cat((torch.full((K // 3,), -1), row[K // 3 :])),
        lambda row: torch.where((torch.arange(K) // max(1, K // 5)) % 2 == 1, -1, row),
        lambda row: torch.full((K,), -1),
        lambda row: torch.where(torch.arange(K) < K - 1, -1, row),
        lambda row: torch.cat((row[:-1], row[:1])),
    )
    for i in range(N):
        if family != "cancellation":
            index[i] = holes[(i + draw.seed) % len(holes)](index[i])
        if family == "one row":
            index[i] = torch.where(torch.arange(K) == (7 * i) % K, 1 + (3 * i) % (n - 1), -1)
    return index


def last_of(*parts) -> torch.Tensor:
    """The last live row fp32 [N, D] of lists (rows [N, K, D], present [N, K])…; zeros of an empty one."""
    found = None
    for rows, present in parts:
        at = (present.long() * (1 + torch.arange(present.shape[1]))).amax(1)
        row = rows[torch.arange(len(rows)), (at - 1).clamp(min=0)].float()
        found = row if found is None else torch.where((at > 0).unsqueeze(1), row, found)
    return found


def pool(values: torch.Tensor, form, rope: int, draw):
    """Rows fp32 [n, D] in the activations' dtype, or packed."""
    return values.to(draw.dtype) if form is None else draw.packed(form, values, rope)


def unlisted(rows, *indices: torch.Tensor) -> torch.Tensor:
    """What of a pool no list names: bool mask over rows [R, 1], or over the bytes of packed pages."""
    if isinstance(rows, PackedRows):
        return bytes_outside(rows, torch.cat([i.flatten() for i in indices]))
    free = torch.ones(len(rows), 1, dtype=torch.bool)
    for index in indices:
        free[index[index >= 0]] = False
    return free


def bytes_outside(rows: PackedRows, listed: torch.Tensor) -> torch.Tensor:
    """bool like `data`: bytes of rows of a flat pool that are not listed, and the padding of pages."""
    free = rows._replace(data=torch.ones_like(rows.data))
    live = listed[listed >= 0]
    free.payload[live // PAGE, live % PAGE] = 0
    free.scales[live // PAGE, live % PAGE] = 0
    return free.data.bool()


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
        q, window, kept = _low(q, window, kept, form, rope, scale, draw)
    given = (kept, far) if entries else (None, None)
    unread = {"window": unlisted(window, near)} | ({"entries": unlisted(kept, far)} if entries else {})
    exempt = {"lower precision": FEW_BITS[family]} if form and family in FEW_BITS else {}
    label = ", ".join((f"{N} queries", "packed" if form else "plain", "" if entries else "window alone")).strip(", ")
    return Case(label, family, (q.to(draw.dtype), window, near, *given, sink, scale, False, 1), unread, exempt)


def _low(q, window, kept, form, rope, scale, draw):
    """Queries and pools with q·row·scale ≈ −1.2e4 ± 1: row = 1 + noise, q = −a + noise."""
    D = q.shape[-1]
    plain = [1 + 0.02 * torch.randn(len(doubles(p)), D, generator=draw.g) for p in (window, kept)]
    low = torch.full_like(q, -1.2e4 / scale / D)
    return low, *(pool(p, form, rope, draw) for p in plain)


def sparse_timed(w, draw):
    """One decode step of a CSA layer: full lists into the rows of each sequence, packed, and plain where those of a few
    sequences fit."""
    H, D, W, K, rope = w.num_attention_heads, w.head_dim, w.sliding_window, w.index_topk, w.qk_rope_head_dim
    for form, N in (*((RowFormat.KV_FP8, N) for N in (1, 8, 32, 128)), (None, 1), (None, 32)):
        each = 2 * K
        near = torch.arange(W) + W * torch.arange(N).unsqueeze(1)
        far = draw.choose(each, N, K) + each * torch.arange(N).unsqueeze(1)
        window, entries = (pool(draw.rand(n, D), form, rope, draw) for n in (N * W, N * each))
        sink = draw.shuffled(torch.linspace(-4, 4, H))
        label = f"{N} sequences" if form else f"{N} sequences, plain rows"
        yield Case(label, "timed", (draw.act(N, H, D), window, near, entries, far, sink, D**-0.5, True, 1))


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
    timed=sparse_timed,
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
        q, window, _ = _low(q, window, window, form, rope, scale, draw)
    unread = {"window": unlisted(window, near), "entries": unseen(kept, visible.amax(1))}
    label = f"{B} rows of {T} tokens, {'packed' if form else 'plain'}"
    exempt = {"lower precision": FEW_BITS[family]} if form and family in FEW_BITS else {}
    arguments = q.to(draw.dtype).view(B, T, H, D), window, near, kept, visible, sink, scale, False
    return Case(label, family, arguments, unread, exempt)


def unseen(rows, live: torch.Tensor) -> torch.Tensor:
    """What of the entries of a batch no query of the row sees: bool mask over [B, n, 1] or over packed bytes; live
    [B]."""
    if not isinstance(rows, PackedRows):
        return (torch.arange(rows.shape[1]) >= live.unsqueeze(1)).unsqueeze(-1)
    runs = [bytes_outside(rows._replace(data=run), torch.arange(int(n))) for run, n in zip(rows.data, live)]
    return torch.stack(runs)


def hca_timed(w, draw):
    """One decode step of an HCA layer at contexts of 16K and 128K tokens (one entry for 128), packed."""
    H, D, W = w.num_attention_heads, w.head_dim, w.sliding_window
    for B, n in ((1, 128), (1, 1024), (32, 128), (32, 1024)):
        near = torch.arange(W) + W * torch.arange(B).unsqueeze(1)
        window = draw.packed(RowFormat.KV_FP8, draw.rand(B * W, D), w.qk_rope_head_dim)
        entries = draw.packed(RowFormat.KV_FP8, draw.rand(B, n, D), w.qk_rope_head_dim)
        visible, sink = torch.full((B, 1), n), draw.shuffled(torch.linspace(-4, 4, H))
        arguments = draw.act(B, 1, H, D), window, near, entries, visible, sink, D**-0.5, True
        yield Case(f"{B} sequences, {n} entries", "timed", arguments)


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
    timed=hca_timed,
)
CONTRACTS = (SPARSE, HCA)
