"""A model on pages equals the model on rings and linear buffers, bit for bit; freed pages are NaN and physically
shuffled."""

import pytest
import torch

from dsv4.cache.paged import PagedCache, new_paged_cache
from dsv4.cache.paging import pool_pages
from dsv4.errors import ContextOverrun, InputError, OutOfPages, RewindError
from tests.engine.conftest import paged, random_ids, same


class Twins:
    """Appends to a Cache and to a PagedCache side by side; every logit that was asked for must agree and be finite."""

    def __init__(self, model, batch: int, max_context: int, max_rewind: int = 16, **options):
        self.model, self.ids = model, random_ids(model, batch, max_context)
        self.plain = model.new_cache(batch, max_context, max_rewind)
        self.paged = paged(model, batch, max_context, max_rewind=max_rewind, **options)

    def append(self, *counts: int, chunk: int | None = None) -> None:
        ids = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for b, n in enumerate(counts):
            ids[b, :n] = self.ids[b, self.plain.lengths[b] : self.plain.lengths[b] + n]
        expected, found = (self.model.append(ids, c, list(counts), chunk=chunk) for c in (self.plain, self.paged))
        for b, n in enumerate(counts):
            assert not found[b, :n].isnan().any(), f"row {b} read a page that was free"
        assert same(expected, found)
        assert self.paged.lengths == self.plain.lengths

    def rewind(self, *counts: int) -> None:
        self.plain.rewind(list(counts))
        self.paged.rewind(list(counts))


@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
def test_prefill_in_chunks_and_ragged_decode_equal_the_plain_cache(numeric_model):
    twins = Twins(numeric_model, 3, 420)
    twins.append(130, 70, 256, chunk=100)
    for i in range(12):
        twins.append(1, int(i % 3 == 0), 1)
    twins.append(5, 3, 7)
    twins.append(120, 1, 0)


@pytest.mark.parametrize("length", [64, 128, 192, 256, 257])
def test_rewinds_across_page_edges_equal_the_plain_cache(numeric_model, length):
    twins = Twins(numeric_model, 1, 300)
    twins.append(length)
    for back in (16, 1, 7):
        twins.rewind(back)
        twins.append(back + 1)
    twins.append(8)


def test_a_row_in_the_middle_leaves_and_another_joins(model):
    twins = Twins(model, 3, 300, max_rewind=0)
    twins.append(100, 130, 20)
    twins.paged.leave(1)
    twins.plain.rewind([0, 130, 0])
    twins.ids[1] = random_ids(model, 300, seed=5)
    twins.append(1, 0, 1)
    twins.append(1, 140, 1)
    twins.append(1, 1, 1)


def test_pages_behind_the_window_and_the_overlap_are_given_back(model):
    cache = paged(model, 1, 1024, max_rewind=0)
    ids, live = random_ids(model, 1, 900), []
    for start in range(0, 900, 100):
        model.append(ids[:, start : start + 100], cache)
        live.append({name: pool.live for name, pool in cache.pools.items()})
    for name in ("window", "csa raw rows", "hca raw rows"):
        assert live[-1][name] <= live[2][name] + 1 <= 18, name
    assert live[-1]["csa entries"] == 4 and live[-1]["hca entries"] == 1
    cache.leave(0)
    assert all(pool.live == 0 for pool in cache.pools.values())


def test_the_mtp_block_drafts_the_same_from_pages(model):
    ids, drafted = random_ids(model, 2, 200), []
    for cache in (model.new_cache(2, 256, 8), paged(model, 2, 256, max_rewind=8)):
        _, streams = model.append(ids[:, :150], cache, return_streams=True)
        found = [model.mtp_logits(streams[:, :149], ids[:, 1:150], cache, chunk=70)]
        for t in range(150, 160):
            _, streams = model.append(ids[:, t : t + 1], cache, return_streams=True)
            found.append(model.mtp_logits(streams, ids[:, t + 1 : t + 2], cache))
            if t == 155:
                cache.rewind_mtp(3)
        drafted.append(torch.cat(found, 1))
    assert same(*drafted) and not drafted[1].isnan().any()


def test_drafts_are_discarded_at_once_and_committed_pages_are_not(model):
    twins = Twins(model, 1, 300, max_rewind=80)
    twins.append(60)
    before = {name: pool.live for name, pool in twins.paged.pools.items()}
    twins.paged.speculate(0)
    twins.append(70)
    assert twins.paged.pools["window"].drafts == 2
    twins.paged.discard(0)
    twins.plain.rewind(70)
    assert twins.paged.lengths == [60] and all(pool.drafts == 0 for pool in twins.paged.pools.values())
    assert {name: pool.live for name, pool in twins.paged.pools.items()} == before
    twins.paged.speculate(0)
    twins.append(70)
    twins.rewind(2)
    twins.paged.commit(0)
    twins.paged.discard(0)
    assert twins.paged.lengths == [128] and twins.paged.pools["window"].drafts == 0
    twins.append(30)


