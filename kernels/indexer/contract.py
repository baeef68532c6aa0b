"""Contracts of `index_scores` and `topk_entries`."""

import torch

from dsv4.kernels.attention.drawn import unseen
from dsv4.kernels.cache_rows import KEY_FORMATS, PAGE, PackedRows, RowFormat
from dsv4.kernels.contract import SET, Argument, Case, Contract, Output, Production, Work, doubles
from dsv4.kernels.honest import fp8_sums
from dsv4.kernels.indexer import reference

FAMILIES = ("random", "coded", "pointed", "integers", "at the edge of ReLU")


def exact_scores(q, weights, keys, visible) -> torch.Tensor:
    """Scores fp64 [B, T, n], one head after another: Σ_h w_h · max(q_h · k, 0)."""
    keys, B, T = doubles(keys), *q.shape[:2]
    total = torch.zeros(B, T, keys.shape[1], dtype=torch.float64)
    for h in range(q.shape[2]):
        dots = torch.einsum("btd,bnd->btn", q[:, :, h].double(), keys)
        total += weights[:, :, h, None].double() * dots.clamp(min=0)
    entry = torch.arange(keys.shape[1])
    return torch.where(entry < visible.unsqueeze(-1), total, float("-inf"))


def rounded_scores(q, weights, keys, visible) -> torch.Tensor:
    """An honest kernel that rounds to bf16 the product of each head, the weights, weighted products and their sum."""
    keys = doubles(keys).float()
    dots = torch.einsum("bthd,bnd->bthn", q.float(), keys).bfloat16().float().relu()
    total = (weights.bfloat16().unsqueeze(-1) * dots).bfloat16().float().sum(2).bfloat16().float()
    return total.masked_fill(torch.arange(keys.shape[1]) >= visible.unsqueeze(-1), float("-inf"))


def fp8_scores(q, weights, keys, visible) -> torch.Tensor:
    """An honest kernel on FP8 tensor cores of Hopper; weights and heads in fp32."""
    keys = doubles(keys)
    total = torch.zeros(*q.shape[:2], keys.shape[1])
    for h in range(q.shape[2]):
        total += weights[:, :, h, None] * fp8_sums(q[:, :, h], keys).relu()
    return total.masked_fill(torch.arange(keys.shape[1]) >= visible.unsqueeze(-1), float("-inf"))


def held_by_fp8(q: torch.Tensor) -> torch.Tensor:
    """Queries that E4M3 holds under a power of two: kernels for FP8 keys take such."""
    return (q / 4).to(torch.float8_e4m3fn).to(q.dtype) * 4


def kind_of(form: RowFormat | None) -> str:
    """Keys of a format, in the words of a case."""
    return "plain" if form is None else f"{form.option.upper()} keys"


def score_cases(w, draw):
    """Plain keys in every family, packed ones in every format, drafts of each length up to eight."""
    for form in (None, *(form for form in KEY_FORMATS if form.fits(w.index_head_dim))):
        for family in FAMILIES:
            if family != "coded" or form is None:
                yield _score_case(family, form, 4, 2, w, draw)
    for T in (1, 3, 8):
        yield _score_case("random", RowFormat.INDEX_FP8, 2, T, w, draw)


def _score_case(family, form, B, T, w, draw) -> Case:
    """Lengths about the ends of pages; each token of a row sees one entry more than the one before it."""
    H, D, n = w.index_n_heads, w.index_head_dim, 3 * PAGE + 7
    last = torch.tensor([n, 0, PAGE, PAGE + 1, PAGE - 1, 1]).roll(draw.seed)[:B]
    visible = (last.unsqueeze(1) - torch.arange(T - 1, -1, -1)).clamp(min=0)
    keys = draw.rand(B, n, D)
    q, weights = draw.rand(B, T, H, D), draw.rand(B, T, H) * H**-0.5
    if family == "coded":
        keys = torch.stack([draw.coded(n, D).float() for _ in range(B)])
    if family == "integers":
        keys, q = draw.integers(-1, 1, B, n, D).float(), draw.integers(-1, 1, B, T, H, D).float()
        weights = draw.integers(-2, 2, B, T, H).float()
    if family == "pointed":  # at the last visible entry, and at the first that is not
        for at, sign in ((visible - 1, 1.0), (visible, 1.0)):
            place = at.clamp(0, n - 1)
            q += sign * keys.gather(1, place.unsqueeze(-1).expand(-1, -1, D)).unsqueeze(2)
    if family == "at the edge of ReLU":  # heads alternate in sign, so that ReLU after the sum shows
        weights = weights.abs() * torch.where(torch.arange(H) % 2 == 0, 1.0, -1.0)
    few = visible.unsqueeze(-1) < 8  # a sum that cancels in a row of few scores would alone set the limit of all
    weights = torch.where(few, weights.abs(), weights)
    q = held_by_fp8(q) if form is RowFormat.INDEX_FP8 else q
    packed = keys.to(draw.dtype) if form is None else draw.packed(form, keys)
    unread = {"keys": unseen(packed, visible.amax(1))}
    kind = kind_of(form)
    exempt = {"lower precision": "whole numbers are exact in FP8 too"} if family == "integers" else {}
    return Case(f"{B} rows of {T} tokens, {kind}", family, (q.to(draw.dtype), weights, packed, visible), unread, exempt)


