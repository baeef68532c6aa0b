"""Passes as captured steps: one row of many on pages, several together, rows on rings, with drafts and without. On a
CPU the step runs as it is, uncaptured."""

from functools import partial

import pytest
import torch

from dsv4.cache.paged_view import PagedView
from dsv4.cache.paging import pool_pages
from dsv4.engine.generate import generate_speculative
from dsv4.runtime.graph import BlockGraph, DecodeGraph
from dsv4.speculation import MAX_DRAFTS, Static
from dsv4.speculation.captured import Captured, CapturedBlock
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from tests.engine.conftest import paged, prefill, random_ids, same
from tests.engine.test_batch import nothing_is_held, requests_of, run
from tests.engine.test_speculation import DRAFTERS, adds_up, alone, engine_of, knowing, prompts_of, tokens_of

LENGTHS = (130, 5, 259)


@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_on_pages_has_the_bits_of_a_row_on_rings(numeric_model, tokens):
    """Three rows of different lengths by turns, across the ends of windows and pages, with a rewind between."""
    model, ids = numeric_model, random_ids(numeric_model, 3, 320)
    pages = paged(model, 3, 320, max_rewind=8)
    rings = []
    for b, n in enumerate(LENGTHS):
        model.append(ids[:, :n], pages, [n * (row == b) for row in range(3)])
        rings.append(model.new_cache(1, 320, 8))
        model.append(ids[b : b + 1, :n], rings[b])
    verify, graphs = Captured(model, pages), [DecodeGraph(model, cache, tokens) for cache in rings]
    for b in (0, 1, 2, 2, 0, 1, 1, 0):
        now = pages.lengths[b]
        part = torch.zeros(3, tokens, dtype=torch.int64)
        part[b] = ids[b, now : now + tokens]
        logits, streams = verify(part, [tokens * (row == b) for row in range(3)], True)
        expected = graphs[b].step(part[b : b + 1])
        assert same(expected[0], logits[b]) and same(graphs[b].streams, streams[b])
        assert pages.lengths[b] == rings[b].lengths[0] == now + tokens
        back = [int(row == b and tokens > 1) for row in range(3)]
        pages.rewind(back), rings[b].rewind(back[b])


@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_block_on_pages_has_the_bits_of_the_block_alone(numeric_model, tokens):
    model, ids, g = numeric_model, random_ids(numeric_model, 3, 320), torch.Generator().manual_seed(3)
    pages, c = paged(model, 3, 320, max_rewind=8), model.config
    streams = torch.randn(3, 320, c.hc_mult, c.hidden_size, generator=g).to(model.numerics.activation)
    alone, run = [model.new_cache(1, 320, 8) for _ in LENGTHS], CapturedBlock(model, pages)
    graphs = [BlockGraph(model, cache, tokens) for cache in alone]
    for b, n in enumerate(LENGTHS):
        model.mtp_logits(streams[:, :n], ids[:, :n], pages, n_new=[n * (row == b) for row in range(3)], logits="none")
        model.mtp_logits(streams[b : b + 1, :n], ids[b : b + 1, :n], alone[b], logits="none")
    for b in (0, 1, 2, 2, 0, 1):
        part = slice(pages.mtp_lengths[b], pages.mtp_lengths[b] + tokens)
        logits, after = run(streams[:, part], ids[:, part], [tokens * (row == b) for row in range(3)])
        graphs[b].fed.copy_(streams[b : b + 1, part])
        assert same(graphs[b].step(ids[b : b + 1, part])[0], logits[b]) and same(graphs[b].streams, after[b])
        assert after.shape[1] == 1
        assert pages.mtp_lengths[b] == alone[b].mtp_lengths[0] == part.stop and pages.lengths == [0] * 3
        if model.numerics.name == "fp32":
            said = model.mtp_logits(streams[b : b + 1, : part.stop], ids[b : b + 1, : part.stop], logits="last")
            torch.testing.assert_close(said[0], logits[b], rtol=0, atol=2e-4)


