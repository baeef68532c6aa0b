"""What a decode step does between its products: contracts of what is a function of its arguments, and production calls
of all.

`attention_inputs` has no contract: it is `query_heads`, `latent`, `index_queries`, `store_rows` and `pool_entries`,
which have, and `write_rows`, in nested arguments of which most are written. `place` has none: its results are a list of
tables whose number depends on the arguments. `tests/kernels/test_triton_step.py` compares both with their definitions.
"""

import torch

from dsv4.kernels.cache_rows import STREAM_FORMATS
from dsv4.kernels.contract import BITS, Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.fusions import compositions
from dsv4.kernels.fusions.compositions import IndexHeads, Kept, Latents, Windows
from dsv4.kernels.fusions.entries_contract import OVERLAP, compressors
from dsv4.kernels.widths import VOCABULARY

# ---- between maps and attention ---------------------------------------------------------------

KINDS = {"window": (), "CSA": ("CSA", "CSA index"), "HCA": ("HCA",)}  # layer → its compressors
FORMS, KEYS = STREAM_FORMATS["kv"], STREAM_FORMATS["index"]


def layer_inputs(w, draw, kind, batch, tokens=1, cache="fp8", keys="fp4", packed=True, complete=True) -> tuple:
    """A step of one layer. cache, keys: formats of its rows and index keys, packed, or simulated in bf16 rows.
    complete: whether each row ends a window of each compressor."""
    N, D, half = batch * tokens, w.head_dim, w.qk_rope_head_dim // 2
    near = draw.pool(FORMS[cache] if packed else None, 129 * N, D, 2 * half)
    slots = torch.arange(N, device=draw.device) * 129
    coded = {grid: form is not None and form.simulated for grid, form in (("kv", FORMS[cache]), ("key", KEYS[keys]))}
    latents = Latents(draw.act(N, D), draw.act(D), coded["kv"], near, slots)
    index = None
    if kind == "CSA":
        q, weights = draw.act(N, w.index_n_heads, w.index_head_dim), draw.act(N, w.index_n_heads)
        index = IndexHeads(q, weights, (w.index_n_heads * w.index_head_dim) ** -0.5, coded["key"])
    forms = {"kv": FORMS[cache], "key": KEYS[keys]}
    windows = tuple(
        _windows(
            w,
            draw,
            batch,
            tokens,
            ratio,
            width,
            grid if coded[grid] else None,
            forms[grid] if packed else None,
            grid == "kv",
            complete,
        )
        for ratio, width, grid in (compressors(w)[name] for name in KINDS[kind])
    )
    cis = draw.angles(half, N)
    return batch, draw.act(N, w.num_attention_heads, D), cis, w.rms_norm_eps, latents, index, windows


