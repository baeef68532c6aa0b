"""Contract of `choose_blocks`."""

import torch

from dsv4.kernels.block_choice import reference
from dsv4.kernels.block_choice.policy import Policy, block_bounds, block_means, page_bounds, sink_window
from dsv4.kernels.contract import BITS, Argument, Case, Contract, Output, Production, Work
from dsv4.kernels.grouped_attention.contract import LENGTHS
from dsv4.kernels.grouped_attention.exact import sizes

BLOCK, BLOCKS = 16, 24
POLICIES = {
    "sink and window": Policy("sink+window", None, BLOCK, 1, 3),
    "bounds": Policy("bounds", "bound", BLOCK, 1, 2, 5),
    "means": Policy("means", "mean", BLOCK, 1, 2, 5),
    "no sink": Policy("bounds", "bound", BLOCK, 0, 1, 7),
}


def scores(q, kv_heads: int, low, high, mean, policy) -> torch.Tensor:
    """fp64 [B, T, KV, N], one query head after another."""
    held = low if policy.selector == "bound" else mean
    heads, found = q.double().unflatten(2, (kv_heads, -1)), None
    for g in range(heads.shape[3]):
        one = heads[:, :, :, g].unsqueeze(3)
        each = lambda t: one * t.double().unsqueeze(1)
        by_head = torch.maximum(each(low), each(high)).sum(-1) if policy.selector == "bound" else each(held).sum(-1)
        if found is None:
            found = by_head
        else:
            found = torch.maximum(found, by_head) if policy.selector == "bound" else found + by_head
    return found if policy.selector == "bound" else found / heads.shape[3]


