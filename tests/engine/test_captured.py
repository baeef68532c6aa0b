"""Passes as captured steps: one row of many on pages, rows on rings, with drafts and without. On a CPU the step runs as it is, uncaptured."""

from functools import partial

import pytest
import torch

from dsv4.graph import BlockGraph, DecodeGraph
from dsv4.speculation import Static
from dsv4.speculation.captured import Captured, CapturedBlock
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.loop import generate_speculative
from tests.engine.conftest import paged, random_ids, same
from tests.engine.test_batch import nothing_is_held, requests_of, run
from tests.engine.test_speculation import DRAFTERS, adds_up, alone, engine_of, tokens_of

LENGTHS = (130, 5, 259)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_on_pages_has_the_bits_of_a_row_on_rings(numeric_model, tokens):
    """Three rows of different lengths by turns, across the ends of windows and pages, with a rewind between."""
    model, ids = numeric_model, random_ids(numeric_model, 3, 320)
    pages = paged(model, 3, 320, max_rewind=8)
    rings = []
    for b, n in enumerate(LENGTHS):
        model.append(ids[:, :n], pages, [n * (row == b) for row in range(3)])
        rings.append(model.new_cache(1, 320, 8))
        model.append(ids[b:b + 1, :n], rings[b])
    verify, graphs = Captured(model, pages), [DecodeGraph(model, cache, tokens) for cache in rings]
    for b in (0, 1, 2, 2, 0, 1, 1, 0):
        now = pages.lengths[b]
        part = torch.zeros(3, tokens, dtype=torch.int64)
        part[b] = ids[b, now:now + tokens]
        logits, streams = verify(part, [tokens * (row == b) for row in range(3)], True)
        expected = graphs[b].step(part[b:b + 1])
        assert same(expected[0], logits[b]) and same(graphs[b].streams, streams[b])
        assert pages.lengths[b] == rings[b].lengths[0] == now + tokens
        back = [int(row == b and tokens > 1) for row in range(3)]
        pages.rewind(back), rings[b].rewind(back[b])


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_block_on_pages_has_the_bits_of_the_block_alone(numeric_model, tokens):
    model, ids, g = numeric_model, random_ids(numeric_model, 3, 320), torch.Generator().manual_seed(3)
    pages, c = paged(model, 3, 320, max_rewind=8), model.config
    streams = torch.randn(3, 320, c.hc_mult, c.hidden_size, generator=g).to(model.numerics.activation)
    alone, run = [model.new_cache(1, 320, 8) for _ in LENGTHS], CapturedBlock(model, pages)
    graphs = [BlockGraph(model, cache, tokens) for cache in alone]
    for b, n in enumerate(LENGTHS):
        model.mtp_logits(streams[:, :n], ids[:, :n], pages, n_new=[n * (row == b) for row in range(3)], logits="none")
        model.mtp_logits(streams[b:b + 1, :n], ids[b:b + 1, :n], alone[b], logits="none")
    for b in (0, 1, 2, 2, 0, 1):
        part = slice(pages.mtp_lengths[b], pages.mtp_lengths[b] + tokens)
        logits, after = run(streams[:, part], ids[:, part], [tokens * (row == b) for row in range(3)])
        graphs[b].fed.copy_(streams[b:b + 1, part])
        assert same(graphs[b].step(ids[b:b + 1, part])[0], logits[b]) and same(graphs[b].streams, after[b])
        assert pages.mtp_lengths[b] == alone[b].mtp_lengths[0] == part.stop and pages.lengths == [0] * 3
        if model.numerics.name == "fp32":
            said = model.mtp_logits(streams[b:b + 1, :part.stop], ids[b:b + 1, :part.stop], logits="last")
            torch.testing.assert_close(said[0], logits[b], rtol=0, atol=2e-4)


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
    run_with = lambda drafts, **how: [out.token_ids for out in generate_speculative(
        model, prompts, 30, LookupDrafter(2, 1), policy=Static(drafts), max_context=max(lengths) + 29, **how)]
    assert run_with(4, verify=partial(Captured, pads=True)) == run_with(0)
