"""Staging of tiles from host memory, in plain torch."""

import torch

from dsv4.kernels.block_summaries.reference import summarise_blocks
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.staging.table import OLDEST, Pool, SlotTable


def check_lists(
    table: SlotTable, pools: tuple[Pool, ...], wanted: torch.Tensor, start: torch.Tensor, unit: int, tail: bool
) -> None:
    """Raise UnsupportedInput if a list could need more slots than there are, or if shapes do not fit."""
    (G, slots), n = table.held.shape, wanted.shape[-1]
    if wanted.dtype not in (torch.int32, torch.int64) or wanted.dim() != 2 or wanted.shape[0] != G:
        raise UnsupportedInput(f"fetch takes lists int32 or int64 [{G}, n]; found {wanted.dtype} {tuple(wanted.shape)}")
    if n > slots:
        raise UnsupportedInput(
            f"fetch: lists of {n} items, and a staging buffer of {slots} slots a group; a step needs all that it "
            f"chose at once, so make at least {n}"
        )
    if start.dtype is not torch.int64 or start.dim() != 1 or G % max(1, start.shape[0]) or unit < 1:
        raise UnsupportedInput(
            f"fetch takes start int64 [rows], of which {G} groups are a multiple, and items of at least one token; "
            f"found {start.dtype} {tuple(start.shape)} and {unit}"
        )
    for pool in pools:
        if (
            pool.host.shape[0] != G
            or pool.slots < slots + tail
            or pool.host.shape[1] * pool.host.shape[2] < table.where.shape[1]
        ):
            raise UnsupportedInput(
                f"fetch: a table of {G} groups, {table.where.shape[1]} items and {slots + tail} slots got a pool of "
                f"{tuple(pool.host.shape)} staged in {tuple(pool.staged.shape)}"
            )


