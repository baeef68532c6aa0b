"""Contract of `grouped_attention` without a rule of termination."""

from functools import partial

import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.grouped_attention import Termination, exact

SLOTS = 384  # of a cache: three blocks of 128


def cases(w, draw):
    """Every family for rows that begin and rows that are long, all keys and windows, one to nine tokens a row."""
    for family in exact.FAMILIES:
        yield _case(family, (0, SLOTS - 7), 3, None, w, draw)
    for family in ("random", "pointed"):
        yield _case(family, (0, SLOTS - 9), 5, 40, w, draw)
    for starts, T in (((0,), 1), ((63, 64, 127), 1), ((SLOTS - 1,), 1), ((0, 118), 9)):
        yield _case("random", starts, T, None, w, draw)
    yield _case("pointed", (128, 5), 1, None, w, draw)
    yield _case("random", (100, 0), 3, 1, w, draw)
    yield _case("random", (0, 0), 33, 16, w, draw)


def _case(family, starts, T, window, w, draw) -> Case:
    start, D = torch.tensor(starts), exact.sizes(w)[2]
    keys, values = exact.cache(family, len(starts), SLOTS, w, draw)
    q = exact.queries(family, keys, start, T, window, w, draw)
    if family == "cancellation":
        start = torch.full_like(start, 255)  # as many tokens of either sign, but for those of the step
    behind = (torch.arange(SLOTS) >= (start + T).unsqueeze(1)).view(len(starts), 1, SLOTS, 1)
    arguments = *(t.to(draw.dtype) for t in (q, keys, values)), start, window, D**-0.5
    label = f"{len(starts)} rows of {T} tokens, {'all keys' if window is None else f'window of {window}'}"
    return Case(label, family, arguments, {"keys": behind, "values": behind})


def work(q, keys, values, start, window, scale, termination=None) -> Work:
    """Keys and values that any query of a row sees once a KV head; 4·H·D operations a key that a query sees."""
    (B, T, H, D), KV = q.shape, keys.shape[1]
    last = start.unsqueeze(1) + torch.arange(T)
    each = last + 1 if window is None else (last + 1).clamp(max=window)
    rows = start + T if window is None else (start + T).clamp(max=window + T - 1)
    moved = 2 * int(rows.sum()) * KV * D * keys.element_size() + 2 * q.numel() * q.element_size()
    return Work(moved, 4 * int(each.sum()) * H * D, "2·keys·KV·D·b + 2·B·T·H·D·b; 4·seen·H·D")


def inputs(w, draw, slots, batch=1, tokens=1, window=None, rule=None) -> tuple:
    """A full cache: the last token of each row stands in its last slot. rule: of termination, which is no argument of
    the contract."""
    H, KV, D = exact.sizes(w)
    q, keys, values = draw.large(batch, tokens, H, D), draw.large(batch, KV, slots, D), draw.large(batch, KV, slots, D)
    start = torch.full((batch,), slots - tokens, device=draw.device)
    return q, keys, values, start, window, D**-0.5, *(() if rule is None else (rule,))


def sizes(w) -> dict:
    """Decode steps at contexts of 8K to 1M tokens; compiled with every way to call at 128K tokens."""
    ways = {}, dict(rule=Termination()), dict(tokens=512), dict(window=1000), dict(tokens=512, window=1000)
    compiled = [dict(slots=CONTEXTS["128K"]) | way for way in ways]
    compiled += [dict(slots=S, dtype=dtype) | way for S, dtype in LENGTHS for way in ways[:3]]
    return {"bench": [dict(slots=S, batch=B) for S in CONTEXTS.values() for B in (1, 8)], "compiled": compiled}


CONTEXTS = {"8K": 1 << 13, "32K": 1 << 15, "128K": 1 << 17, "1M": 1 << 20}
LENGTHS = (1024, torch.bfloat16), (1 << 20, torch.bfloat16), (4096, torch.float32)  # that are compiled too
QUERIES = ("batch", "tokens", "num_heads", "head_dim")
CACHE = (
    Argument("keys", ("batch", "kv_heads", "slots", "head_dim"), "activation", "the token at position p is row p"),
    Argument("values", ("batch", "kv_heads", "slots", "head_dim"), "activation", "likewise"),
)
START = Argument("start", ("batch",), "int64", "query t of row b stands at start[b] + t; its own key is in the cache")
WINDOW = Argument("window", None, "int64", "only the last `window` keys; None: all", optional=True)
SCALE = Argument("scale", None, "float32", "of q · key")
OUT = Output("out", QUERIES, "activation", "softmax and sums in fp32, one rounding")
GROUPED = Contract(
    "grouped_attention",
    "softmax(scale · q·K)·V over the keys up to the query's own position; query head h reads KV head h // (H // KV).",
    (Argument("q", QUERIES, "activation", "queries, rotated"), *CACHE, START, WINDOW, SCALE),
    (OUT,),
    partial(exact.dense, exact.attend),
    {name: partial(exact.dense, compute) for name, compute in exact.CLASSES.items()},
    cases,
    work,
    ("the query at position 0 sees its own key alone", "slots behind the last token hold anything"),
    {"q": 0, "keys": 0, "values": 0, "start": 0},
    production=Production(inputs, sizes),
)
CONTRACTS = (GROUPED,)