def test_a_step_without_pages_is_refused_and_takes_none(model):
    pages = pool_pages(model.page_layout().groups, 2, 512, 0, 128)
    cache = new_paged_cache(model, 2, 1024, max_rewind=0, pages=pages | {"csa entries": 3})
    ids = random_ids(model, 2, 600)
    model.append(ids[:, :256], cache, chunk=128)
    live = {name: pool.live for name, pool in cache.pools.items()}
    with pytest.raises(OutOfPages, match="need 2 pages of csa entries, 1 of 3 are free; end or evict a request"):
        model.append(ids[:, 256:300], cache)
    assert cache.lengths == [256, 256] and all(pool.live <= live[name] for name, pool in cache.pools.items())
    cache.leave(1)
    expected = model.append(ids[:1, :300], model.new_cache(1, 300), chunk=256)
    found = model.append(torch.cat((ids[:1, 256:300], ids[:1, :44])), cache, n_new=[44, 0])
    torch.testing.assert_close(found[:1], expected[:, 256:], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "change,match",
    [
        (dict(max_context=2049), "max_context 2049 exceeds the checkpoint.s max_position_embeddings 2048"),
        (dict(batch=0), "batch of a cache is int 0"),
        (dict(pages={"window": 3}), "at least one for each of"),
        (dict(reach=63), "room for 63 tokens a row; expected max_context 64 … 2048"),
        (dict(reach=2049), "expected max_context 64 … 2048"),
    ],
    ids=[
        "beyond the checkpoint",
        "no rows",
        "a group without pages",
        "tables too short",
        "tables beyond the checkpoint",
    ],
)
def test_sizes_that_cannot_be_are_named(model, change, match):
    asked = dict(batch=1, max_context=64, pages=pool_pages(model.page_layout().groups, 1, 64)) | change
    with pytest.raises(InputError, match=match):
        PagedCache(model.page_layout(), **asked)


def test_overruns_are_refused(model):
    cache = paged(model, 1, 64)
    with pytest.raises(ContextOverrun):
        model.append(torch.zeros(1, 65, dtype=torch.int64), cache)


def test_a_graft_cannot_be_rewound_into_its_prefix(model):
    cache = paged(model, 2, 256, max_rewind=8)
    ids = random_ids(model, 2, 130)
    model.append(ids[:, :128], cache, n_new=[128, 0])
    cache.graft(1, cache.snapshot(0))
    model.append(ids[:, 128:130], cache, n_new=[0, 2])
    with pytest.raises(RewindError, match="row 1 was grafted at 128 tokens and cannot go back to 127"):
        cache.rewind([0, 3])
    cache.rewind([0, 2])


def test_figures_add_up(model):
    cache = paged(model, 2, 512, max_rewind=0)
    model.append(random_ids(model, 2, 200), cache)
    figures = cache.figures()
    assert figures["window"]["live"] == 8 and figures["window"]["fragmentation"] == 1 - 400 / (8 * 64)
    assert figures["csa entries"]["fragmentation"] == 1 - 100 / (2 * 64) and figures["csa entries"]["shared"] == 0
    assert figures["hca entries"] == dict(
        pages=3, live=2, shared=0, drafts=0, peak=2, pressure=2 / 3, fragmentation=1 - 2 / 128
    )


def test_drafts_fit_where_pages_are_free_and_final_tokens_lie_on_no_draft_page(model):
    """A row at the end of a page; the window's next page is for a final token, the one after for drafts alone."""
    cache = paged(
        model, 1, 512, max_rewind=9, pages=pool_pages(model.page_layout().groups, 1, 512, 9) | {"csa entries": 1}
    )
    ids = random_ids(model, 1, 400)
    model.append(ids[:, :251], cache, chunk=128)
    live = {name: pool.live for name, pool in cache.pools.items()}
    assert cache.fits([0], 8) and not cache.fits([0], 9), "the 260th token completes an entry of another page"
    assert all(pool.live <= live[name] for name, pool in cache.pools.items()), "asking takes no page"
    model.append(ids[:, 251:256], cache)
    cache.make_room(slice(0, 1), 1)
    cache.speculate(0, final=1)
    cache.make_room(slice(0, 1), 3)
    assert cache.pools["window"].drafts == 0, "the page of the final token holds the drafts too"
    model.append(ids[:, 256:259], cache)
    cache.discard(0)
    assert cache.lengths == [257] and not cache.fits([0], 3) and cache.fits([0], 2)
    cache.speculate(0, final=1)
    cache.discard(0)
    assert cache.lengths == [257], "nothing was appended"
