"""Bytes that one step of a GQA model reads of its cache, counted by what the operations' outputs depend on."""

from collections import Counter

import torch

from dsv4.kernels.block_choice import Policy, dense
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.numerics import Numerics
from dsv4.probes.scenes.cost_audit.mistakes import Mistakes
from dsv4.probes.scenes.cost_audit.watching import Called, Calls, changed, row_bytes

OPERATIONS = ("grouped_attention", "gather_attention", "choose_blocks")
BOOST = 1e4  # of a summary, so that its block becomes the best


def counted(watched: Calls, calls: list[Called], tokens: int) -> dict[str, int]:
    """Part → bytes of all layers. Attention is examined in one layer of each kind (operation, window); the others count
    like it."""
    found, known = Counter(), {}
    for call in calls:
        kind = (
            call.name,
            None if call.name == "choose_blocks" else call.given[5 if call.name == "gather_attention" else 4],
        )
        if kind not in known:
            known[kind] = (
                _summaries(watched, call) if call.name == "choose_blocks" else _attention(watched, call, tokens)
            )
        found.update(known[kind])
    return dict(found)


def _attention(watched: Calls, call: Called, tokens: int) -> dict[str, int]:
    real, (q, keys, values) = watched.real[call.name], call.given[:3]
    asked = (torch.zeros_like(q), *call.given[1:])  # every visible row has equal weight
    return {
        "keys": _keys(real, asked, tokens) * row_bytes(keys),
        "values": _values(real, asked) * row_bytes(values),
        "queries and outputs": q.nbytes + call.out.nbytes,
    }


def _keys(real, given: tuple, tokens: int) -> int:
    """The number of keys, over all heads and rows of the batch, that turn only their head's outputs into NaN when lost.

    The cache holds NaN beyond its tokens: if one of those were read, every row would count.
    """
    pool = given[1].clone(memory_format=torch.contiguous_format)
    KV, count = pool.shape[1], 0
    for s in range(tokens):
        held = pool[:, :, s].clone()
        pool[:, :, s] = float("nan")
        count += int(real(given[0], pool, *given[2:]).isnan().unflatten(2, (KV, -1)).flatten(3).any(-1).sum())
        pool[:, :, s] = held
    return count


def _values(real, given: tuple) -> int:
    """The number of values, over all heads and rows of the batch, that outputs depend on: D values at a time are a one
    in a channel of their own, and all others zero."""
    B, KV, S, D = given[2].shape
    count = 0
    for first in range(0, S, D):
        width = min(D, S - first)
        pool = torch.zeros_like(given[2], memory_format=torch.contiguous_format)
        pool[:, :, first : first + width] = torch.eye(width, D, dtype=pool.dtype, device=pool.device)
        count += int((real(*given[:2], pool, *given[3:]) != 0).unflatten(2, (KV, -1)).any(3).sum())
    return count


def _summaries(watched: Calls, call: Called) -> dict[str, int]:
    """The number of vectors that, made large, bring their block to the head of the distant ones: those that are
    scored."""
    q, KV, policy = call.given[0], call.given[1], call.given[6]
    middle = q.unflatten(2, (KV, -1)).mean(3)[:, 0].sign()  # [B, KV, D]
    size = 0
    for at, large in ((2, -torch.ones_like(middle)), (3, torch.ones_like(middle)), (4, middle)):
        if call.given[at] is None or policy.selector is None:
            continue
        pool = call.given[at].clone(memory_format=torch.contiguous_format)
        given = (*changed(call.given, at, pool)[:7], True)
        for n in range(pool.shape[2]):
            held = pool[:, :, n].clone()
            pool[:, :, n] = BOOST * large.to(pool.dtype)
            best = watched.real["choose_blocks"](*given)[:, 0, :, policy.sink + policy.local]
            size += int((best == n).sum()) * row_bytes(pool)
            pool[:, :, n] = held
    return {"block summaries": size}


def mistakes(c: GQAConfig, numerics: Numerics, batch: int, context: int, policy: Policy = dense()) -> Mistakes:
    """Of the attention of a step at `context` tokens a row."""
    vector, block = batch * c.head_dim * numerics.cache.itemsize, policy.block
    blocks, full = -(-context // block), sum(w is None for w in c.windows)
    kept = context if policy.dense else min(context, (min(policy.kept, blocks) - 1) * block + (context - 1) % block + 1)
    whole = context if policy.dense else min(policy.kept, blocks) * block
    near = sum(min(w, context) for w in c.windows if w is not None)
    KV, H = c.num_key_value_heads, c.num_attention_heads
    rows = {
        "not counted": 0,
        "query heads in place of KV heads": H * (full * kept + near),
        "the whole context": KV * (full * context + near),
        "whole blocks": KV * (full * whole + near),
        "whole blocks, as far as there is a context": KV * (full * min(whole, context) + near),
        "windows ignored": KV * (full * kept + (len(c.windows) - full) * context),
        "keys and values together": 2 * KV * (full * kept + near),
    }
    distant = max(0, blocks - policy.sink - policy.local)
    vectors = {"bound": 2, "mean": 1, None: 0}[policy.selector] * KV * full
    summaries = {
        "not counted": 0,
        "every block": vectors * blocks,
        "one vector of two": vectors // 2 * distant,
        "two vectors of one": 2 * vectors * distant,
        "query heads in place of KV heads": vectors * distant * H // KV,
    }
    sized = lambda causes: {cause: n * vector for cause, n in causes.items()}
    return {"keys": sized(rows), "values": sized(rows), "block summaries": sized(summaries)}
