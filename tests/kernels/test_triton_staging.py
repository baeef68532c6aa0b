"""Staging of tiles from host memory against a simulation with dictionaries. On a GPU host memory is pinned and
mapped."""

import pytest
import torch

from dsv4.cache.host_tier.memory import HostBuffer
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.staging import fetch, items_of, new_table, paired, write_back
from tests.kernels.gqa_inputs import DEVICE, NAN, randn

BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])
BUFFERS = []  # alive as long as their mapped views


def host(*shape, dtype=torch.float32):
    """A tensor in host memory, filled with noise, as the device sees it."""
    BUFFERS.append(HostBuffer(shape, dtype, torch.device(DEVICE)))
    there = BUFFERS[-1].device
    there.copy_(
        randn(*shape, seed=len(shape), dtype=dtype)
        if dtype.is_floating_point
        else torch.arange(there.numel()).view(shape)
    )
    return there


class Simulation:
    """One group: which item each slot holds, and when it was wanted."""

    def __init__(self, slots):
        self.held, self.used, self.clock, self.hits, self.misses = [None] * slots, [0] * slots, 0, 0, 0

    def fetch(self, wanted, since, tail):
        self.clock += 1
        for s, item in enumerate(self.held):
            if item is not None and item >= since:
                self.held[s], self.used[s] = None, 0
        rest = [i for i in wanted if i >= 0 and not (tail and i == since)]
        for i in (i for i in rest if i in self.held):
            self.used[self.held.index(i)] = self.clock
            self.hits += 1
        missing = [i for i in rest if i not in self.held]
        oldest = sorted(
            range(len(self.held)), key=lambda s: (-min(255, self.clock - self.used[s] if self.used[s] else 255), s)
        )
        for s, i in zip(sorted(oldest[: len(missing)]), missing):
            self.held[s], self.used[s] = i, self.clock
            self.misses += 1
        return [
            len(self.held) if tail and i == since and i >= 0 else self.held.index(i) if i >= 0 else -1 for i in wanted
        ]


def random_list(n, items, generator):
    some = torch.randperm(items, generator=generator)[:n]
    some[torch.rand(n, generator=generator) < 0.2] = -1
    return some


