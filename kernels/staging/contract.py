"""Calls of staging at production sizes. There are no contracts: a call moves items between two memories and updates a
`SlotTable`, which is its state; `tests/kernels/test_triton_staging.py` compares all of it with a simulation."""

import torch

from dsv4.kernels.cache_rows import RowFormat
from dsv4.kernels.contract import Production
from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.staging.table import Pool, items_of, new_table, paired


def fetch_inputs(w, draw, **shape) -> tuple:
    """Of a GQA model blocks of keys and values, of a V4 model entries, or experts."""
    if "experts" in shape:
        return _experts(w, draw, **shape)
    return (_blocks if w.num_key_value_heads else _entries)(w, draw, **shape)


def _blocks(w, draw, listed, slots, block, context=1 << 17) -> tuple:
    """Blocks of keys and values of each KV head of one row, of which the last is being written."""
    (_, KV, D), items = sizes(w), context // block
    rows = lambda blocks: items_of(draw.large(1, KV, blocks * block, D), block)
    pools = tuple(paired(rows(items), rows(slots + 1)) for _ in range(2))
    return _fetched(draw, KV, pools, items, listed, slots, block, True)


def _entries(w, draw, listed, slots, form=None, entries=1 << 15) -> tuple:
    """Entries of one row of a V4 model, plain or packed."""
    there, here = (draw.pool(form, n, w.head_dim, w.qk_rope_head_dim, 1) for n in (entries, slots))
    if form is None:
        pools = (paired(items_of(there, 1), items_of(here, 1)),)
    else:
        pools = tuple(paired(getattr(there, part), getattr(here, part)) for part in ("payload", "scales"))
    return _fetched(draw, 1, pools, entries, listed, slots, 4, False)


def _experts(w, draw, listed, slots, experts=8) -> tuple:
    """Experts in MXFP4, of which each part is an item of a pool."""
    pools = expert_pools(w, draw.device, experts, slots)
    return _fetched(draw, 1, pools, experts, listed, slots, 1, False)


def expert_pools(w, device, experts: int, slots: int) -> tuple[Pool, ...]:
    """The codes of w13 and of w2, and their scales."""
    d, I = w.hidden_size, w.moe_intermediate_size
    rows = lambda n, width: torch.zeros(1, n, 1, width, dtype=torch.uint8, device=device)
    sizes = I * d, d * I // 2, 2 * I * d // 32, d * I // 32
    return tuple(paired(rows(experts, n), rows(slots, n)) for n in sizes)


def bring_inputs(w, draw, listed, slots, experts=8) -> tuple:
    """Every chosen expert of a layer, of which the first `slots` are in slots."""
    table, pools, wanted, *_ = _experts(w, draw, listed, slots, experts)
    places = tuple(torch.zeros_like(pool.host) for pool in pools)
    return table, pools, places, wanted


def _fetched(draw, groups: int, pools: tuple[Pool, ...], items: int, listed: int, slots: int, unit: int, tail) -> tuple:
    """Arguments of `fetch`: lists of any items, at the end of a full cache of which no slot holds anything."""
    start = torch.full((1,), items * unit - 1, device=draw.device)
    table = new_table(groups, items, slots, draw.device)
    return table, pools, draw.chosen(items, groups, listed).int(), start, unit, tail


def write_inputs(w, draw, block, extremes, pooled, slots=64, context=1 << 17) -> tuple:
    """The token at the end of a full cache of one row. extremes, pooled: summaries that are kept."""
    (_, KV, D), items = sizes(w), context // block
    near, far = ([draw.large(1, KV, n * block, D) for _ in range(2)] for n in (slots + 1, items))
    low, high, mean = (draw.large(1, KV, items, D) if kept else None for kept in (extremes, extremes, pooled))
    start = torch.full((1,), context - 1, device=draw.device)
    return *near, *far, start, new_table(KV, items, slots, draw.device), low, high, mean, block


def written_sizes(w) -> dict:
    """What policies keep of blocks and of pages, in both dtypes."""
    kept = ((128, True, False), (128, False, True), (16, True, False), (128, False, False))
    return {
        "compiled": [
            dict(block=block, extremes=extremes, pooled=pooled, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float32)
            for block, extremes, pooled in kept
        ]
    }


BLOCKS = [dict(listed=n, slots=s, block=b) for n, s, b in ((32, 64, 128), (32, 256, 128), (256, 1024, 16))]
ENTRIES = [dict(listed=512, slots=s, form=form) for s in (1024, 4096) for form in (None, RowFormat.KV_FP8)]
EXPERTS = [dict(listed=6, slots=7, experts=8)]
CONTRACTS = ()
PRODUCTIONS = {
    "fetch": Production(fetch_inputs, lambda w: {"compiled": BLOCKS if w.num_key_value_heads else ENTRIES + EXPERTS}),
    "bring": Production(bring_inputs, lambda w: {"compiled": EXPERTS}),
    "write_back": Production(write_inputs, written_sizes),
}