def score_inputs(w, draw, keys, entries, batch=1, prompt=False, tokens=1) -> tuple:
    """Queries of one token or of a draft that see every entry of their row, or those of a prompt, which see the entries
    before them. keys: a name of KEYS, or plain."""
    H, D, tokens = w.index_n_heads, w.index_head_dim, RATIO * entries if prompt else tokens
    q, weights = draw.rand(batch, tokens, H, D), draw.rand(batch, tokens, H) * H**-0.5
    pool = draw.pool(KEYS.get(keys), entries, D, batch=batch)
    visible = torch.full((batch, tokens), entries, device=draw.device)
    if prompt:
        visible = ((torch.arange(tokens, device=draw.device) + 1) // RATIO).expand(batch, tokens)
    return (held_by_fp8(q) if keys != "bf16" else q).to(draw.dtype), weights, pool, visible


def score_sizes(w) -> dict:
    """One decode step, at contexts of 8K to 1M tokens (one entry for 4), keys in each format."""
    timed = [dict(keys=form, entries=n, batch=B) for form in ("fp8", "fp4") for B, n in STEPS]
    contexts = [(B, n) for B in (1, 8) for n in (SHORT, LONG, LONGEST)]
    bench = [dict(keys=form, entries=n, batch=B) for form in ("fp4", "fp8", "bf16") for B, n in contexts]
    audited = [dict(keys=form, entries=SHORT, dtype=torch.float32) for form in ("fp4", "fp8", "fp32")]
    return {"timed": timed, "bench": bench, "compiled": STEPS_AND_PROMPTS + audited}


RATIO = 4  # tokens of one entry
SHORT, LONG, LONGEST = 2048, 32768, 262144  # entries of 8K, 128K and 1M tokens
STEPS = (1, 4096), (1, LONG), (8, LONG)
KEYS = {form.option: form for form in KEY_FORMATS}
STEPS_AND_PROMPTS = [
    dict(keys=form, entries=SHORT) | step
    for form in (*KEYS, "bf16")
    for step in ({}, dict(tokens=3), dict(prompt=True))
]


def score_work(q, weights, keys, visible) -> Work:
    """Keys that any token of a row sees once a row, queries, weights and scores; 2·H·D + 2·H operations a score."""
    B, T, H, D = q.shape
    row = keys.layout.row if isinstance(keys, PackedRows) else D * keys.element_size()
    seen = int(visible.amax(1).sum()) if visible.numel() else 0
    n = keys.count if isinstance(keys, PackedRows) else keys.shape[1]
    moved = seen * row + q.numel() * q.element_size() + 4 * weights.numel() + 4 * B * T * n
    return Work(
        moved, int(visible.sum()) * H * (2 * D + 2), f"keys·{row} + q·{q.element_size()} + 4·(weights + scores)"
    )


SCORES = Contract(
    "index_scores",
    "Scores of the lightning indexer: score[b, t, e] = Σ_h weights[b, t, h] · relu(q[b, t, h] · key[b, e]).",
    (
        Argument("q", ("batch", "tokens", "index_heads", "index_dim"), "activation", "index queries"),
        Argument("weights", ("batch", "tokens", "index_heads"), "float32", "head weights, scale factors included"),
        Argument("keys", ("batch", "num_entries", "index_dim"), "rows", "one key an entry for all heads"),
        Argument("visible", ("batch", "tokens"), "int64", "a query sees entries e < visible; 0 is allowed"),
    ),
    (Output("scores", ("batch", "tokens", "num_entries"), "float32", "fp32 sums; −inf from visible on"),),
    exact_scores,
    {"fp32": reference.index_scores, "bf16-throughout": rounded_scores, "fp8-sums": fp8_scores},
    score_cases,
    score_work,
    ("a query that sees no entry has −inf everywhere", "tokens of a row see different numbers of entries"),
    {"q": 0, "weights": 0, "keys": 0, "visible": 0},
    {"keys": None},
    production=Production(
        score_inputs, score_sizes, lambda keys, entries, batch: f"{batch} sequences, {entries} {keys.upper()} keys"
    ),
)


def exact_entries(scores, k: int, visible=None) -> torch.Tensor:
    """The k best by a stable sort: among equal scores the lowest entry; −1 where a pick is not visible."""
    scores = scores.double()
    if visible is not None:
        scores = torch.where(torch.arange(scores.shape[-1]) < visible.unsqueeze(-1), scores, float("-inf"))
    order = torch.sort(-scores, dim=-1, stable=True).indices[..., : min(k, scores.shape[-1])]
    return torch.where(scores.gather(-1, order) == float("-inf"), -1, order)


ALIKE = ("all equal", "both zeros", "sorted up", "sorted down")  # families without a draw


def entry_cases(w, draw):
    """Ties, clusters about the kth value, sorted scores, both zeros; fewer entries than k, k, one more, many."""
    k = w.index_topk
    sizes = (k - 1, k, k + 1, 8 * k + 3)
    for n in sizes:
        yield _entry_case("random", draw.rand(2, 3, n), k, draw)
    n = sizes[-1]
    values = {
        "all equal": torch.ones(2, 3, n),
        "ties at the kth": torch.where(draw.rand(2, 3, n) > 1.2, 2.0, 1.0),
        "clusters": 1 + torch.round(draw.rand(2, 3, n) * 4) * 2.0**-23,
        "sorted up": torch.arange(n).float().expand(2, 3, n).clone(),
        "sorted down": -torch.arange(n).float().expand(2, 3, n).clone(),
        "both zeros": torch.where(draw.rand(2, 3, n) > 0, 0.0, -0.0),
        "negative": -draw.rand(2, 3, n).abs() - 1,
    }
    for family, scores in values.items():
        yield _entry_case(family, scores, k, draw)


def _entry_case(family, scores, k, draw) -> Case:
    n = scores.shape[-1]
    visible = torch.tensor([[n, n - 1, n // 2], [0, 1, min(k, n)]])
    hidden = torch.arange(n) >= visible.unsqueeze(-1)
    scores = torch.where(hidden, float("-inf"), scores)
    alike = "any scores have this answer"
    exempt = {"other inputs": alike} if n <= k or family in ALIKE else {}
    return Case(f"{n} entries, the best {k}", family, (scores, k, visible), {"scores": hidden}, exempt)


def entry_inputs(w, draw, entries, batch=1, k=0, limited=True) -> tuple:
    """Scores of one token of each row, all of them visible, which is said or not."""
    visible = torch.full((batch, 1), entries, device=draw.device) if limited else None
    return draw.rand(batch, 1, entries), k or w.index_topk, visible


def entry_sizes(w) -> dict:
    """Selections of one decode step at contexts of 8K to 1M tokens."""
    k, shapes = w.index_topk, ((1, 4096), (1, LONG), (1, 131072), (32, 4096), (32, LONG))
    bench = [dict(entries=n, batch=B, k=k) for B, n in ((1, SHORT), (1, LONG), (1, LONGEST), (8, LONGEST))]
    return {
        "timed": [dict(entries=n, batch=B) for B, n in shapes],
        "bench": [*bench, dict(entries=LONGEST, batch=1, k=2 * k)],
        "compiled": [dict(entries=n, batch=B, k=each) for each, n, B in METHODS] + [dict(entries=SHORT, limited=False)],
    }


# k, entries and rows of each way to select (`triton_choose.plan`), and of each size of what a program holds
METHODS = (
    *((k, n, 1) for k in (64, 512, 1024) for n in (SHORT, LONG, LONGEST, 1 << 20)),
    *(
        (64, 400, 64),
        (300, 400, 64),
        (2100, 4000, 1),
        (17000, 32000, 1),
        (64, LONG, 64),
        (64, 4096, 1),
        (64, 4096, 64),
        (1024, LONGEST, 64),
    ),
    *(
        (512, 4096, 8),
        (512, LONGEST, 8),
        (512, 65536, 16),
        (512, 1 << 20, 2),
        (512, LONG, 64),
        (512, LONGEST, 64),
        (512, LONG, 512),
        (64, LONG, 512),
        (512, 65536, 512),
    ),
    *((4096, 1 << 21, 64), (4096, LONG, 64)),
)


def entry_work(scores, k, visible=None) -> Work:
    """Visible scores once, results as int32."""
    seen = scores.numel() if visible is None else int(visible.sum())
    rows = scores.numel() // max(1, scores.shape[-1])
    return Work(4 * seen + 4 * rows * k, seen, "4·visible scores + 4·rows·k; one comparison a score")


ENTRIES = Contract(
    "topk_entries",
    "The k best entries of each query.",
    (
        Argument("scores", ("batch", "tokens", "num_entries"), "float32", "−inf where invisible"),
        Argument("k", None, "int64", "entries to select"),
        Argument("visible", ("batch", "tokens"), "int64", "scores from there on need not be read", optional=True),
    ),
    (
        Output(
            *("entries", ("batch", "tokens", "topk"), "int64", "entry numbers, −1 where there are fewer"),
            rule=SET,
            liberty="any order; among equal scores the lowest entry wins (class any-of-equals: any of them)",
        ),
    ),
    exact_entries,
    {"lowest": exact_entries, "any-of-equals": exact_entries},
    entry_cases,
    entry_work,
    ("fewer visible entries than k: the rest is −1", "−0.0 and +0.0 are equal"),
    {"scores": 0, "visible": 0},
    production=Production(entry_inputs, entry_sizes, lambda entries, batch: f"{batch} sequences, {entries} scores"),
    dtypes=(torch.float32,),
)
CONTRACTS = (SCORES, ENTRIES)
