"""Staging of tiles from host memory on a GPU: kernels read and write the mapped pages themselves.

`host` tensors are CUDA tensors over pinned pages of the host (dsv4.cache.host_tier.memory). No copy engine is used,
because a copy's source would have to be known when the graph is captured. Programs of misses read over the link, those
of hits end at once.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, widen
from dsv4.kernels.staging import reference
from dsv4.kernels.staging.table import OLDEST, Pool, SlotTable

CHUNK = 1024  # words that a program copies: 8 KB, as 16 B loads of 128 threads, four each in flight
CHANNELS = 64  # numbers that a program of `write_back` holds at a time
LARGEST = 1 << 8  # tokens of a block
LISTED = 1 << 12  # wanted items, and slots, of a group


def fetch(
    table: SlotTable,
    pools: tuple[Pool, ...],
    wanted: torch.Tensor,
    start: torch.Tensor,
    unit: int,
    tail: bool,
    run: int = 0,
) -> torch.Tensor:
    """Computes what the reference does, for up to 4096 slots a group. A step of a layer pays one launch for the search,
    and one for the missing bytes of each two pools."""
    require_device("fetch", *table, wanted, start, *(t for pool in pools for t in pool))
    reference.check_lists(table, pools, wanted, start, unit, tail)
    (G, n), slots = wanted.shape, table.held.shape[1]
    if slots > LISTED or not pools:
        raise UnsupportedInput(f"fetch takes up to {LISTED} slots and at least a pool; found {slots} and {len(pools)}")
    wanted, pdl = wanted.contiguous(), dependent_launch(wanted.device)
    found, missing = torch.empty_like(wanted), torch.empty(G, n, dtype=torch.int32, device=wanted.device)
    if not n or not G:
        return found
    size = max(16, next_power(n)), max(16, next_power(slots))
    _place[(G,)](
        wanted,
        start,
        table.held,
        table.used,
        table.clock,
        table.count,
        table.where,
        table.order,
        found,
        missing,
        G // start.shape[0],
        unit,
        n,
        slots,
        table.where.shape[1],
        run,
        *size,
        tail,
        OLDEST,
        pdl,
        num_warps=place_warps(max(size)),
        launch_pdl=pdl,
    )
    for at in range(0, len(pools), 2):
        _copy_pools(pools[at : at + 2], found, missing, run, pdl)
    return found


def _copy_pools(pools: tuple[Pool, ...], found: torch.Tensor, missing: torch.Tensor, run: int, pdl: bool) -> None:
    """Copy the missing items of one pool, or of two."""
    G, n = found.shape
    first, second = pools[0], pools[-1]
    chunks = [min(CHUNK, max(1, next_power(p.host.shape[3]))) for p in pools]
    parts = [triton.cdiv(p.host.shape[3], c) for p, c in zip(pools, chunks)]
    both = parts == [1, 1]  # small items: one program loads from both pools at a time
    _copy[(1 if both else sum(parts), n, G)](
        found,
        missing,
        first.host,
        first.staged,
        second.host,
        second.staged,
        n,
        run,
        *first.host.stride()[:3],
        *first.staged.stride()[:3],
        *second.host.stride()[:3],
        *second.staged.stride()[:3],
        first.host.shape[2],
        first.host.shape[3],
        chunks[0],
        parts[0],
        second.host.shape[2],
        second.host.shape[3],
        chunks[-1],
        len(pools) == 2,
        both,
        pdl,
        num_warps=max(1, min(4, max(chunks) // 256)),
        launch_pdl=pdl,
    )


def bring(table: SlotTable, pools: tuple[Pool, ...], places: tuple[torch.Tensor, ...], wanted: torch.Tensor) -> None:
    """Computes what the reference does, in one launch a pool."""
    require_device("bring", table.held, table.where, wanted, *places, *(t for pool in pools for t in pool))
    reference.check_places(table, pools, places, wanted)
    (G, n), wanted, pdl = wanted.shape, wanted.contiguous(), dependent_launch(wanted.device)
    if not n or not G:
        return
    for pool, place in zip(pools, places):
        width = pool.host.shape[3]
        chunk = min(CHUNK, max(1, next_power(width)))
        _bring[(triton.cdiv(width, chunk), n, G)](
            wanted,
            table.held,
            table.where,
            pool.host,
            pool.staged,
            place,
            n,
            table.held.shape[1],
            table.where.shape[1],
            *pool.host.stride()[:3],
            *pool.staged.stride()[:3],
            *place.stride()[:3],
            place.shape[2],
            width,
            chunk,
            pdl,
            num_warps=max(1, min(4, chunk // 256)),
            launch_pdl=pdl,
        )


bring.__doc__ = f"{reference.bring.__doc__}\n\n    {bring.__doc__}"
fetch.__doc__ = f"{reference.fetch.__doc__}\n\n    {fetch.__doc__}"


def place_warps(size: int) -> int:
    """Warps of the program that finds slots for a group's list; size: the larger of the list and the slots. One warp
    needs no barriers."""
    return 1 if size <= 64 else 4 if size <= 512 else 8


@triton.jit
def _oldest(age, wanted):
    """(a, older): the largest age that at least `wanted` slots have or exceed, and how many exceed it. It finds four
    bits at a time; sorting 1024 slots would take 55 exchanges."""
    bins = tl.arange(0, 16)
    there = tl.sum(((age >> 4)[:, None] == bins[None, :]).to(tl.int32), 0)
    high = tl.max(tl.where(tl.cumsum(there, 0, reverse=True) >= wanted, bins, 0), 0)
    older = tl.sum(tl.where(bins > high, there, 0), 0)
    there = tl.sum((age[:, None] == (high * 16 + bins)[None, :]).to(tl.int32), 0)
    low = tl.max(tl.where(older + tl.cumsum(there, 0, reverse=True) >= wanted, bins, 0), 0)
    return high * 16 + low, older + tl.sum(tl.where(bins > low, there, 0), 0)


@triton.jit
def _place(
    WANTED,
    START,
    HELD,
    USED,
    CLOCK,
    COUNT,
    WHERE,
    ORDER,
    FOUND,
    MISSING,
    per_row,
    unit,
    n,
    slots,
    items,
    run,
    NP: tl.constexpr,
    LP: tl.constexpr,
    TAIL: tl.constexpr,
    OLDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a group. A hit is the slot that an item had last, if it still holds it; misses get the least recently
    wanted slots."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.program_id(0).to(tl.int64)
    since, now = tl.load(START + g // per_row) // unit, tl.load(CLOCK + g) + 1
    i, s = tl.arange(0, NP), tl.arange(0, LP)
    # stale = table.held >= since
    stale = tl.load(HELD + g * slots + s, mask=s < slots, other=-1) >= since
    item = tl.load(WANTED + g * n + i, mask=i < n, other=-1).to(tl.int32)
    rest = (item >= 0) & (item < items)
    if TAIL:
        rest = rest & (item != since)
    slot = tl.load(WHERE + g * items + item, mask=rest, other=-1)
    # a stale item is no hit, whether or not the table already says so
    there = rest & (slot >= 0) & (item < since)
    hit = there & (tl.load(HELD + g * slots + slot, mask=there, other=-1) == item)
    miss = rest & ~hit
    tl.debug_barrier()  # after this all threads have read the values that are overwritten below
    tl.store(CLOCK + g, now)
    tl.store(HELD + g * slots + s, -1, mask=stale)
    tl.store(USED + g * slots + s, 0, mask=stale)
    tl.store(USED + g * slots + slot, now, mask=hit)
    misses = tl.sum(miss.to(tl.int32), 0)
    if misses > 0:
        tl.debug_barrier()
        used = tl.load(USED + g * slots + s, mask=s < slots, other=0)
        age = tl.where(used == 0, OLDEST, tl.minimum(now - used, OLDEST)).to(tl.int32)
        bound, older = _oldest(tl.where(s < slots, age, 0), misses)
        # for each slot, how many slots before it are older than the bound, and how many as old: of the latter the
        # lowest are taken, as many as are needed
        passed = tl.cumsum((age > bound).to(tl.int32) + ((age == bound).to(tl.int32) << 16), 0)
        equal, short = passed >> 16, misses - older
        taken = (s < slots) & ((age > bound) | ((age == bound) & (equal <= short)))
        tl.store(ORDER + g * slots + (passed & 0xFFFF) + tl.minimum(equal, short) - 1, s, mask=taken)
        tl.debug_barrier()
        victim = tl.load(ORDER + g * slots + tl.cumsum(miss.to(tl.int32), 0) - 1, mask=miss, other=-1)
        tl.store(HELD + g * slots + victim, item, mask=miss)
        tl.store(USED + g * slots + victim, now, mask=miss)
        tl.store(WHERE + g * items + item, victim, mask=miss)
        slot = tl.where(miss, victim, slot)
    slot = tl.where(rest, slot, -1)
    if TAIL:
        slot = tl.where((item >= 0) & (item == since), slots, slot)
    tl.store(FOUND + g * n + i, tl.where(slot < 0, slot, slot + g * run).to(FOUND.dtype.element_ty), mask=i < n)
    tl.store(MISSING + g * n + i, tl.where(miss, item, -1), mask=i < n)
    hits = tl.sum(hit.to(tl.int32), 0)
    tl.store(COUNT + 2 * g, tl.load(COUNT + 2 * g) + hits)
    tl.store(COUNT + 2 * g + 1, tl.load(COUNT + 2 * g + 1) + misses)


@triton.jit
def _move(
    FROM,
    TO,
    g,
    item,
    slot,
    j,
    group,
    page,
    row,
    to_group,
    to_page,
    to_row,
    PER: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """Words j·C … of one item to its slot."""
    w = j * C + tl.arange(0, C)
    source = FROM + g * group + (item // PER) * page + (item % PER) * row
    to = TO + g * to_group + (slot // PER) * to_page + (slot % PER) * to_row
    tl.store(to + w, tl.load(source + w, mask=w < WIDTH, other=0, cache_modifier=".cg"), mask=w < WIDTH)


@triton.jit
def _copy(
    FOUND,
    MISSING,
    A,
    A_TO,
    B,
    B_TO,
    n,
    run,
    a_group,
    a_page,
    a_row,
    at_group,
    at_page,
    at_row,
    b_group,
    b_page,
    b_row,
    bt_group,
    bt_page,
    bt_row,
    A_PER: tl.constexpr,
    A_WIDTH: tl.constexpr,
    A_CHUNK: tl.constexpr,
    A_PARTS: tl.constexpr,
    B_PER: tl.constexpr,
    B_WIDTH: tl.constexpr,
    B_CHUNK: tl.constexpr,
    TWO: tl.constexpr,
    BOTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (j, i, g): chunk j of the i-th wanted item of a group, if it was a miss; BOTH: its only chunk in either
    pool."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    j, g = tl.program_id(0), tl.program_id(2).to(tl.int64)
    at = g * n + tl.program_id(1)
    item = tl.load(MISSING + at).to(tl.int64)
    if item >= 0:
        slot = tl.load(FOUND + at).to(tl.int64) - g * run
        if BOTH:
            _move(A, A_TO, g, item, slot, 0, a_group, a_page, a_row, at_group, at_page, at_row, A_PER, A_WIDTH, A_CHUNK)
            _move(B, B_TO, g, item, slot, 0, b_group, b_page, b_row, bt_group, bt_page, bt_row, B_PER, B_WIDTH, B_CHUNK)
        elif j < A_PARTS:
            _move(A, A_TO, g, item, slot, j, a_group, a_page, a_row, at_group, at_page, at_row, A_PER, A_WIDTH, A_CHUNK)
        elif TWO:
            _move(
                B,
                B_TO,
                g,
                item,
                slot,
                j - A_PARTS,
                b_group,
                b_page,
                b_row,
                bt_group,
                bt_page,
                bt_row,
                B_PER,
                B_WIDTH,
                B_CHUNK,
            )


@triton.jit
def _bring(
    WANTED,
    HELD,
    WHERE,
    HOST,
    STAGED,
    PLACE,
    n,
    slots,
    items,
    h_group,
    h_page,
    h_row,
    s_group,
    s_page,
    s_row,
    p_group,
    p_page,
    p_row,
    PER: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (j, i, g): chunk j of the i-th wanted item of a group."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    j, g = tl.program_id(0), tl.program_id(2).to(tl.int64)
    item = tl.load(WANTED + g * n + tl.program_id(1)).to(tl.int64)
    if item >= 0:
        slot = tl.load(WHERE + g * items + item).to(tl.int64)
        held = tl.load(HELD + g * slots + tl.maximum(slot, 0)).to(tl.int64)
        if (slot >= 0) & (held == item):
            _move(STAGED, PLACE, g, slot, item, j, s_group, s_page, s_row, p_group, p_page, p_row, PER, WIDTH, CHUNK)
        else:
            _move(HOST, PLACE, g, item, item, j, h_group, h_page, h_row, p_group, p_page, p_row, PER, WIDTH, CHUNK)


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
    """Computes what the reference does, for contiguous bf16 and fp32; raises UnsupportedInput beyond."""
    require_device("write_back", keys, values, host_keys, host_values, start, table.current, low, high, mean)
    (B, KV, S, D), slots, pdl = host_keys.shape, table.held.shape[1], dependent_launch(keys.device)
    check_rows(keys, values, host_keys, host_values, start, (slots + 1) * block, block, low, high, mean)
    some, pooled = low if low is not None else keys, mean if mean is not None else keys
    _write_back[(B * KV,)](
        keys,
        values,
        host_keys,
        host_values,
        start,
        table.current,
        some,
        high if high is not None else keys,
        pooled,
        KV,
        S,
        slots,
        D,
        min(CHANNELS, max(16, next_power(D))),
        block,
        low is not None,
        mean is not None,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


write_back.__doc__ = f"{reference.write_back.__doc__}\n\n    {write_back.__doc__}"


def check_rows(keys, values, host_keys, host_values, start, staged: int, block: int, low, high, mean) -> None:
    """Raise UnsupportedInput for what the kernel cannot take."""
    B, KV, S, D = host_keys.shape
    for name, t, shape in (
        ("keys", keys, (B, KV, staged, D)),
        ("values", values, (B, KV, staged, D)),
        ("host keys", host_keys, (B, KV, S, D)),
        ("host values", host_values, (B, KV, S, D)),
        *((n, t, (B, KV, S // block, D)) for n, t in (("low", low), ("high", high), ("mean", mean)) if t is not None),
    ):
        if t.shape != shape or not t.is_contiguous() or t.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedInput(
                f"write_back takes {name} {shape} contiguous in bf16 or fp32; found {t.dtype} {tuple(t.shape)} with "
                f"strides {t.stride()}"
            )
    if len({t.dtype for t in (keys, values, host_keys, host_values)}) > 1 or (low is None) != (high is None):
        raise UnsupportedInput(
            "write_back takes keys and values of one dtype, and low and high together; found "
            f"{keys.dtype}, {values.dtype}, {host_keys.dtype}, {host_values.dtype}"
        )
    if block > LARGEST or block & (block - 1) or S % block:
        raise UnsupportedInput(
            f"write_back takes blocks of up to {LARGEST} tokens, a power of two that divides the {S} slots; "
            f"found {block}"
        )
    if start.dtype is not torch.int64 or start.shape != (B,):
        raise UnsupportedInput(f"write_back takes start as int64 [{B}]; found {start.dtype} {tuple(start.shape)}")


@triton.jit
def _row(NEAR, FAR, near, far, at, before, own, back, WHOLE: tl.constexpr):
    """A slice of the tail: the token's row, and those before it if `WHOLE`. The latter come from host memory if `back`;
    the token's is written to it."""
    x = tl.load(NEAR + near + at, mask=own | (before & (back == 0) & WHOLE), other=0.0)
    if back != 0:
        old = tl.load(FAR + far + at, mask=before, other=0.0)
        tl.store(NEAR + near + at, old, mask=before)
        x = tl.where(before, old, x)
    tl.store(FAR + far + at, x, mask=own)
    return x