FULL, RAGGED = [(1, 1, 1), (3, 1, 2), (2, 3, 1)], [(2, 0, 3), (0, 3, 1), (3, 3, 0), (1, 0, 1), (1, 2, 1)]


def at_each(ids, lengths, counts, width):
    """What follows in each row, right-padded with other tokens."""
    part = torch.full((len(counts), width), 7)
    for row, length, n, own in zip(part, lengths, counts, ids):
        row[:n] = own[length : length + n]
    return part


@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
def test_rows_on_pages_together_have_the_bits_of_rows_on_rings(numeric_model):
    """Ragged passes of three rows, poisoned pages beside them. Then, in fp32, of some of them, up to rounding: products
    of the experts have the rows that tokens choose, and what a resting row computes is another token here than
    there."""
    model, ids = numeric_model, random_ids(numeric_model, 3, 320)
    pages, rings = paged(model, 3, 320, max_rewind=8), model.new_cache(3, 320, 8)
    for b, n in enumerate(LENGTHS):  # in the pieces in which the others run theirs, one row at a time
        for cache in (pages, rings):
            model.append(ids[:, :n], cache, [n * (row == b) for row in range(3)])
    verify, graphs = Captured(model, pages), {}
    for counts in FULL + (RAGGED if model.numerics.name == "fp32" else []):
        width, before = max(counts), pages.lengths
        part = at_each(ids, before, counts, width)
        logits, streams = verify(part, list(counts), True)
        assert pages.lengths == [n + count for n, count in zip(before, counts)]
        graph = graphs[width] = graphs.get(width) or DecodeGraph(model, rings, width)
        expected = graph.step(part)
        equal = same if counts in FULL else partial(torch.allclose, atol=2e-4)
        for b, n in enumerate(counts):
            assert equal(expected[b, :n], logits[b, :n])
            assert equal(graph.streams.view(3, width, *streams.shape[2:])[b, :n], streams[b, :n])
        rings.rewind([width - n for n in counts])
        pages.rewind(0)
    assert {rows for rows, _ in verify.graphs} == {3}, "none was an append, and none a step of one row"


@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
def test_the_block_together_follows_ragged_rows(numeric_model):
    """Each row's last entry that counts, of some of three rows, against the block of whole sequences."""
    model, ids, g = numeric_model, random_ids(numeric_model, 3, 320), torch.Generator().manual_seed(3)
    pages, rings, c = paged(model, 3, 320, max_rewind=8), model.new_cache(3, 320, 8), model.config
    streams = torch.randn(3, 320, c.hc_mult, c.hidden_size, generator=g).to(model.numerics.activation)
    for cache in (pages, rings):
        model.mtp_logits(streams[:, :259], ids[:, :259], cache, n_new=list(LENGTHS), logits="none")
    run, graphs = CapturedBlock(model, pages), {}
    for counts in FULL + (RAGGED if model.numerics.name == "fp32" else []):
        width, before = max(counts), pages.mtp_lengths
        part = at_each(ids, before, counts, width)
        fed = torch.stack(
            [
                torch.nn.functional.pad(own[n : n + count], (0, 0, 0, 0, 0, width - count))
                for own, n, count in zip(streams, before, counts)
            ]
        )
        logits, after = run(fed, part, list(counts))
        assert pages.mtp_lengths == [n + count for n, count in zip(before, counts)] and pages.lengths == [0] * 3
        graph = graphs[width] = graphs.get(width) or BlockGraph(model, rings, width)
        graph.fed.copy_(fed)
        graph.ends(list(counts))
        expected = graph.step(part)
        equal = same if counts in FULL else partial(torch.allclose, atol=2e-4)
        assert all(
            equal(expected[b], logits[b]) and equal(graph.streams[b], after[b, 0]) for b, n in enumerate(counts) if n
        )
        rings.rewind_mtp([width - n for n in counts])
        if model.numerics.name == "fp32":
            for b, n in enumerate(counts):
                if n:
                    end = pages.mtp_lengths[b]
                    said = model.mtp_logits(streams[b : b + 1, :end], ids[b : b + 1, :end], logits="last")
                    torch.testing.assert_close(said[0], logits[b], rtol=0, atol=2e-4)
        pages.rewind_mtp(0)
    assert {rows for rows, _ in run.graphs} == {3}


