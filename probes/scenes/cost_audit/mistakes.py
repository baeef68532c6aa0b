"""The bytes of a cost model that makes one known mistake, to explain a wrong one: part → cause → bytes."""

import re
from collections import Counter

from dsv4.cost_model.step import GROUPS, Tensors
from dsv4.kernels.block_choice import Policy, dense
from dsv4.loaders.write import tensor_bytes
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.numerics import Numerics
from dsv4.probes.oracle import kinds

Mistakes = dict[str, dict[str, int]]


def weight_mistakes(tensors: Tensors, config: ModelConfig | GQAConfig, rows: int) -> Mistakes:
    stored: Counter = Counter()
    for name, (dtype, shape) in tensors.items():
        stored[next(part for pattern, part in GROUPS if re.fullmatch(pattern, name)) or "drafts"] += tensor_bytes(
            dtype, shape
        )
    head = stored["output head"] or stored["embedding"]
    return {
        "embedding": {"not read": 0, "counted whole": stored["embedding"]},
        "output head": {"not read": 0, "counted twice": 2 * head},
        "routed experts": {"not read": 0, "every expert": stored["routed experts"]},
        "hash tables": {"not read": 0, "counted whole": stored["hash tables"]},
        "layers and norms": {"not read": 0, "drafts counted": stored["layers and norms"] + stored["drafts"]},
    }


def attention_mistakes(
    config: ModelConfig | GQAConfig, numerics: Numerics, batch: int, context: int, policy: Policy = dense()
) -> Mistakes:
    if isinstance(config, GQAConfig):
        return _grouped(config, numerics, batch, context, policy)
    return _latents(config, numerics, batch, context)


def _grouped(c: GQAConfig, numerics: Numerics, batch: int, context: int, policy: Policy) -> Mistakes:
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


def _latents(c: ModelConfig, numerics: Numerics, batch: int, context: int) -> Mistakes:
    plain = numerics.cache.itemsize
    row, key = (batch * plain * dims for dims in (c.head_dim, c.index_head_dim))
    csa, hca, every = (c.compress_ratios.count(kinds.CSA), c.compress_ratios.count(kinds.HCA), len(c.compress_ratios))
    seen, W, k = context // kinds.CSA, min(c.sliding_window, context), c.index_topk
    sized = lambda size, causes: {cause: n * size for cause, n in causes.items()}
    return {
        "window": sized(
            row,
            {
                "not counted": 0,
                "the whole context": every * context,
                "a window that is not full": every * c.sliding_window,
                "rows as plain numbers": every * W,
            },
        ),
        "csa entries": sized(
            row,
            {
                "not counted": 0,
                "every entry": csa * seen,
                "windows that are not complete": csa * min(k, -(-context // kinds.CSA)),
                "at HCA's ratio": csa * min(k, context // 128),
                "rows as plain numbers": csa * min(k, seen),
            },
        ),
        "hca entries": sized(
            row,
            {
                "not counted": 0,
                "at CSA's ratio": hca * seen,
                "at CSA's ratio, and of them the best": hca * min(k, seen),
                "windows that are not complete": hca * -(-context // 128),
                "rows as plain numbers": hca * (context // 128),
            },
        ),
        "index keys": sized(
            key,
            {
                "not counted": 0,
                "scored where nothing is to be chosen" if seen <= k else "keys as plain numbers": csa * seen,
                "windows that are not complete": csa * -(-context // kinds.CSA),
            },
        ),
    }
