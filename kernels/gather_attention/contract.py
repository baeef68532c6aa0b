"""Contract of `gather_attention` without a rule of termination."""

from functools import partial

import torch
import torch.nn.functional as F

from dsv4.kernels.block_choice.policy import block_bounds, page_bounds
from dsv4.kernels.contract import Argument, Case, Contract, Production, Work
from dsv4.kernels.grouped_attention import Termination, exact
from dsv4.kernels.grouped_attention.contract import CACHE, CONTEXTS, LENGTHS, OUT, QUERIES, SCALE, SLOTS, START, WINDOW
from dsv4.kernels.grouped_attention.contract import inputs as full_cache


def cases(w, draw):
    """Every family over lists in any order with holes; single tokens, small and large blocks; a window; one list for
    one token."""
    for family in exact.FAMILIES:
        yield _case(family, (SLOTS - 9, 0), 3, None, 16, 9, w, draw)
    for block, n in ((1, 150), (16, 1), (64, 4), (128, 3)):
        yield _case("random", (SLOTS - 5, 150), 2, None, block, n, w, draw)
    yield _case("pointed", (SLOTS - 5, 150), 3, 40, 16, 9, w, draw)
    yield _case("random", (200,), 1, None, 16, 13, w, draw)


def lists(starts, T: int, block: int, n: int, w, draw) -> torch.Tensor:
    """int32 [B, T, KV, n]: different blocks in no order, the query's own always among them.

    Holes (−1) are at the end, at the start, in the middle, or everywhere but for one; the second query of the first row
    has none but holes.
    """
    B, KV, N = len(starts), exact.sizes(w)[1], SLOTS // block
    index = torch.empty(B, T, KV, n, dtype=torch.int64)
    for i, (b, t, kv) in enumerate(torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(KV)).tolist()):
        own = (starts[b] + t) // block
        others = draw.shuffled(torch.tensor([j for j in range(1, N) if j != own]))[: n - 1]
        others = torch.cat((others, torch.full((n - 1 - len(others),), -1)))
        kind = i % 4
        if kind == 1:
            others[len(others) // 2 :] = -1
        elif kind == 2:
            others[: len(others) // 2] = -1
        elif kind == 3:
            others[len(others) // 3 : -1] = -1
        index[b, t, kv] = (
            draw.shuffled(torch.cat((others, torch.tensor([own]))))
            if i % 2
            else torch.cat((others, torch.tensor([own])))
        )
    if T > 1:
        index[0, 1] = -1
    return index.int()


def _case(family, starts, T, window, block, n, w, draw) -> Case:
    start, D = torch.tensor(starts), exact.sizes(w)[2]
    keys, values = exact.cache(family, len(starts), SLOTS, w, draw)
    q = exact.queries(family, keys, start, T, window, w, draw)
    blocks = lists(starts, T, block, n, w, draw)
    if family == "cancellation":  # blocks of +16, then as many of −16, all of them seen
        start, kept = torch.full_like(start, SLOTS - T), torch.cat((torch.arange(4), torch.arange(4, 8)))
        blocks = torch.cat((kept, torch.full((n - 8,), -1))).int().expand_as(blocks).contiguous()
    unread = unlisted(blocks, start, window, block)
    arguments = *(t.to(draw.dtype) for t in (q, keys, values)), blocks, start, window, D**-0.5, block
    label = (
        f"{len(starts)} rows of {T} tokens, {n} blocks of {block}{'' if window is None else f', window of {window}'}"
    )
    return Case(label, family, arguments, {"keys": unread, "values": unread})


def unlisted(blocks, start, window, block: int) -> torch.Tensor:
    """bool [B, KV, S, 1]: tokens that no query of the row sees by its list."""
    B, T, KV, n = blocks.shape
    place = torch.where(blocks.unsqueeze(-1) < 0, -1, blocks.long().unsqueeze(-1) * block + torch.arange(block))
    place = place.flatten(-2)
    at = torch.where(exact.seen_by(start, T, place, window), place, SLOTS).transpose(1, 2).flatten(2)
    free = torch.ones(B, KV, SLOTS + 1, dtype=torch.bool).scatter_(2, at, False)
    return free[..., :SLOTS].unsqueeze(-1)


def work(q, keys, values, blocks, start, window, scale, block, termination=None) -> Work:
    """Keys and values of the tokens that a query sees, once a query and KV head; 4·G·D operations each."""
    (B, T, H, D), KV = q.shape, keys.shape[1]
    place = torch.where(blocks.unsqueeze(-1) < 0, -1, blocks.long().unsqueeze(-1) * block + torch.arange(block))
    seen = int(exact.seen_by(start, T, place.flatten(-2), window).sum())
    moved = 2 * seen * D * keys.element_size() + 2 * q.numel() * q.element_size() + 4 * blocks.numel()
    return Work(moved, 4 * seen * (H // KV) * D, "2·seen·D·b + 2·B·T·H·D·b + 4·lists; 4·seen·(H / KV)·D")


def inputs(w, draw, slots, block, kept, rule=None) -> tuple:
    """One token that sees `kept` blocks of a full cache, −1 behind them where it has not as many. rule: as in
    `grouped_attention`."""
    q, keys, values, start, window, scale = full_cache(w, draw, slots)
    blocks = draw.chosen(slots // block, keys.shape[1], min(kept, slots // block))
    blocks = F.pad(blocks, (0, kept - blocks.shape[1]), value=-1).int().view(1, 1, -1, kept)
    return q, keys, values, blocks, start, window, scale, block, *(() if rule is None else (rule,))


def sizes(w) -> dict:
    """As of `grouped_attention`: blocks and pages, with a rule and without."""
    shapes = [dict(block=policy.block, kept=policy.kept) for policy in (block_bounds(), page_bounds())]
    rules = {}, dict(rule=Termination())
    shapes += [dict(block=1, kept=4096)]  # tokens that were chosen once
    compiled = [dict(slots=CONTEXTS["128K"]) | shape | rule for shape in shapes for rule in rules]
    return {"compiled": compiled + [dict(slots=S, dtype=t) | shapes[0] | rule for S, t in LENGTHS for rule in rules]}


CONTRACTS = (
    Contract(
        "gather_attention",
        "softmax(scale · q·K)·V over those keys of the listed blocks that a query sees by its position.",
        (
            Argument("q", QUERIES, "activation", "queries, rotated"),
            *CACHE,
            Argument("blocks", ("batch", "tokens", "kv_heads", "listed"), "int32", "each at most once; −1 is nothing"),
            START,
            WINDOW,
            SCALE,
            Argument("block", None, "int64", "tokens of a block"),
        ),
        (OUT,),
        partial(exact.listed, exact.attend),
        {name: partial(exact.listed, compute) for name, compute in exact.CLASSES.items()},
        cases,
        work,
        ("−1 may stand anywhere", "a query that sees no key gives zeros", "a listed block may end behind the query"),
        {"q": 0, "keys": 0, "values": 0, "blocks": 0, "start": 0},
        production=Production(inputs, sizes),
    ),
)