@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
def test_rows_on_one_prefix_leave_each_others_pages_alone(numeric_model):
    """A page of entries is shared up to a prefix's end, and behind it one row's own: the other writes none there while
    it completes none."""
    model, ids = numeric_model, random_ids(numeric_model, 1, 320)[0].tolist()
    other = random_ids(model, 320, seed=5).tolist()
    cache = paged(model, 2, 320, max_rewind=8)
    prefill(model, cache, ids[:128])
    cache.graft(1, cache.snapshot(0))
    prefill(model, cache, ids[:200])
    verify = Captured(model, cache)
    part = lambda first, second: torch.tensor([[first], [second]])
    held = [t.clone() for t in cache._tensors["csa entries"]]
    mine = list(cache._held[0]["csa entries"].values())
    verify(part(0, other[0]), [0, 1], False)
    verify(part(0, other[1]), [0, 1], False)
    assert mine == list(cache._held[0]["csa entries"].values()) == [*cache._held[1]["csa entries"].values()]
    for before, now in zip(held, cache._tensors["csa entries"]):
        assert torch.equal(before[mine].view(torch.uint8), now[mine].view(torch.uint8))


def test_pads_of_a_joint_pass_take_no_page_from_anyone(model):
    """Rows of one and of four tokens: where pads would need the last free page twice, or a prefix would have to go, the
    pass is an append."""
    ids = random_ids(model, 2, 300)
    cache = paged(
        model,
        2,
        300,
        max_rewind=8,
        pages=pool_pages(model.page_layout().groups, 2, 600, 8, prefixes=2) | {"csa entries": 3},
    )
    model.append(ids[:, :257], cache, chunk=128)
    cache.on_shortage = lambda *_: pytest.fail("pads asked others for pages")
    verify = Captured(model, cache)
    assert not verify.takes([1, 4]) and verify.takes([1, 1]) and cache.pools["csa entries"].live == 2
    logits, _ = verify(ids[:, 257:261], [1, 4], False)
    assert not verify.graphs and cache.lengths == [258, 261]
    torch.testing.assert_close(logits[1, 3], model(ids[1:, :261])[0, -1], rtol=0, atol=2e-4)


@pytest.mark.few(each=lambda p: bool(p["pages"]))
@pytest.mark.parametrize("pages", [{}, {"csa entries": 4}], ids=["room", "evictions"])
@pytest.mark.parametrize("drafter", [*DRAFTERS.values(), lambda: None], ids=[*DRAFTERS, "none"])
def test_the_engine_together_says_what_plain_decoding_says(model, drafter, pages):
    """Greedy and sampled requests that borrow a prefix, join and leave, in passes of all rows that decode."""
    requests = requests_of(model, 5, max_tokens=14)
    drafts = drafter()
    engine, results = engine_of(
        model, drafts, policy=Static(3) if drafts else None, verify=Captured, together=True, pages=pages
    )
    if isinstance(drafts, MTPDrafter):
        drafts._run = CapturedBlock(model, engine.cache)
    run(engine, requests)
    assert tokens_of(results) == {r.id: alone(model, r) for r in requests}
    assert nothing_is_held(engine) and bool(engine.evictions) is bool(pages)
    widths = {rows: {w for r, w in engine.passes.verify.graphs if r == rows} for rows in (1, 3)}
    assert max(widths[3]) == (1 if drafts is None else 3 if pages else 4)  # short of pages rows draft two
    assert not isinstance(drafts, MTPDrafter) or {rows for rows, _ in drafts._run.graphs} >= {3}