@triton.jit
def _write_back(
    KEYS,
    VALUES,
    HOST_KEYS,
    HOST_VALUES,
    START,
    CURRENT,
    LOW,
    HIGH,
    MEAN,
    heads,
    room,
    slots,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK: tl.constexpr,
    EXTREMES: tl.constexpr,
    POOLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a group: row and KV head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    g, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start = tl.load(START + g // heads)
    number, row = start // BLOCK, start % BLOCK
    back = (tl.load(CURRENT + g) != number).to(tl.int32)
    tl.debug_barrier()  # all threads have read the values that the last lines write
    near, far, count = (g * (slots + 1) + slots) * BLOCK * D, (g * room + number * BLOCK) * D, (row + 1).to(tl.float32)
    for first in tl.static_range(0, D, BD):
        d = first + tl.arange(0, BD)
        inside, at = (d < D)[None, :], i[:, None] * D + d[None, :]
        before, own = (i < row)[:, None] & inside, (i == row)[:, None] & inside
        _row(VALUES, HOST_VALUES, near, far, at, before, own, back, False)
        key = _row(KEYS, HOST_KEYS, near, far, at, before, own, back, EXTREMES or POOLED)
        k, to = widen(key), (g * (room // BLOCK) + number) * D + d
        if EXTREMES:
            seen = before | own
            tl.store(LOW + to, narrow(tl.min(tl.where(seen, k, float("inf")), 0), LOW.dtype.element_ty), mask=d < D)
            tl.store(HIGH + to, narrow(tl.max(tl.where(seen, k, float("-inf")), 0), HIGH.dtype.element_ty), mask=d < D)
        if POOLED:
            tl.store(MEAN + to, narrow(tl.sum(k, 0) / count, MEAN.dtype.element_ty), mask=d < D)
    tl.store(CURRENT + g, number.to(tl.int32))