def _windows(w, draw, batch, tokens, ratio, width, simulate, form, turned, complete) -> Windows:
    """Tokens at the front of rings of their own, and the windows that may end there."""
    c, N, new = OVERLAP[ratio], batch * tokens, -(-tokens // ratio)
    S, M, half = c * ratio, batch * new, w.qk_rope_head_dim // 2
    slots = torch.arange(N, device=draw.device) * S
    rows = torch.arange(M * S, device=draw.device).view(M, S)
    return Windows(
        draw.rand(N, 2 * c * width),
        draw.rand(ratio, c * width),
        torch.full((N,), ratio - 1 if complete else 0, device=draw.device),
        draw.rand(N * S, 2 * c * width),
        slots + S - 1,
        rows if complete else torch.full_like(rows, -1),
        torch.full((M,), complete, device=draw.device),
        c,
        draw.act(width),
        draw.angles(half, M),
        simulate,
        draw.pool(form, M, width, 2 * half if turned else 0),
        torch.arange(M, device=draw.device),
    )


def layer_sizes(w) -> dict:
    """Steps that end a window and steps that do not, simulated in bf16; compiled with packed rows, drafts too."""
    bench = [
        dict(kind=kind, batch=B, packed=False, complete=complete)
        for B in (1, 8)
        for kind, names in KINDS.items()
        for complete in ((True, False) if names else (False,))
    ]
    steps = [dict(batch=B, tokens=T) for B, T in ((1, 1), (8, 1), (2, 5))]
    others = [dict(batch=1, cache="fp8" if form else "bf16", keys=name) for name, form in KEYS.items() if name != "fp4"]
    return {"bench": bench, "compiled": [dict(kind=kind) | step for step in steps + others for kind in KINDS]}


# ---- positions --------------------------------------------------------------------------------


def place_inputs(w, draw, batch, tokens, context=8192) -> tuple:
    """Rows at any positions of a cache for so many tokens."""
    frequencies = tuple(draw.uniform(0, 1, w.qk_rope_head_dim // 2) for _ in range(2))
    kept = tuple(Kept(r, c, 128 + c * r, (context // r,)) for r, c in OVERLAP.items())
    return draw.below(context - tokens, batch), tokens, frequencies, (w.sliding_window, 2 * w.sliding_window), kept


# ---- embedded tokens --------------------------------------------------------------------------


def embed_exact(ids, table, streams: int, dtype) -> torch.Tensor:
    """Row by row."""
    return torch.stack([torch.stack([table[i].double()] * streams) for i in ids.tolist()])


def embed_cases(w, draw):
    """Ids at both ends of the table, the same one twice, tables in both dtypes."""
    for vocab, N, table in ((97, 7, draw.act(97, w.hidden_size)), (33, 1, draw.coded(33, w.hidden_size))):
        ids = draw.below(vocab, N)
        ids[-1], ids[0] = 0, vocab - 1
        yield Case(f"{N} tokens of {vocab}", "random", (ids, table, w.hc_mult, draw.dtype))
    ids = torch.tensor([5, 5, 0, 96])
    yield Case("a token twice", "repeated", (ids, draw.act(97, w.hidden_size), w.hc_mult, draw.dtype))


def embed_work(ids, table, streams, dtype) -> Work:
    size, N, d = table.element_size(), len(ids), table.shape[1]
    return Work(N * d * size * (1 + streams) + 8 * N, 0, "N·d·b·(1 + streams) + 8·N; 0")


def embed_inputs(w, draw, tokens) -> tuple:
    return draw.below(VOCABULARY, tokens), draw.large(VOCABULARY, w.hidden_size), w.hc_mult, draw.dtype


EMBED = Contract(
    "embed_streams",
    "Rows of the embedding, each as often as there are streams.",
    (
        Argument("ids", ("num_tokens",), "int64", "rows of the table"),
        Argument("table", ("vocabulary", "hidden"), "activation", "the embedding"),
        Argument("streams", None, "int64", "copies of each row"),
        Argument("dtype", None, "dtype", "of the result"),
    ),
    (Output("streams", ("num_tokens", "streams", "hidden"), "activation", "bits of the table", BITS),),
    embed_exact,
    {"bits": lambda *arguments: compositions.embed_streams(None, *arguments)},
    embed_cases,
    embed_work,
    ("an id outside of the table does not occur",),
    {"ids": 0},
    production=Production(embed_inputs, lambda w: {"compiled": [dict(tokens=N) for N in (1, 8)]}),
)


# ---- rows of chosen entries -------------------------------------------------------------------


def rows_exact(entry, run: int) -> torch.Tensor:
    """Number by number."""
    rows = [[[e + b * run if e >= 0 else -1 for e in each] for each in row] for b, row in enumerate(entry.tolist())]
    return torch.tensor(rows, dtype=torch.int64).view(-1, entry.shape[2])


def rows_cases(w, draw):
    """Several rows and one, absent entries anywhere, runs longer than 2^31 rows together."""
    for B, T, K, run in ((3, 2, 33, 64), (1, 3, 16, 64), (4, 1, w.index_topk, 1 << 30), (2, 1, 1, 7)):
        entry = draw.below(min(run, 1 << 20), B, T, K)
        entry[draw.uniform(0, 1, B, T, K) < 0.3] = -1
        entry[0, 0, 0] = 0
        yield Case(f"{B} rows of {T} tokens, {K} entries", "random", (entry, run))


def rows_work(entry, run) -> Work:
    return Work(16 * entry.numel(), entry.numel(), "16·B·T·K; one sum an entry")


def rows_inputs(w, draw, batch, entries=2048) -> tuple:
    return draw.below(entries, batch, 1, w.index_topk), entries


ROWS = Contract(
    "chosen_rows",
    "Entries of each batch row as rows of one pool, in which their runs lie one after another.",
    (
        Argument("entry", ("batch", "tokens", "topk"), "int64", "entries of their own batch row, −1 is absent"),
        Argument("run", None, "int64", "entries of each batch row"),
    ),
    (Output("rows", ("num_tokens", "topk"), "int64", "entry + b·run, −1 where absent", BITS),),
    rows_exact,
    {"bits": lambda *arguments: compositions.chosen_rows(None, *arguments)},
    rows_cases,
    rows_work,
    ("with one batch row the result may be a view of the entries",),
    production=Production(rows_inputs, lambda w: {"compiled": [dict(batch=8)]}),
)
CONTRACTS = (EMBED, ROWS)
PRODUCTIONS = {
    "attention_inputs": Production(layer_inputs, layer_sizes),
    "place": Production(place_inputs, lambda w: {"compiled": [dict(batch=8, tokens=T) for T in (1, 5)]}),
}