@BACKENDS
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("n,slots,items", [(3, 3, 9), (5, 8, 20), (17, 20, 40), (17, 37, 80)], ids=str)
def test_every_choice_is_staged_as_simulated(n, slots, items, tail, backend):
    """Slots, counters and contents of three groups over forty steps whose lists change, with items that go stale.
    Between two of them go as many fetches as make all slots equally old, and between others nearly as many."""
    rows, per_row, block, D = 3, 2, 4, 6
    G, g = rows * per_row, torch.Generator().manual_seed(n)
    keys, values = host(G, items * block, D), host(G, items * block, D)
    staged = [torch.full((G, (slots + tail) * block, D), NAN, device=DEVICE) for _ in range(2)]
    pools = tuple(paired(items_of(x, block), items_of(y, block)) for x, y in zip((keys, values), staged))
    table, told = new_table(G, items, slots, DEVICE), [Simulation(slots) for _ in range(G)]
    since = last = torch.empty(0)
    for step in range(40):
        ages = {12: 13, 18: 60, 22: 200, 30: 300}.get(step, 0)
        table.clock.add_(ages)
        for one in told:
            one.clock += ages
        since = torch.randint(items // 2, items, (rows,), generator=g) if step % 7 == 0 else since.clamp(max=items)
        for b in range(rows):  # what is stale has other rows now
            for x in (keys, values):
                x[b * per_row : (b + 1) * per_row, int(since[b]) * block :] += 1
        wanted = torch.stack([random_list(n, items, g) for _ in range(G)]).int()
        if step % 5 == 1:
            wanted = last.flip(1)
        if tail:
            wanted[wanted > since.repeat_interleave(per_row).unsqueeze(1)] = -1
        last = wanted
        got = fetch(table, pools, wanted.to(DEVICE), (since * 3 + step % 3).to(DEVICE), 3, tail, backend=backend)
        assert got.dtype is torch.int32
        for k in range(G):
            slot = told[k].fetch(wanted[k].tolist(), int(since[k // per_row]), tail)
            assert got[k].tolist() == slot, (step, k)
            assert table.count[k].tolist() == [told[k].hits, told[k].misses]
            assert table.held[k].tolist() == [-1 if i is None else i for i in told[k].held]
            for x, y in zip((keys, values), staged):
                for i, s in zip(wanted[k].tolist(), slot):
                    if i >= 0 and s < slots:
                        assert torch.equal(y[k, s * block : (s + 1) * block], x[k, i * block : (i + 1) * block]), (
                            step,
                            k,
                            i,
                        )
        if tail:
            assert staged[0][:, slots * block :].isnan().all()  # nobody but the writer touches the tail
    assert sum(t.hits for t in told) > 40 and sum(t.misses for t in told) > 40


@BACKENDS
@pytest.mark.parametrize("kind", ["bf16", "fp8", "odd"])
def test_rows_of_entries(kind, backend):
    """Items of one row: 512 numbers in bf16, 584 bytes in a page of payloads and scales, and 3 bytes."""
    if kind == "fp8":
        layout = pack_layout(RowFormat.KV_FP8, 512, 64)
        there, here = (
            host(2, 3, layout.page, dtype=torch.uint8),
            torch.zeros(2, 2, layout.page, dtype=torch.uint8, device=DEVICE),
        )
        rows = [PackedRows(RowFormat.KV_FP8, x, 512, 64, 64 * x.shape[1]) for x in (there, here)]
        pools = tuple(paired(*(getattr(r, part) for r in rows)) for part in ("payload", "scales"))
        assert [p.item_bytes for p in pools] == [layout.payload, layout.scales] == [576, 8]
        item = lambda k, i, which: torch.cat(
            [getattr(rows[which], part)[k, i // 64, i % 64] for part in ("payload", "scales")]
        )
    else:
        width, dtype = (512, torch.bfloat16) if kind == "bf16" else (3, torch.uint8)
        there, here = host(2, 192, width, dtype=dtype), torch.zeros(2, 128, width, dtype=dtype, device=DEVICE)
        pools = (paired(items_of(there, 1), items_of(here, 1)),)
        item = lambda k, i, which: (there, here)[which][k, i]
    table, g = new_table(2, 192, 100, DEVICE), torch.Generator().manual_seed(0)
    for _ in range(6):
        # int64, and rows of one pool, as attention takes them
        wanted = torch.stack([random_list(40, 192, g) for _ in range(2)])
        got = fetch(table, pools, wanted.to(DEVICE), torch.tensor([192], device=DEVICE), 1, False, 128, backend=backend)
        assert got.dtype is torch.int64
        got = torch.where(got < 0, got, got - 128 * torch.arange(2, device=DEVICE).unsqueeze(1)).tolist()
        for k in range(2):
            assert min(got[k]) >= -1
            for i, s in zip(wanted[k].tolist(), got[k]):
                assert s < 100 and (s >= 0) == (i >= 0) and (i < 0 or torch.equal(item(k, i, 0), item(k, s, 1)))


@BACKENDS
def test_forgotten_items_are_fetched_again(backend):
    there, here = host(1, 8, 4), torch.zeros(1, 4, 4, device=DEVICE)
    pools, table = (paired(items_of(there, 1), items_of(here, 1)),), new_table(1, 8, 4, DEVICE)
    wanted, since = torch.tensor([[1, 5]], dtype=torch.int32, device=DEVICE), torch.tensor([8], device=DEVICE)
    fetch(table, pools, wanted, since, 1, False, backend=backend)
    there.add_(1)
    table.forget(5)
    slots = fetch(table, pools, wanted, since, 1, False, backend=backend)[0].long()
    assert table.count.tolist() == [[1, 3]]
    assert torch.equal(here[0, slots[1]], there[0, 5]) and torch.equal(here[0, slots[0]] + 1, there[0, 1])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block,D", [(16, 24), (32, 80)], ids=str)
def test_a_token_is_written_through(block, D, dtype, backend):
    """Rows at the borders of blocks, one after the other and after rewinds; the summaries are those of a resident
    cache."""
    B, KV, N, slots = 3, 2, 4, 2
    S = N * block
    rows = [host(B, KV, S, D, dtype=dtype) for _ in range(2)]
    resident = [r.clone() for r in rows]
    staged = [torch.full((B, KV, (slots + 1) * block, D), NAN, dtype=dtype, device=DEVICE) for _ in range(2)]
    table, summaries = (
        new_table(B * KV, N, slots, DEVICE),
        [torch.zeros(B, KV, N, D, dtype=dtype, device=DEVICE) for _ in range(3)],
    )
    theirs = [s.clone() for s in summaries]
    starts = [0, block - 1, block + 5]
    for step in range(8):
        if step == 3:
            starts = [2 * block, 3, block - 1]  # on to a border, back by one block, back over one
        if step == 6:
            starts = [block + 2, 2, N * block - 2]
        start = torch.tensor(starts, device=DEVICE)
        for x, y, seed in zip(resident, staged, (50, 51)):
            fresh = randn(B, KV, D, seed=seed + 2 * step, dtype=dtype)
            for b, p in enumerate(starts):
                x[b, :, p] = fresh[b]
                y[b, :, slots * block + p % block] = fresh[b]
        write_back(*staged, *rows, start, table, *summaries, block, backend=backend)
        summarise_blocks(resident[0], start, 1, *theirs, block, backend=backend)
        for x, y, there in zip(resident, staged, rows):
            assert torch.equal(there, x), step
            for b, p in enumerate(starts):
                now = x[b, :, p // block * block : p + 1]
                assert torch.equal(y[b, :, slots * block : slots * block + p % block + 1], now), (step, b)
        assert all(torch.equal(a, b) for a, b in zip(summaries[:2], theirs[:2]))
        assert torch.allclose(
            summaries[2].float(), theirs[2].float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6
        )
        assert table.current.view(B, KV).tolist() == [[p // block] * KV for p in starts]
        starts = [p + 1 for p in starts]


@BACKENDS
def test_a_token_without_summaries(backend):
    rows, staged = (
        [host(1, 1, 32, 16) for _ in range(2)],
        [torch.full((1, 1, 32, 16), NAN, device=DEVICE) for _ in range(2)],
    )
    for y in staged:
        y[..., 16 + 3, :] = 7
    write_back(
        *staged,
        *rows,
        torch.tensor([19], device=DEVICE),
        new_table(1, 2, 1, DEVICE),
        None,
        None,
        None,
        16,
        backend=backend,
    )
    for x, y in zip(rows, staged):
        assert (
            torch.equal(y[..., 16:20, :], x[..., 16:20, :])
            and (x[..., 19, :] == 7).all()
            and y[..., 20:, :].isnan().all()
        )


@BACKENDS
def test_what_is_not_taken_is_named(backend):
    there, here = host(1, 8, 4), torch.zeros(1, 4, 4, device=DEVICE)
    pools, table, since = (
        (paired(items_of(there, 1), items_of(here, 1)),),
        new_table(1, 8, 4, DEVICE),
        torch.tensor([8], device=DEVICE),
    )
    some = torch.zeros(1, 5, dtype=torch.int32, device=DEVICE)
    for wanted, tail, message in (
        (some, False, "lists of 5 items, and a staging buffer of 4 slots"),
        (some[:, :1].short(), False, "int32 or int64"),
        (some[:, :1], True, "5 slots got a pool"),
    ):
        with pytest.raises(UnsupportedInput, match=message):
            fetch(table, pools, wanted, since, 1, tail, backend=backend)
    for make in (
        lambda: paired(there[:, :, None], here[:, :, None].double()),
        lambda: items_of(there, 3),
        lambda: new_table(1, 8, 0, DEVICE),
        lambda: paired(there[:, :, None].mT, here[:, :, None].mT),
    ):
        with pytest.raises(UnsupportedInput):
            make()
