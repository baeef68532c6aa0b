"""Rounds on pages that were all taken beforehand: the text of rounds on rings, and pressure as the pools would have
it."""

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.allotted import Allotted
from dsv4.cache.paged import new_paged_cache
from dsv4.cache.paging import under_pressure
from dsv4.errors import OutOfPages
from dsv4.speculation import Static, on_device
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.rounds import Rounds
from tests.speculation.scripted import prompt_of

REWIND = 9


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


def pool(model, rows, context, **fewer):
    """Pools in which every row can be full; fewer: pages of one of them."""
    whole = new_paged_cache(model, rows, context, max_rewind=REWIND)
    pages = {name: pool.pages for name, pool in whole.pools.items()} | fewer
    return new_paged_cache(model, rows, context, max_rewind=REWIND, pages=pages, poison=True)


def rounds(model, cache, ids, new, size, drafter=MTPDrafter()):
    tokens, *start = primed(model, cache, ids, drafter=drafter)
    policy = on_device(Static(size), len(ids), "cpu")
    return Rounds(model, cache, 8, tokens, *start, [n - 1 for n in new], (), policy, ahead=1)


@pytest.mark.parametrize("drafter", [MTPDrafter(), LookupDrafter(1, 1)], ids=lambda d: d.name)
def test_text_is_that_of_rings(model, drafter):
    """Prompts over several pages, and a row that goes on long after its window's pages have come round again."""
    ids, new = [prompt_of(model, 300), prompt_of(model, 5)], (30, 290)
    want = rounds(model, model.new_cache(2, 340, REWIND), ids, new, 3, drafter).run()
    whole = pool(model, 3, 340)
    cache = Allotted(whole, 2)
    cache.allot([340, 310])
    found = rounds(model, cache, ids, new, 3, drafter)
    assert found.run() == want
    cache.close()
    assert all(p.live == 0 for p in whole.pools.values()) and all(not t.physical.any() for t in whole.tables.values())


def test_pressure_is_that_of_pages_taken_as_rows_grow(model):
    """At every length, beside a cache whose rows take and give back pages."""
    taken, cache = pool(model, 2, 340), Allotted(pool(model, 2, 340), 2)
    taken.poison = False
    none = torch.tensor([False, False])
    for n in range(1, 330):
        for b, tokens in ((0, n), (1, max(1, n - 100))):
            for lengths in (taken._main, taken._mtp):
                lengths.now[b] = lengths.high[b] = lengths.low[b] = tokens
            for mtp in (False, True):
                taken.make_room(slice(b, b + 1), 1, mtp)
        found = cache.live(torch.tensor([n, max(1, n - 100)]), none)
        assert {name: int(v) for name, v in found.items()} == {name: p.live for name, p in taken.pools.items()}, n
    alone = cache.live(torch.tensor([300, 300]), torch.tensor([True, False]))
    assert {k: 2 * int(v) for k, v in alone.items()} == {
        k: int(v) for k, v in cache.live(torch.tensor([300, 300]), none).items()
    }


def test_under_pressure_rounds_draft_less(model):
    """Sizes fall to 2 in the first round that begins with more than 85 % of a pool live, and not before."""
    ids, new, seen = [prompt_of(model, 20), prompt_of(model, 9)], (300, 300), []
    whole = pool(model, 2, 340, **{"csa entries": 4})
    cache = Allotted(whole, 2)
    cache.allot([340, 340])
    found = rounds(model, cache, ids, new, 8)
    real = found._round

    def look(D):
        live = cache.live(found.start, found.done)
        seen.append((D, any(under_pressure(int(n), whole.pools[name].pages) for name, n in live.items())))
        real(D)

    found._round = look
    found.run()
    full = [(D, pressed) for D, pressed in seen[:-8]]  # at the end requests have room for fewer
    assert {D for D, pressed in full if pressed} == {2} and {D for D, pressed in full if not pressed} == {8}


def test_pools_that_are_too_small_are_refused_and_left_as_they_were(model):
    whole = pool(model, 2, 340, **{"csa entries": 3})
    with pytest.raises(
        OutOfPages,
        match="2 rows of 680 tokens need 4 pages of csa entries, and it has 3; run fewer requests at once",
    ):
        Allotted(whole, 2).allot([340, 340])
    assert all(p.live == 0 for p in whole.pools.values())