def fetch(
    table: SlotTable,
    pools: tuple[Pool, ...],
    wanted: torch.Tensor,
    start: torch.Tensor,
    unit: int,
    tail: bool,
    run: int = 0,
) -> torch.Tensor:
    """Stage the wanted items. Returns [G, n] in wanted's dtype: the slot of each item, −1 where nothing was wanted.

    wanted int32 or int64 [G, n]: items, each at most once, −1 = nothing, n ≤ slots. start int64 [rows], G a multiple of
    rows: a row's tokens from there on are new, so items from since = start // unit on have changed in host memory and
    are unstaged first. tail: item since[row] is being written in the tail slot, number `slots`, and counts neither as a
    hit nor as a miss. Wanted items that a slot holds are hits. Misses are copied from host memory to the least recently
    wanted slots, of equal age the lowest, and never to a slot that is wanted now: in the order of the list, to these
    slots from the lowest on. Slots that were never wanted, or not for 255 fetches, are of equal age. run: slots of
    group g are numbered from g · run on, so that the result addresses one pool of all groups. The host decides nothing:
    only the device knows what is copied. Raises UnsupportedInput.
    """
    check_lists(table, pools, wanted, start, unit, tail)
    G, L = table.held.shape
    since = (start // unit).repeat_interleave(G // len(start)).unsqueeze(1)
    stale = table.held >= since
    table.held.masked_fill_(stale, -1)
    table.used.masked_fill_(stale, 0)
    table.clock.add_(1)
    rest = (wanted >= 0) & ~((wanted == since) & tail)
    found = rest.unsqueeze(2) & (table.held.unsqueeze(1) == wanted.unsqueeze(2))  # [G, n, L]
    hit, now = found.any(2), table.clock.unsqueeze(1)
    table.used.copy_(torch.where(found.any(1), now, table.used))
    miss, age = rest & ~hit, torch.where(table.used == 0, OLDEST, (now - table.used).clamp(max=OLDEST))
    order = age.argsort(dim=1, descending=True, stable=True)
    # [G, L]: as many as there are misses
    free = order.argsort(dim=1) < miss.sum(1, keepdim=True)
    taken = miss.unsqueeze(2) & free.unsqueeze(1) & (miss.cumsum(1).unsqueeze(2) == free.cumsum(1).unsqueeze(1))
    victim = taken.int().argmax(2)
    # [G, L]: of the slots taken
    given = wanted.gather(1, taken.int().argmax(1))
    table.held.copy_(torch.where(taken.any(1), given.int(), table.held))
    table.used.copy_(torch.where(taken.any(1), now, table.used))
    table.count.add_(torch.stack((hit.sum(1), miss.sum(1)), 1))
    for pool in pools:
        _copy(pool, taken.any(1), given.long())
    slot = torch.where(hit, found.int().argmax(2), torch.where(miss, victim, -1))
    slot = torch.where((wanted == since) & (wanted >= 0) & tail, L, slot)
    return torch.where(slot < 0, slot, slot + torch.arange(G, device=slot.device).unsqueeze(1) * run).to(wanted.dtype)


def _copy(pool: Pool, taken: torch.Tensor, item: torch.Tensor) -> None:
    """Copy items [G, slots] to their slots, where there is one to copy."""
    host, staged = pool
    per = host.shape[2]
    group, slot = taken.nonzero(as_tuple=True)
    item = item[group, slot]
    staged[group, slot // per, slot % per] = host[group, item // per, item % per]


def bring(table: SlotTable, pools: tuple[Pool, ...], places: tuple[torch.Tensor, ...], wanted: torch.Tensor) -> None:
    """Copy the wanted items to `places`, item i to place i: from the slot that holds it, or else from host memory.

    wanted int32 or int64 [G, n]: items, each at most once, −1 = nothing. places: of each pool one, of the pool's form
    [G, pages, per, width], with a place for every item. The table is not changed. Raises UnsupportedInput.
    """
    check_places(table, pools, places, wanted)
    found = (wanted >= 0).unsqueeze(2) & (table.held.unsqueeze(1) == wanted.unsqueeze(2))  # [G, n, slots]
    staged, slot = found.any(2), found.int().argmax(2)
    for pool, place in zip(pools, places):
        per = place.shape[2]
        for held, source, number in ((staged, pool.staged, slot), (~staged & (wanted >= 0), pool.host, wanted.long())):
            group, i = held.nonzero(as_tuple=True)
            item, number = wanted[group, i], number[group, i]
            place[group, item // per, item % per] = source[group, number // per, number % per]


def check_places(
    table: SlotTable, pools: tuple[Pool, ...], places: tuple[torch.Tensor, ...], wanted: torch.Tensor
) -> None:
    """Raise UnsupportedInput for lists and places that do not fit the table and the pools."""
    G, items = table.where.shape
    if wanted.dtype not in (torch.int32, torch.int64) or wanted.dim() != 2 or wanted.shape[0] != G:
        raise UnsupportedInput(f"bring takes lists int32 or int64 [{G}, n]; found {wanted.dtype} {tuple(wanted.shape)}")
    if len(places) != len(pools):
        raise UnsupportedInput(f"bring: {len(pools)} pools and {len(places)} places; expected as many")
    for pool, place in zip(pools, places):
        if (
            place.dtype is not pool.host.dtype
            or place.shape[0] != G
            or place.shape[2:] != pool.host.shape[2:]
            or place.shape[1] * place.shape[2] < items
        ):
            raise UnsupportedInput(
                f"bring: items {pool.host.dtype} {tuple(pool.host.shape)} of a table of {items} got places "
                f"{place.dtype} {tuple(place.shape)}; expected one for each, of the same width"
            )


def write_back(
    keys: torch.Tensor,
    values: torch.Tensor,
    host_keys: torch.Tensor,
    host_values: torch.Tensor,
    start: torch.Tensor,
    table: SlotTable,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    mean: torch.Tensor | None,
    block: int,
) -> None:
    """Write the token at start[b] of every row, whose key and value are in row start[b] % block of the tail slot, to
    host memory.

    keys, values [B, KV, (slots + 1) · block, D], the tail slot last; host_keys, host_values [B, KV, S, D]; start int64
    [B]; low, high, mean [B, KV, S / block, D] or None, as in `summarise_blocks`. If the tail slot held another block
    than start[b] // block (a rewind, a prompt), the rows before the token are first read back from host memory. The
    block is summarised.
    """
    (B, KV, S, D), device = host_keys.shape, keys.device
    group, i = torch.arange(B * KV, device=device), torch.arange(block, device=device)
    number, row = (n.repeat_interleave(KV) for n in (start // block, start % block))  # [G]
    tails = []
    for near, far in ((keys, host_keys), (values, host_values)):
        near, far = near.view(B * KV, -1, block, D), far.view(B * KV, -1, block, D)
        back = (table.current != number).unsqueeze(1) & (i < row.unsqueeze(1))
        near[:, -1] = torch.where(back.unsqueeze(2), far[group, number], near[:, -1])
        far[group, number, row] = near[group, -1, row]
        tails.append(near[:, -1])
    table.current.copy_(number)
    kept = [None if t is None else t.new_empty(B, KV, 1, D) for t in (low, high, mean)]
    summarise_blocks(tails[0].reshape(B, KV, block, D), start % block, 1, *kept, block)
    for whole, part in zip((low, high, mean), kept):
        if whole is not None:
            whole.view(B * KV, -1, D)[group, number] = part.view(B * KV, D)