def exact(q, kv_heads: int, low, high, mean, start, policy, by_importance=False) -> torch.Tensor:
    """Keep-sets query by query, with a stable sort of fp64 scores."""
    B, T = q.shape[:2]
    by_score = scores(q, kv_heads, low, high, mean, policy) if policy.topk else None
    out = torch.full((B, T, kv_heads, policy.kept), -1)
    for b, t, kv in torch.cartesian_prod(*map(torch.arange, (B, T, kv_heads))).tolist():
        own = (int(start[b]) + t) // policy.block
        kept = [s for s in range(policy.sink) if s <= own]
        kept += [j for j in range(own, own - policy.local, -1) if j >= policy.sink]
        distant = list(range(policy.sink, own - policy.local + 1))
        if policy.topk:
            row = by_score[b, t, kv].tolist()
            kept += sorted(distant, key=lambda j: (-row[j], j))[: policy.topk]
        kept = kept if by_importance else sorted(kept)
        out[b, t, kv, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
    return out


def cases(w, draw):
    """Each policy in both orders: rows that begin, rows whose keep-set is just full, and long ones."""
    for how, policy in POLICIES.items():
        for by_importance in (False, True):
            for family in ("random", "extremes"):
                if policy.selector or family == "random":
                    yield _case(family, how, policy, by_importance, w, draw)


def _case(family, how, policy, by_importance, w, draw) -> Case:
    """extremes: bounds of which the upper decides for positive queries and the lower for negative ones."""
    H, KV, D = sizes(w)
    start = torch.tensor([BLOCK * BLOCKS - 4, 0, BLOCK * 8 - 2, 37])
    B, T = len(start), 3
    for _ in range(20):  # until fp32 sums can tell any two scores
        blocks, q = draw.rand(B, KV, BLOCKS, BLOCK, D), draw.act(B, T, H, D)
        if family == "extremes":
            blocks = blocks * 2.0 ** (torch.arange(BLOCKS) % 5).view(BLOCKS, 1, 1)
        low, high = blocks.amin(3).to(draw.dtype), blocks.amax(3).to(draw.dtype)
        mean = blocks.mean(3).to(draw.dtype)
        if not policy.topk or _apart(scores(q, KV, low, high, mean, policy)):
            break
    held = {"bound": (low, high, None), "mean": (None, None, mean), None: (None, None, None)}[policy.selector]
    label = f"{how}{', by importance' if by_importance else ''}"
    behind = torch.arange(BLOCKS) > ((start + T - 1) // BLOCK - policy.local).unsqueeze(1)
    unread = {
        n: behind.view(B, 1, BLOCKS, 1) for n, t in zip(("low", "high", "mean"), held, strict=True) if t is not None
    }
    exempt = {"lower precision": "differences of scores are rounded as scores are, so that the order survives"}
    return Case(label, family, (q, KV, *held, start, policy, by_importance), unread, exempt)


def _apart(found: torch.Tensor) -> bool:
    """Whether no two scores of a query are within 1e-6 of the largest."""
    ordered = found.sort(-1).values
    return bool((ordered.diff(dim=-1) > 1e-6 * ordered.abs().amax(-1, keepdim=True)).all())


def work(q, kv_heads, low, high, mean, start, policy, by_importance=False) -> Work:
    """Queries, summaries of distant blocks once a row, and lists."""
    B, T, H, D = q.shape
    last = ((start + T - 1) // policy.block - policy.local + 1 - policy.sink).clamp(min=0) if policy.topk else 0 * start
    held = [t for t in (low, high, mean) if t is not None]
    summaries = int(last.sum()) * kv_heads * D * sum(t.element_size() for t in held)
    moved = summaries + q.numel() * q.element_size() + 4 * B * T * kv_heads * policy.kept
    return Work(
        moved, 2 * int(last.sum()) * T * H * D * len(held), "blocks·KV·D·b + B·T·H·D·b + 4·lists; 2·blocks·T·H·D"
    )


def inputs(w, draw, slots, policy, batch=1, by_importance=False) -> tuple:
    """One token at the end of each row, and summaries of every block of its cache."""
    (H, KV, D), shape = sizes(w), (batch, sizes(w)[1], slots // policy.block, sizes(w)[2])
    a, b = draw.large(*shape), draw.large(*shape)
    held, start = (
        (torch.minimum(a, b), torch.maximum(a, b), (a + b) / 2),
        torch.full((batch,), slots - 1, device=draw.device),
    )
    return draw.large(batch, 1, H, D), KV, *held, start, policy, by_importance


def production_sizes(w) -> dict:
    """By the bounds of blocks, at contexts of 128K and 1M tokens, and by those of pages, of which a budget of 0.8 keeps
    many; compiled by every policy."""
    long, longest = 1 << 17, 1 << 20
    each = [dict(slots=long, policy=policy()) for policy in (block_bounds, page_bounds, block_means, sink_window)]
    ranked = [
        dict(slots=S, policy=policy(), by_importance=True)
        for S, policy in ((long, block_bounds), (longest, page_bounds))
    ]
    others = [dict(slots=S, policy=block_bounds(), dtype=dtype) for S, dtype in LENGTHS]
    many = [dict(slots=1 << 15, batch=B, policy=page_bounds(1638 * 16), by_importance=True) for B in (1, 8)]
    return {
        "bench": [dict(slots=S, batch=B, policy=block_bounds()) for S, B in ((long, 1), (longest, 1), (longest, 8))]
        + many,
        "compiled": each + ranked + many[:1] + others,
    }


def score_inputs(w, draw, slots) -> tuple:
    """Of the scores alone, by bounds."""
    q, _, *held, _ = inputs(w, draw, slots, block_bounds())
    return q, *held


# scores alone have no contract: the choice by them is what a model takes
PRODUCTIONS = {"block_scores": Production(score_inputs, lambda w: {"compiled": [dict(slots=1 << 17)]})}
SUMMARIES = ("batch", "kv_heads", "num_blocks", "head_dim")
CONTRACTS = (
    Contract(
        "choose_blocks",
        "The keep-set of every query: the sink blocks, the local blocks and the best distant ones by their summaries.",
        (
            Argument("q", ("batch", "tokens", "num_heads", "head_dim"), "activation", "queries, rotated"),
            Argument("kv_heads", None, "int64", "groups of query heads"),
            Argument("low", SUMMARIES, "activation", "least key of each block, by dims", optional=True),
            Argument("high", SUMMARIES, "activation", "largest key of each block, by dims", optional=True),
            Argument("mean", SUMMARIES, "activation", "mean key of each block", optional=True),
            Argument("start", ("batch",), "int64", "query t of row b stands at start[b] + t"),
            Argument("policy", None, "policy", "block, sink, local, topk and the selector"),
            Argument("by_importance", None, "bool", "sinks, local blocks from the newest, distant by falling score"),
        ),
        (
            Output(
                *("blocks", ("batch", "tokens", "kv_heads", "kept"), "int32", "ascending, −1 at the end"),
                rule=BITS,
                liberty="none: the order is that in which attention adds",
            ),
        ),
        exact,
        {"fp32": reference.choose_blocks},
        cases,
        work,
        ("fewer blocks than the policy keeps: −1 at the end", "of equal scores the lowest block"),
        {"q": 0, "low": 0, "high": 0, "mean": 0, "start": 0},
        production=Production(inputs, production_sizes),
    ),
)