@pytest.mark.few(further=[0])
@pytest.mark.parametrize("further", [0, MAX_DRAFTS + 1], ids=["no further", "room behind it"])
def test_rows_together_up_to_the_end_of_their_context(model, monkeypatch, further):
    """Rows whose drafts are right, half right and wrong: one is near the end while another drafts four. Where tables
    have room for that, as they have on a GPU, every pass is a step; else some are appends."""
    monkeypatch.setattr("dsv4.cache.paged.capacity", lambda model, limit: limit + further)
    requests = prompts_of(model, 3, 40, 24)
    right = dict(zip((r.prompt_ids for r in requests), (99, 2, 0)))
    engine, results = engine_of(
        model, knowing(model, requests, right.get), max_context=63, policy=Static(4), verify=Captured, together=True
    )
    append, appends = engine.passes.verify.append, []
    engine.passes.verify.append = lambda ids, counts, *rest: (appends.append(counts), append(ids, counts, *rest))[1]
    run(engine, requests)
    assert tokens_of(results) == {r.id: alone(model, r) for r in requests} and nothing_is_held(engine)
    assert (3, 5) in engine.passes.verify.graphs and bool(appends) is not bool(further)


def test_a_table_is_copied_when_it_has_changed(model, monkeypatch):
    """And when other rows are shown; else the copy stays."""
    cache, ids = paged(model, 3, 320, max_rewind=8), random_ids(model, 3, 320)
    model.append(ids[:, :126], cache, chunk=126)
    view = PagedView(cache, 3)
    shown = lambda rows: [{name: t.physical.clone() for name, t in view.tables.items()} for _ in [view.show(rows, 1)]][
        0
    ]
    held = lambda rows: {
        name: torch.stack([torch.zeros_like(t.physical[0]) if b is None else t.physical[b] for b in rows])
        for name, t in cache.tables.items()
    }
    for rows in ([0, 1, 2], [0, 1, 2], [0, None, 2], [2, 1, 0], [None, None, 1], [0, 1, 2]):
        assert all(torch.equal(table, held(rows)[name]) for name, table in shown(rows).items())
        assert view._main.now == [0 if b is None else cache.lengths[b] for b in rows]
    model.append(ids[:, 126:140], cache)  # another page of most groups
    before = shown([0, 1, 2])
    assert all(torch.equal(table, held([0, 1, 2])[name]) for name, table in before.items())
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *_: pytest.fail("nothing has changed"))
    view.show([0, 1, 2], 1)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_the_engine_says_what_plain_decoding_says(model, drafter):
    """Greedy and sampled requests that borrow a prefix from each other, each alone in captured passes."""
    requests = requests_of(model, 5)
    engine, results = engine_of(model, drafter(), policy=Static(4), verify=Captured)
    drafts = engine.passes.drafter._run = CapturedBlock(model, engine.cache)
    run(engine, requests)
    assert tokens_of(results) == {r.id: alone(model, r) for r in requests}
    assert all(adds_up(r) for r in results.values()) and nothing_is_held(engine)
    assert engine.passes.verify.graphs and bool(drafts.graphs) is (drafter is MTPDrafter)
    assert sorted(r.grafted for r in results.values()) == [0, 128, 128, 128, 128]


@pytest.mark.parametrize("lengths", [(40,), (40, 3, 77)], ids=["one row", "three rows"])
def test_lookup_drafts_in_captured_passes(model, lengths):
    """Rows end apart; the context ends with the longest request."""
    prompts = [random_ids(model, 1, n, seed=n)[0].tolist() for n in lengths]
    run_with = lambda drafts, **how: [
        out.token_ids
        for out in generate_speculative(
            model, prompts, 30, LookupDrafter(2, 1), policy=Static(drafts), max_context=max(lengths) + 29, **how
        )
    ]
    assert run_with(4, verify=partial(Captured, pads=True)) == run_with(0)
